"""One handler for tasks of every kind: typed forms, DeepStack's form, and the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from edge.run import _listen, _uvicorn_server
from edge.servers import openapi
from edge.servers.datagram import DatagramServer
from edge.servers.deepstack import MOST, UNKEYED_BYTES
from edge.servers.shared.frontend import Frontend
from edge.serving.tasks import ServedTasks, TaskFailure
from hawkvision.client import AsyncClient, Client, OtherPrediction, Transport, asynchronous
from hawkvision.core.errors import BadField, ManifestError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import Answer
from hawkvision.servers.connections import Limits
from hawkvision.servers.keys import Keys
from hawkvision.tasks.classification import Classification
from hawkvision.tasks.detection import Detection
from hawkvision.tasks.registry import task_kind
from loadgen.analysis.summary import meaning_of_right, summarise
from loadgen.clients.engine import Engine, LoadJob, Protocol, ServerAddress, SharedImages, client_for
from loadgen.workload.judging import KindSpec, Label, path_of, rightness, truths
from loadgen.workload.record import Origin, RequestOutcome, Run, TargetClass
from tests.clocks import ManualClock
from tests.edge.bench import SURE, bench
from tests.images import encoded

T = TypeVar("T")
HEIGHT, WIDTH = 96, 128
LEFT = (WIDTH - HEIGHT) // 2
"""Of the square that the model is given."""
IMAGE = encoded(height=HEIGHT, width=WIDTH)
SQUARE = encoded(height=HEIGHT, width=HEIGHT)
KEY = "a-key-of-some-length"
ANIMALS = task_kind("detection", ["cat", "dog"], {"threshold": 0.3})
BOXES = {
    "boxes": np.array([[[0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.5, 0.25], [0.1, 0.1, 0.2, 0.2]]], np.float32),
    "scores": np.array([[0.9, 0.5, 0.35]], np.float32),
    "classes": np.array([[1.0, 0.0, 0.0]], np.float32),
}
CROWD = {
    "boxes": np.tile(np.array([0.1, 0.1, 0.9, 0.9], np.float32), (1, 30, 1)),
    "scores": np.linspace(0.99, 0.5, 30, dtype=np.float32)[np.newaxis],
    "classes": np.zeros((1, 30), np.float32),
}


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def post(port: int, path: str, body: bytes = IMAGE, headers: dict[str, str] | None = None) -> Reply:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", path, body, headers or {})
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


def get(port: int, path: str) -> Reply:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


@asynccontextmanager
async def served(boxes: dict[str, Any], key: str | None = None) -> AsyncIterator[int]:
    """The port of a node with a task of classification, one of detection, and one that could not be loaded."""
    async with (
        bench(None, SURE) as digits,
        bench(None, SURE, task="animals", kind=ANIMALS, tensors=boxes) as animals,
    ):
        frontend = Frontend(EdgeMetrics(), digits.clock, Keys(key), 2 * UNKEYED_BYTES)
        failed = TaskFailure("crowds", "no profile", "counting")
        frontend.mark_ready(ServedTasks([digits.node, animals.node, failed]))
        datagram = await DatagramServer.open(EdgeConfig(), 0, frontend, 64)
        frontend.transports = datagram.offered.transports
        try:
            async with listening(frontend) as port:
                yield port
        finally:
            await datagram.close(5.0)


@asynccontextmanager
async def listening(frontend: Frontend) -> AsyncIterator[int]:
    """The port at which a front end is served, as `hawkvision edge up` does."""
    listener = _listen("127.0.0.1", 0)
    server = _uvicorn_server(frontend, Limits(100, 100), EdgeConfig(), None)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


def with_node(calls: Callable[[int], T], boxes: dict[str, Any] = BOXES, key: str | None = None) -> T:
    """What calls to the port of such a node give."""

    async def scenario() -> T:
        async with served(boxes, key) as port:
            return await asyncio.to_thread(calls, port)

    return asyncio.run(scenario())


def test_a_typed_form_is_answered_by_the_first_task_of_its_kind() -> None:
    def calls(port: int) -> list[Reply]:
        return [post(port, path) for path in ("/v1/infer", "/v1/classify", "/v1/detect", "/v1/infer?task=animals")]

    infer, classify, detect, named = with_node(calls)
    assert [reply.status for reply in (infer, classify, detect, named)] == [200] * 4
    assert (infer.json["task"], classify.json["task"], detect.json["task"]) == ("digits", "digits", "animals")
    assert classify.json["label"] == "3"
    objects = detect.json["objects"]
    assert [(each["label"], each["index"]) for each in objects] == [("dog", 1), ("cat", 0), ("cat", 0)]
    assert named.json["objects"] == objects
    assert detect.json["confidence"] == pytest.approx(0.5, abs=0.5)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v1/detect?task=digits", 400, "'digits' is of kind 'classification', not 'detection'; POST /v1/classify"),
        ("/v1/classify?task=animals", 400, "'animals' is of kind 'detection'"),
        ("/v1/classify?task=crowds", 400, "'crowds' is of kind 'counting', not 'classification'; POST /v1/infer"),
        ("/v1/infer?task=crowds", 503, "'crowds' cannot be served: no profile"),
        ("/v1/detect?task=cats", 404, "'digits' (classification), 'animals' (detection), 'crowds' (counting)"),
    ],
)  # fmt: skip
def test_a_typed_form_refuses_tasks_of_another_kind(path: str, status: int, says: str) -> None:
    def calls(port: int) -> list[Reply]:
        version_10 = post(port, path, headers={"Expect": "100-continue"})  # goes uvicorn's way
        return [post(port, path), version_10]

    for reply in with_node(calls):
        assert (reply.status, reply.json["code"]) == (
            status,
            {400: "bad_field", 404: "not_found", 503: "not_ready"}[status],
        )
        assert says in reply.json["error"]


def test_without_a_task_of_its_kind_a_typed_form_is_not_found() -> None:
    async def scenario() -> Reply:
        async with bench(None, SURE) as digits:
            frontend = Frontend(EdgeMetrics(), digits.clock, Keys(), 100_000)
            frontend.mark_ready(ServedTasks([digits.node]))
            listener = _listen("127.0.0.1", 0)
            server = _uvicorn_server(frontend, Limits(100, 100), EdgeConfig(), None)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                return await asyncio.to_thread(post, listener.getsockname()[1], "/v1/detect")
            finally:
                server.should_exit = True
                await serving

    reply = asyncio.run(scenario())
    assert reply.status == 404
    assert (
        "no task of kind 'detection' is served here; this node serves 'digits' (classification)" in reply.json["error"]
    )


# ------------------------------------------------------------------------------------------------------ DeepStack


def as_frigate(port: int, image: bytes, api_key: str = "", path: str = "/v1/vision/detection") -> bytes:
    """The bytes that Frigate's detector `deepstack` sends.

    It calls `requests.post(url, data={"api_key": …}, files={"image": …}, timeout=…)`.
    """
    boundary = b"0f1e2d3c4b5a69788796a5b4c3d2e1f0"
    body = (
        b"--" + boundary + b'\r\nContent-Disposition: form-data; name="api_key"\r\n\r\n' + api_key.encode() + b"\r\n"
        b"--" + boundary + b'\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n\r\n' + image
        + b"\r\n--" + boundary + b"--\r\n"
    )  # fmt: skip
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUser-Agent: python-requests/2.32.5\r\n"
        "Accept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: keep-alive\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: multipart/form-data; boundary={boundary.decode()}\r\n\r\n"
    )
    return head.encode() + body


def exchange(port: int, request: bytes) -> Reply:
    """The reply to bytes that are written as they are."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.connect()
        connection.send(request)
        reply = http.client.HTTPResponse(connection.sock, method="POST")
        reply.begin()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


def test_frigates_detector_gets_objects_in_pixels() -> None:
    reply = with_node(lambda port: exchange(port, as_frigate(port, IMAGE)))
    assert reply.status == 200, reply.body
    assert reply.json["success"] is True
    assert reply.json["duration"] > 0
    dog, cat = reply.json["predictions"]  # the third is less confident than 0.4
    assert dog == {
        "label": "dog", "confidence": pytest.approx(0.9), "x_min": LEFT + HEIGHT // 4, "y_min": HEIGHT // 2,
        "x_max": LEFT + HEIGHT * 3 // 4, "y_max": HEIGHT,
    }  # fmt: skip
    assert (cat["label"], cat["x_min"], cat["y_max"]) == ("cat", LEFT, HEIGHT // 4)
    assert type(cat["x_min"]) is int


def test_the_bytes_are_those_of_the_package_that_frigate_uses() -> None:
    requests = pytest.importorskip("requests")
    request = requests.Request(
        "POST", "http://127.0.0.1:80/v1/vision/detection", data={"api_key": "k"}, files={"image": IMAGE}
    )
    prepared = requests.Session().prepare_request(request)
    head, _, body = as_frigate(80, IMAGE, "k").partition(b"\r\n\r\n")
    names = [line.partition(b":")[0].decode() for line in head.split(b"\r\n")[1:]]
    boundary = prepared.headers["Content-Type"].partition("boundary=")[2].encode()
    assert body.replace(b"0f1e2d3c4b5a69788796a5b4c3d2e1f0", boundary) == prepared.body
    assert [name for name in names if name != "Host"] == list(prepared.headers)


def test_there_are_as_many_predictions_as_frigate_has_room_for_unless_more_are_asked_for() -> None:
    def calls(port: int) -> list[int]:
        paths = ("/v1/vision/detection", "/v1/vision/detection?top_k=25")
        return [len(exchange(port, as_frigate(port, IMAGE, path=path)).json["predictions"]) for path in paths]

    assert with_node(calls, CROWD) == [MOST, 25]


def form(*fields: tuple[str, str], image: bytes = IMAGE) -> tuple[bytes, dict[str, str]]:
    parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields]
    last = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n' + image + b"\r\n"
    return "".join(parts).encode() + last + b"--b--\r\n", {"Content-Type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("field", "found"),
    [
        (("min_confidence", "0.6"), 1),
        (("min_confidence", "0"), 3),
        (("min_confidence", ""), 2),
        (("max", "1"), 2),
        (("typedfaces", ""), 2),
        (("min_confidence", "2"), None),
    ],
)
def test_the_form_of_deepstack_filters_by_confidence_and_ignores_what_it_does_not_know(
    field: tuple[str, str], found: int | None
) -> None:
    reply = with_node(lambda port: post(port, "/v1/vision/detection", *form(field)))
    if found is None:
        assert (reply.status, reply.json["success"], reply.json["code"]) == (400, False, "bad_field")
        assert "min_confidence" in reply.json["error"]
    else:
        assert (reply.status, len(reply.json["predictions"])) == (200, found)


def test_a_custom_model_of_deepstack_is_the_detection_task_of_that_name() -> None:
    def calls(port: int) -> list[Reply]:
        names = ("animals", "animals?task=animals", "animals?task=digits", "digits", "nobody", "")
        asked = [post(port, f"/v1/vision/custom/{name}", *form()) for name in names]
        return [get(port, "/v1/status/ping"), post(port, "/v1/vision/custom/list", b""), *asked]

    ping, listed, *replies = with_node(calls)
    assert (ping.status, ping.json) == (200, {"success": True})
    assert (listed.status, listed.json) == (200, {"success": True, "models": ["animals"]})
    assert [reply.status for reply in replies] == [200, 200, 400, 400, 404, 400]
    assert [reply.json["success"] for reply in replies] == [True, True, False, False, False, False]
    assert [len(reply.json["predictions"]) for reply in replies[:2]] == [2, 2]


def test_a_custom_model_asks_for_the_key_in_the_form_and_a_ping_for_none() -> None:
    def calls(port: int) -> list[int]:
        path = "/v1/vision/custom/animals"
        given = [exchange(port, as_frigate(port, IMAGE, key, path)).status for key in ("", KEY)]
        return [*given, get(port, "/v1/status/ping").status, post(port, "/v1/vision/custom/list", b"").status]

    assert with_node(calls, key=KEY) == [401, 200, 200, 401]


def test_what_is_no_form_of_deepstack_is_refused_in_its_words_and_the_next_is_answered() -> None:
    packed = gzip.compress(IMAGE)
    given: list[tuple[bytes, dict[str, str], int, str]] = [
        (IMAGE, {"Content-Type": "image/jpeg"}, 415, "expected multipart/form-data with the image in a part named"),
        (IMAGE, {}, 415, "expected multipart/form-data"),
        (*form(image=b""), 400, "the part 'image' is empty"),
        (*form(("min_confidence", "0.5"), ("min_confidence", "0.9")), 400, "expected one value, got '0.5'"),
        (packed, {"Content-Type": "multipart/form-data; boundary=b"}, 400, "multipart: "),
    ]

    def calls(port: int) -> list[Reply]:
        replies = [post(port, "/v1/vision/detection", body, headers) for body, headers, *_ in given]
        return [*replies, post(port, "/v1/vision/detection", *form())]

    *refused, answered = with_node(calls)
    for reply, (*_, status, says) in zip(refused, given, strict=True):
        assert (reply.status, reply.json["success"]) == (status, False), reply.json
        assert says in reply.json["error"]
    assert answered.json["success"]


def test_answers_are_as_the_description_of_the_api_says() -> None:
    schemas = {"/v1/infer": "Answer", "/v1/classify": "ClassificationAnswer", "/v1/detect": "DetectionAnswer"}
    pages = {"/v1/tasks": "Tasks", "/v1/targets": "Targets", "/v1/transport": "Transports"}

    def calls(port: int) -> dict[str, Any]:
        found = {name: post(port, path).json for path, name in schemas.items()}
        found |= {name: get(port, path).json for path, name in pages.items()}
        found["Predictions"] = post(port, "/v1/vision/detection", *form()).json
        return found | {"Error": post(port, "/v1/detect?task=digits").json}

    document = openapi.document()
    for name, value in with_node(calls).items():
        Draft202012Validator({**document, "$ref": f"#/components/schemas/{name}"}).validate(value)


def test_while_models_are_loading_pages_say_when_to_ask_again() -> None:
    async def scenario() -> list[Reply]:
        frontend = Frontend(EdgeMetrics(), ManualClock(), Keys(), 1000)
        async with listening(frontend) as port:
            paths = ("/v1/tasks", "/v1/targets", "/readyz", "/v2/models/a", "/docs", "/healthz")
            return [await asyncio.to_thread(get, port, path) for path in paths]

    *refused, docs, health = asyncio.run(scenario())
    assert [(reply.status, reply.headers.get("retry-after")) for reply in refused] == [(503, "1")] * 4
    assert (docs.status, health.status) == (200, 200)


def test_every_form_of_an_image_may_be_compressed() -> None:
    body, headers = form()
    given: list[tuple[str, bytes, dict[str, str]]] = [
        ("/v1/detect", gzip.compress(IMAGE), {}),
        ("/v1/detect", gzip.compress(body), headers),
        ("/v1/vision/detection", gzip.compress(body), headers),
    ]

    def calls(port: int) -> list[Reply]:
        asked = [post(port, path, packed, {**more, "Content-Encoding": "gzip"}) for path, packed, more in given]
        wrong = [post(port, "/v1/detect", IMAGE, {"Content-Encoding": name}) for name in ("gzip", "br", "identity")]
        bomb = gzip.compress(bytes(4 * UNKEYED_BYTES))
        return [*asked, *wrong, post(port, "/v1/detect", bomb, {"Content-Encoding": "gzip"})]

    assert [reply.status for reply in with_node(calls)] == [200, 200, 200, 400, 415, 200, 413]


def test_the_key_may_be_in_the_form_and_a_stranger_is_read_no_long_form() -> None:
    def calls(port: int) -> list[int]:
        long = b"x" * (UNKEYED_BYTES + 1)
        given = [(IMAGE, ""), (IMAGE, "wrong-key-of-some-length"), (IMAGE, KEY), (long, KEY)]
        return [exchange(port, as_frigate(port, image, key)).status for image, key in given]

    assert with_node(calls, key=KEY) == [401, 401, 200, 401]


# ------------------------------------------------------------------------------------- Open Inference Protocol


def oip(
    *images: bytes, outputs: list[dict[str, Any]] | None = None, binary: bool = False
) -> tuple[bytes, dict[str, str]]:
    data = b"".join(struct.pack("<I", len(image)) + image for image in images)
    tensor = {
        "name": "image", "shape": [len(images)], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)},
    }  # fmt: skip
    head: dict[str, Any] = {"inputs": [tensor], "parameters": {"binary_data_output": binary}}
    if outputs is not None:
        head["outputs"] = outputs
    text = json.dumps(head).encode()
    return text + data, {"Inference-Header-Content-Length": str(len(text))}


def test_outputs_of_detection_are_boxes_scores_labels_and_counts() -> None:
    def calls(port: int) -> list[Reply]:
        return [
            post(port, "/v2/models/animals/infer", *oip(IMAGE, IMAGE)),
            post(port, "/v2/models/animals/infer", *oip(IMAGE, outputs=[{"name": "boxes"}], binary=True)),
            post(port, "/v2/models/animals/infer", *oip(IMAGE, outputs=[{"name": "prediction"}])),
            post(port, "/v2/models/animals/infer", *oip(IMAGE, outputs=[{"name": "index"}])),
            post(port, "/v1/detect"),
        ]

    listed, binary, as_json, wrong, typed = with_node(calls)
    tensors = {each["name"]: each for each in listed.json["outputs"]}
    assert {name: (each["datatype"], each["shape"]) for name, each in tensors.items()} == {
        "boxes": ("FP32", [2, 3, 4]), "scores": ("FP32", [2, 3]), "classes": ("INT64", [2, 3]),
        "labels": ("BYTES", [2, 3]), "counts": ("INT64", [2]), "confidence": ("FP32", [2]),
    }  # fmt: skip
    assert tensors["labels"]["data"] == ["dog", "cat", "cat"] * 2
    assert tensors["counts"]["data"] == [3, 3]
    json_bytes = int(binary.headers["inference-header-content-length"])
    boxes = np.frombuffer(binary.body[json_bytes:], "<f4").reshape(3, 4)
    assert boxes == pytest.approx(np.array([each["box"] for each in typed.json["objects"]]), abs=1e-6)
    (text,) = as_json.json["outputs"][0]["data"]
    assert json.loads(text)["objects"] == typed.json["objects"]
    assert (wrong.status, wrong.json["error"][:60]) == (
        400,
        "outputs[0].name: expected each of boxes, scores, classes, lab"[:60],
    )


def test_the_metadata_of_a_model_are_those_of_its_kind() -> None:
    def calls(port: int) -> list[Any]:
        found = []
        for path in ("/v2/models/animals", "/v2/models/digits/config"):
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
                connection.request("GET", path)
                found.append(json.loads(connection.getresponse().read()))
        return found

    animals, digits = with_node(calls)
    assert animals["outputs"][0] == {"name": "boxes", "datatype": "FP32", "shape": [-1, -1, 4]}
    assert [each["name"] for each in digits["output"]] == ["label", "index", "confidence", "prediction"]


# ------------------------------------------------------------------------------------------------------ clients


@pytest.mark.parametrize("transport", ["http", "datagram"])
def test_answers_of_the_client_have_the_type_of_their_kind(transport: Transport) -> None:
    def ask(port: int) -> tuple[list[Answer], str]:
        with Client(f"http://127.0.0.1:{port}", transport=transport) as client:
            found = [client.detect(SQUARE), client.classify(SQUARE)]
            found += [client.infer(SQUARE, task="animals"), client.infer(SQUARE)]
            with pytest.raises(BadField) as refused:
                client.detect(SQUARE, task="digits")
            return found, str(refused.value)

    answers, refused = with_node(ask)
    detect, classify, animals, default = (answer.prediction for answer in answers)
    assert isinstance(detect, Detection)
    assert isinstance(animals, Detection)
    assert isinstance(classify, Classification)
    assert isinstance(default, Classification)
    assert [each.label for each in detect.objects] == ["dog", "cat", "cat"]
    assert detect.objects[0].box == pytest.approx((0.25, 0.5, 0.75, 1.0), abs=0.01)
    assert "'digits' is of kind 'classification'" in refused


def test_the_client_lists_tasks_and_the_targets_of_each() -> None:
    def ask(port: int) -> tuple[dict[str, Any], dict[str, Any]]:
        with Client(f"http://127.0.0.1:{port}") as client:
            return client.tasks(), client.targets("animals")

    tasks, targets = with_node(ask)
    assert [(each["task"], each["kind"], each["status"]) for each in tasks["tasks"]] == [
        ("digits", "classification", "ready"), ("animals", "detection", "ready"), ("crowds", "counting", "failed"),
    ]  # fmt: skip
    assert targets["task"] == "animals"


def test_predictions_of_an_unknown_kind_keep_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> NoReturn:
        raise ManifestError(f"kind {name!r} is not installed")

    monkeypatch.setattr(asynchronous, "kind_class", not_installed)

    def ask(port: int) -> Answer:
        with Client(f"http://127.0.0.1:{port}") as client:
            return client.infer(IMAGE, task="animals")

    answer = with_node(ask)
    assert isinstance(answer.prediction, OtherPrediction)
    assert answer.prediction.fields.keys() == {"objects", "confidence"}
    assert answer.to_json()["objects"][0]["label"] == "dog"


def test_a_client_learns_the_kind_of_a_task_that_its_node_did_not_serve_before() -> None:
    async def scenario() -> list[str]:
        async with bench(None, SURE) as one, bench(None, SURE, task="animals", kind=ANIMALS, tensors=BOXES) as two:
            frontend = Frontend(EdgeMetrics(), one.clock, Keys(), UNKEYED_BYTES)
            frontend.mark_ready(ServedTasks([one.node, two.node]))
            frontend.mark_ready(ServedTasks([one.node]))
            async with listening(frontend) as port, AsyncClient(f"http://127.0.0.1:{port}") as client:
                before = await client.infer(IMAGE)
                frontend.mark_ready(ServedTasks([one.node, two.node]))
                after = await client.infer(IMAGE, task="animals")
            return [type(answer.prediction).__name__ for answer in (before, after)]

    assert asyncio.run(scenario()) == ["Classification", "Detection"]


def test_a_batch_of_images_is_searched_for_objects() -> None:
    def ask(port: int) -> list[int]:
        with Client(f"http://127.0.0.1:{port}") as client:
            outcomes = list(client.detect_batch([IMAGE, b"no image", IMAGE], concurrency=2))
        return [len(each.to_json()["objects"]) if isinstance(each, Answer) else 0 for each in outcomes]

    assert with_node(ask) == [3, 0, 3]


# ------------------------------------------------------------------------------------------------ load generator


TRUTH: Label = ([1, 0, 1], [[0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.5, 0.25], [0.5, 0.0, 1.0, 0.5]])
"""Two of three objects are found, and one of the three found is none: F1 is 2/3."""


@pytest.mark.parametrize("protocol", ["http", "datagram", "oip"])
def test_load_tests_judge_answers_by_the_loss_of_their_kind(protocol: Protocol) -> None:
    spec = KindSpec("detection", ["cat", "dog"], {"threshold": 0.3})
    assert path_of(spec) == "/v1/detect"

    async def scenario() -> list[RequestOutcome]:
        async with served(BOXES) as port:
            server = ServerAddress(f"http://127.0.0.1:{port}", protocol, "animals", path_of(spec), timeout_s=60.0)
            kind = spec.open()
            loaded = SharedImages([SQUARE], [7], truths(kind, [TRUTH]), kind)
            job = LoadJob(server, [{"quality": "fast"}], [0, 0], [0, 0], 1.0, 4, due=[0.0, 0.01])
            client = client_for(server, 4, kind)
            await client.open()
            try:
                return await Engine(job, loaded, client).run(time.monotonic())
            finally:
                await client.close()

    outcomes = asyncio.run(scenario())
    assert [(each.status, each.image) for each in outcomes] == [(200, 7)] * 2
    assert [each.right for each in outcomes] == pytest.approx([2 / 3] * 2)
    run = Run(
        "r", "u", protocol, "s", 1.0, 0.0, None, "d", True, [TargetClass({}, 1.0)], outcomes,
        Origin("", "", "", "", "", 1, 0.0, 0), kind="detection",
    )  # fmt: skip
    summary = summarise(run)
    assert summary.total.effective is not None
    assert summary.total.effective.value == pytest.approx(2 / 3)
    assert meaning_of_right([summary]) == "right: the mean of 1 − the loss of detection"


@pytest.mark.parametrize(
    ("prediction", "index", "truth", "right"),
    [(None, 3, 3, True), (None, 3, 4, False), (None, None, 3, None), (None, 3, ([], None), None)],
)
def test_servers_that_answer_with_an_index_alone_are_judged_by_it(
    prediction: None, index: int | None, truth: Any, right: bool | None
) -> None:
    assert rightness(None, prediction, index, truth) is right
