"""The Open Inference Protocol at a real node: with `tritonclient`, compressed, and refused."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.servers.shared.http_messages import inflate
from hawkvision.core.errors import BadField, TooLarge
from hawkvision.system.child_server import ServerProcess
from tests.edge.conftest import Caller, Reply
from tests.edge.peer import Peer
from tests.images import encoded

MODEL = "/v2/models/imagenet"
LENGTH = "Inference-Header-Content-Length"


def request(*images: bytes, **more: Any) -> tuple[bytes, str]:
    """A request with its images in binary, and the length of its JSON."""
    data = b"".join(struct.pack("<I", len(image)) + image for image in images)
    tensor = {"name": "image", "shape": [len(images), 1], "datatype": "BYTES"}
    head = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}], **more}
    text = json.dumps(head).encode()
    return text + data, str(len(text))


def infer(caller: Caller, *images: bytes, **more: Any) -> Reply:
    body, length = request(*images, **more)
    return caller.send("POST", f"{MODEL}/infer", body, {LENGTH: length})


def outputs(reply: Reply) -> dict[str, Any]:
    return {output["name"]: output["data"] for output in reply.json["outputs"]}


def test_an_image_is_answered_as_by_classify(caller: Caller) -> None:
    expected = caller.classify(encoded(), "quality=fast").json
    reply = infer(caller, encoded(), id="r1", parameters={"quality": "fast"})
    assert reply.status == 200, reply.body
    assert reply.json["id"] == "r1"
    assert (outputs(reply)["label"], outputs(reply)["index"]) == ([expected["label"]], [expected["index"]])
    assert outputs(reply)["confidence"] == pytest.approx([expected["confidence"]], abs=1e-6)
    said = reply.json["parameters"]
    assert (said["variant"], said["tier"], said["status"]) == (
        expected["model"],
        "edge",
        expected["accuracy"]["status"],
    )


def test_images_in_json_are_base64(caller: Caller) -> None:
    data = [base64.b64encode(encoded(seed=seed)).decode() for seed in range(3)]
    tensor = {"name": "image", "shape": [3], "datatype": "BYTES", "data": data}
    reply = caller.send("POST", f"{MODEL}/infer", json.dumps({"inputs": [tensor]}).encode())
    assert reply.status == 200, reply.body
    assert len(outputs(reply)["label"]) == 3


def test_a_raw_body_is_one_image_and_takes_fields_from_the_query(caller: Caller) -> None:
    reply = caller.send("POST", f"{MODEL}/versions/1/infer?quality=fast", encoded(), {LENGTH: "0"})
    assert (reply.status, reply.json["parameters"]["tier"]) == (200, "edge")


def test_a_target_that_the_edge_cannot_keep_is_answered_by_the_datacenter(caller: Caller, peer: Peer) -> None:
    peer.bodies.clear()
    reply = infer(caller, encoded(seed=5), encoded(seed=6), parameters={"quality": "best"})
    said = reply.json["parameters"]
    assert (said["tier"], said["variant"], said["escalated"], said["reason"]) == (
        "datacenter",
        "reference",
        True,
        "target",
    )
    assert sorted(peer.bodies) == sorted([encoded(seed=5), encoded(seed=6)])


@pytest.mark.parametrize(("name", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies_are_read(caller: Caller, name: str, compress: Any) -> None:
    body, length = request(encoded())
    reply = caller.send("POST", f"{MODEL}/infer", compress(body), {LENGTH: length, "Content-Encoding": name})
    assert reply.status == 200, reply.body


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "says"),
    [
        ("/infer", b"{", {}, 400, "body:"),
        ("/infer", b"{}", {LENGTH: "9"}, 400, LENGTH),
        ("/infer", b"{}", {"Content-Encoding": "gzip"}, 400, "Content-Encoding"),
        ("/infer", gzip.compress(bytes(1_000_000)), {"Content-Encoding": "gzip"}, 413, "300000 bytes"),
        ("/infer", b"{}", {"Content-Encoding": "br"}, 415, "'br'"),
        ("/infer", bytes(300_001), {LENGTH: "0"}, 413, "300000"),
        ("/infer", b"hello", {LENGTH: "0"}, 415, "JPEG"),
        ("/infer?min_accuracy=0.999", encoded(), {LENGTH: "0"}, 422, "0.999"),
        ("/versions/2/infer", encoded(), {LENGTH: "0"}, 404, "version"),
        ("x/infer", encoded(), {LENGTH: "0"}, 404, "'imagenetx'"),
        ("/a/b/infer", encoded(), {LENGTH: "0"}, 404, "no such path"),
    ],
)
def test_every_mistake_has_its_status_and_says_where(
    caller: Caller, path: str, body: bytes, headers: dict[str, str], status: int, says: str
) -> None:
    reply = caller.send("POST", MODEL + path, body, headers)
    assert reply.status == status, reply.body
    assert says in reply.json["error"]
    assert infer(caller, encoded()).status == 200


def test_of_several_images_the_broken_one_is_named(caller: Caller) -> None:
    reply = infer(caller, encoded(), encoded()[:100], encoded())
    assert (reply.status, reply.json["code"]) == (400, "bad_image")
    assert reply.json["error"].startswith("image[1]: ")


def test_inference_takes_only_post(caller: Caller) -> None:
    assert caller.get(f"{MODEL}/infer").status == 405


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("/v2", "name", "hawkvision"),
        ("/v2/health/live", "live", True),
        ("/v2/health/ready", "ready", True),
        (MODEL, "versions", ["1"]),
        (f"{MODEL}/versions/1", "inputs", [{"name": "image", "datatype": "BYTES", "shape": [-1]}]),
        (f"{MODEL}/ready", "ready", True),
        (f"{MODEL}/versions/1/ready", "name", "imagenet"),
        (f"{MODEL}/config", "max_batch_size", 0),
    ],
)
def test_server_and_model_describe_themselves(caller: Caller, path: str, key: str, value: object) -> None:
    reply = caller.get(path)
    assert (reply.status, reply.json[key]) == (200, value)


@pytest.mark.parametrize("path", ["/v2/models/dogs", "/v2/models/dogs/ready", f"{MODEL}/versions/3/ready", "/v2/x"])
def test_unknown_tasks_and_versions_are_not_found(caller: Caller, path: str) -> None:
    reply = caller.get(path)
    assert (reply.status, reply.json["code"]) == (404, "not_found")


def test_each_image_is_counted(caller: Caller) -> None:
    def counted() -> float:
        lines = caller.get("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("hawkvision_requests_total{"))

    before = counted()
    assert infer(caller, encoded(), encoded(seed=1), parameters={"quality": "fast"}).status == 200
    assert counted() == before + 2


# -------------------------------------------------------------------------------------------------- inflating


@given(data=st.binary(max_size=500), name=st.sampled_from(["gzip", "x-gzip", "deflate", "identity"]))
def test_inflating_undoes_compressing_and_never_makes_more_than_the_limit(data: bytes, name: str) -> None:
    body = data if name == "identity" else zlib.compress(data) if name == "deflate" else gzip.compress(data)
    assert inflate(body, name.upper(), 500) == data
    if name != "identity" and data:
        with pytest.raises(TooLarge):
            inflate(body, name, len(data) - 1)


@given(body=st.binary(max_size=60), damage=st.integers(0, 30))
def test_a_body_in_another_encoding_than_declared_is_refused(body: bytes, damage: int) -> None:
    with pytest.raises(BadField, match="Content-Encoding"):
        inflate(b"no" + body, "gzip", 500)
    whole = zlib.compress(body)
    with pytest.raises(BadField, match="Content-Encoding"):
        inflate(whole[: min(damage, len(whole) - 1)], "deflate", 500)
    with pytest.raises(BadField, match="Content-Encoding"):
        inflate(whole + b"more", "deflate", 500)


# -------------------------------------------------------------------------------------- the client of others


def peers(module: str = "tritonclient.http") -> Any:
    return pytest.importorskip(module, reason="tritonclient[http] is not installed")


@pytest.fixture
def triton(edge: ServerProcess) -> Iterator[Any]:
    client = peers().InferenceServerClient(f"127.0.0.1:{edge.port}")
    yield client
    client.close()


def image_tensor(*images: bytes, binary: bool = True) -> Any:
    tensor = peers().InferInput("image", [len(images), 1], "BYTES")
    data = np.array([base64.b64encode(p) if not binary else p for p in images], object).reshape(-1, 1)
    tensor.set_data_from_numpy(data, binary_data=binary)
    return tensor


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_gets_the_answers_of_classify(
    caller: Caller, triton: Any, compression: str | None, binary: bool
) -> None:
    expected = caller.classify(encoded(), "quality=fast").json
    result = triton.infer(
        "imagenet",
        [image_tensor(encoded(), encoded(), binary=binary)],
        request_id="r9",
        parameters={"quality": "fast"},
        timeout=60_000_000,
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    assert result.as_numpy("label").tolist() == [expected["label"].encode()] * 2
    assert result.as_numpy("index").tolist() == [expected["index"]] * 2
    assert result.as_numpy("confidence") == pytest.approx([expected["confidence"]] * 2, abs=1e-6)
    said = result.get_response()
    assert (said["id"], said["parameters"]["variant"]) == ("r9", expected["model"])


def test_tritonclient_gets_the_outputs_that_it_asks_for(triton: Any) -> None:
    wanted = [
        peers().InferRequestedOutput("index", binary_data=False),
        peers().InferRequestedOutput("confidence", class_count=3),
    ]
    result = triton.infer("imagenet", [image_tensor(encoded())], outputs=wanted, parameters={"quality": "fast"})
    assert result.as_numpy("label") is None
    listed = result.as_numpy("confidence")
    assert listed.shape == (1, 3)
    assert int(listed[0, 0].decode().split(":")[1]) == result.as_numpy("index")[0]


def test_tritonclient_finds_the_server_and_its_model(triton: Any) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("imagenet")
    assert not triton.is_model_ready("dogs")
    assert "binary_tensor_data" in triton.get_server_metadata()["extensions"]
    assert triton.get_model_metadata("imagenet")["inputs"][0]["name"] == "image"
    assert triton.get_model_config("imagenet")["name"] == "imagenet"


def test_tritonclient_raises_the_nodes_error(triton: Any) -> None:
    refused = peers("tritonclient.utils").InferenceServerException
    with pytest.raises(refused, match="quality: expected one of"):
        triton.infer("imagenet", [image_tensor(encoded())], parameters={"quality": "red"})
    with pytest.raises(refused, match="image\\[1\\]: JPEG"):
        triton.infer("imagenet", [image_tensor(encoded(), encoded()[:200])])


def test_tritonclient_may_send_unknown_parameters(triton: Any) -> None:
    result = triton.infer(
        "imagenet", [image_tensor(encoded())], parameters={"colour": "red", "quality": "fast"}, priority=3
    )
    assert result.get_response()["parameters"]["ignored_parameters"] == "colour"


def test_tritonclient_gets_statistics_that_grow_with_each_image(triton: Any) -> None:
    def counted() -> dict[str, Any]:
        (of_task,) = triton.get_inference_statistics("imagenet", "1")["model_stats"]
        assert triton.get_inference_statistics()["model_stats"][0]["name"] == of_task["name"] == "imagenet"
        return of_task  # type: ignore[no-any-return]

    before = counted()
    triton.infer("imagenet", [image_tensor(encoded(), encoded())], parameters={"quality": "fast"})
    with pytest.raises(peers("tritonclient.utils").InferenceServerException):
        triton.infer("imagenet", [image_tensor(b"no image")])
    after = counted()
    assert after["inference_count"] == before["inference_count"] + 2
    parts = {
        name: (after["inference_stats"][name], before["inference_stats"][name]) for name in after["inference_stats"]
    }
    assert {name for name, (a, b) in parts.items() if a["count"] > b["count"]} == {
        "success",
        "fail",
        "queue",
        "compute_infer",
    }
    assert parts["success"][0]["ns"] > parts["success"][1]["ns"]
    assert after["last_inference"] > before["last_inference"]
    assert abs(after["last_inference"] / 1e3 - time.time()) < 600


def test_tritonclient_loads_and_unloads_what_is_in_the_repository(triton: Any) -> None:
    for call, state in ((triton.unload_model, "UNAVAILABLE"), (triton.load_model, "READY")):
        call("imagenet")
        index = triton.get_model_repository_index()
        assert index == [{"name": "imagenet", "version": "1", "state": state, "reason": ""}]
        assert triton.is_model_ready("imagenet") == (state == "READY")
    refused = peers("tritonclient.utils").InferenceServerException
    with pytest.raises(refused, match="task 'dogs' is not served here"):
        triton.load_model("dogs")
    with pytest.raises(refused, match="cannot load 'imagenet' with parameters"):
        triton.load_model("imagenet", config="{}")


def test_tritonclient_is_told_that_there_is_no_shared_memory(triton: Any) -> None:
    refused = peers("tritonclient.utils").InferenceServerException
    tensor = peers().InferInput("image", [1, 1], "BYTES")
    tensor.set_shared_memory("r", 100)
    with pytest.raises(refused, match="shares no memory with its callers"):
        triton.infer("imagenet", [tensor])
    wanted = peers().InferRequestedOutput("label")
    wanted.set_shared_memory("r", 100)
    with pytest.raises(refused, match="shares no memory with its callers"):
        triton.infer("imagenet", [image_tensor(encoded())], outputs=[wanted])
