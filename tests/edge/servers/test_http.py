"""The HTTP server of a real node: the API as documented, on the no-op backend."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from edge.servers import openapi
from hawkvision.system.child_server import ServerProcess
from tests.edge.conftest import Caller
from tests.edge.peer import ANSWER_CLASS, Peer
from tests.images import encoded

MULTIPART = "multipart/form-data; boundary=b"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    disposition = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
    return b"--b\r\nContent-Disposition: " + disposition.encode() + b"\r\n\r\n" + content + b"\r\n"


def test_an_answer_has_every_documented_field(caller: Caller) -> None:
    answer = caller.classify(encoded(), "quality=fast&top_k=3").json
    schemas = openapi.document()["components"]["schemas"]
    described = schemas["AnswerFields"]["properties"] | schemas["ClassificationFields"]["properties"]
    assert sorted(answer) == sorted(described)
    assert len(answer["top_k"]) == 3
    assert (answer["tier"], answer["escalated"], answer["degraded"]) == ("edge", False, False)
    assert answer["accuracy"]["target"] == {"quality": "fast"}
    assert answer["timing_ms"]["total"] > 0


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_all_three_formats_are_read(caller: Caller, suffix: str) -> None:
    assert caller.classify(encoded(suffix), "quality=fast").status == 200


def test_fields_may_come_as_headers(caller: Caller) -> None:
    reply = caller.classify(encoded(), **{"X-HawkVision-Quality": "fast", "X-HawkVision-Top-K": "2"})
    assert reply.json["accuracy"]["target"] == {"quality": "fast"}
    assert len(reply.json["top_k"]) == 2


def test_fields_may_come_as_multipart(caller: Caller) -> None:
    body = part("image", encoded(), "cat.jpg") + part("max_accuracy_drop", b"0.5") + b"--b--\r\n"
    reply = caller.classify(body, **{"Content-Type": MULTIPART})
    assert reply.status == 200, reply.body
    assert reply.json["accuracy"]["target"] == {"max_accuracy_drop": 0.5}


def test_multipart_without_boundary_is_a_bad_field(caller: Caller) -> None:
    reply = caller.classify(b"--b\r\n\r\n", **{"Content-Type": "multipart/form-data"})
    assert (reply.status, reply.json["code"]) == (400, "bad_field")


def test_best_is_answered_by_the_datacenter_with_the_callers_own_bytes(caller: Caller, peer: Peer) -> None:
    peer.bodies.clear()
    peer.delay_s = 0.01  # the peer says 4 ms, and no time beyond the round trip's is believed
    image = encoded(".png", seed=5)
    answer = caller.classify(image, "quality=best").json
    assert (answer["tier"], answer["model"], answer["index"]) == ("datacenter", "reference", ANSWER_CLASS)
    assert (answer["escalated"], answer["reason"]) == (True, "target")
    assert peer.bodies == [image]
    assert answer["timing_ms"]["dc"] == 4.0


def test_trace_and_time_left_travel_to_the_datacenter(caller: Caller, peer: Peer) -> None:
    peer.headers.clear()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    reply = caller.classify(encoded(), "quality=best&deadline_ms=5000", traceparent=trace)
    sent = peer.headers[0]
    assert sent["traceparent"].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
    assert sent["traceparent"].split("-")[2] not in (trace.split("-")[2], reply.headers["traceparent"].split("-")[2])
    assert 0 < float(sent["x-hawkvision-deadline-ms"]) <= 5000
    assert sent["x-hawkvision-variant"] == "reference"


def test_server_timing_repeats_the_timings(caller: Caller) -> None:
    reply = caller.classify(encoded(), "quality=fast")
    names = [entry.split(";")[0].strip() for entry in reply.headers["server-timing"].split(",")]
    assert names == list(reply.json["timing_ms"])


@pytest.mark.parametrize(
    ("body", "query", "headers", "status", "code"),
    [
        (b"", "", {}, 400, "bad_image"),
        (b"hello", "", {}, 415, "unsupported_media"),
        (encoded()[:200], "", {}, 400, "bad_image"),
        (encoded(), "colour=red", {}, 400, "bad_field"),
        (encoded(), "min_accuracy=0.999", {}, 422, "target_unreachable"),
        (encoded(), "task=dogs", {}, 404, "not_found"),
        (b"{}", "", {"Content-Type": "application/json"}, 415, "unsupported_media"),
        (b"\xff\xd8\xff" + b"x" * 300_001, "", {}, 413, "too_large"),
    ],
)
def test_every_mistake_has_its_status_and_code(
    caller: Caller, body: bytes, query: str, headers: dict[str, str], status: int, code: str
) -> None:
    reply = caller.classify(body, query, **headers)
    assert (reply.status, reply.json["code"]) == (status, code)
    assert reply.json["error"]
    assert caller.classify(encoded(), "quality=fast").status == 200


def test_an_unreachable_target_names_the_maximum(caller: Caller) -> None:
    reply = caller.classify(encoded(), "min_accuracy=1")
    maximum = reply.json["maximum"]
    assert 0.5 < maximum < 1.0
    assert caller.classify(encoded(), f"min_accuracy={maximum}").status == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_methods_are_refused_in_the_documented_form(caller: Caller, method: str) -> None:
    reply = caller.send(method, "/v1/classify")
    assert (reply.status, reply.json["code"]) == (405, "method_not_allowed")


def test_unknown_paths_are_refused_in_the_documented_form(caller: Caller) -> None:
    reply = caller.get("/v1/clasify")
    assert (reply.status, reply.json["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"])
def test_health_is_answered(caller: Caller, path: str) -> None:
    assert caller.get(path).status == 200


def test_targets_list_what_can_be_asked_and_what_it_costs(caller: Caller) -> None:
    listed = caller.get("/v1/targets").json
    by_target = {json.dumps(entry["accuracy"]["target"]): entry for entry in listed["targets"]}
    assert by_target['{"quality": "fast"}']["escalation"] == 0.0
    assert by_target['{"quality": "best"}']["escalation"] == 1.0
    assert listed["maximum_min_accuracy"] == listed["best"]["accuracy"]["value"]
    assert listed["certificates_valid"] is False, "a no-op backend keeps no guarantee"


def test_metrics_count_requests_and_keep_labels_bounded(caller: Caller) -> None:
    caller.classify(encoded(), "stream=somebody-elses-secret&quality=fast")
    page = caller.get("/metrics").body.decode()
    assert 'hawkvision_requests_total{code="200",task="imagenet"' in page
    assert "hawkvision_request_duration_seconds_bucket" in page
    assert "somebody" not in page


def test_many_callers_at_once_each_get_their_own_answer(edge: ServerProcess, caller: Caller) -> None:
    def ask(i: int) -> int:
        mine = Caller(edge)
        try:
            return len(mine.classify(encoded(seed=i), f"quality=fast&top_k={1 + i % 20}").json["top_k"]) - i % 20
        finally:
            mine.close()

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(200))) == {1}


def test_a_caller_that_hangs_up_half_way_harms_nobody(edge: ServerProcess, caller: Caller) -> None:
    broken = Caller(edge)
    broken._connection.putrequest("POST", "/v1/classify")
    broken._connection.putheader("Content-Length", "100000")
    broken._connection.endheaders(encoded()[:100])
    broken.close()
    assert caller.classify(encoded(), "quality=fast").status == 200


def test_chunked_bodies_are_read_and_bounded(edge: ServerProcess) -> None:
    for size, status in ((1, 200), (400_000, 413)):
        caller = Caller(edge)
        image = encoded() + bytes(size)
        pieces = (image[i : i + 5000] for i in range(0, len(image), 5000))
        caller._connection.request("POST", "/v1/classify?quality=fast", pieces, encode_chunked=True,
                                   headers={"Transfer-Encoding": "chunked"})  # fmt: skip
        assert caller._connection.getresponse().status == status
        caller.close()


def test_compressed_bodies_that_do_not_say_so_are_not_taken_for_images(caller: Caller) -> None:
    assert caller.classify(gzip.compress(encoded())).status == 415


def test_a_large_body_refused_unread_does_not_confuse_the_connection(caller: Caller) -> None:
    large = encoded(".png", 300, 300) + bytes(200_000)
    for _ in range(3):
        assert caller.classify(large, "colour=red").json["code"] == "bad_field"
        assert caller.classify(encoded(), "quality=fast").status == 200
