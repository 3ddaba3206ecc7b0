"""The name of a request: in the response, at the datacenter, and in every log line about it."""

from __future__ import annotations

import json
import re

import pytest

from hawkvision.servers.keys import OPEN_PATHS
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller
from tests.edge.peer import Peer, running_peer
from tests.images import encoded

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MADE = re.compile(r"[0-9a-f]{32}")


def test_the_callers_request_id_comes_back_and_goes_on_to_the_datacenter(caller: Caller, peer: Peer) -> None:
    peer.headers.clear()
    reply = caller.classify(encoded(), "quality=best", **{"X-Request-Id": "order-17/cam.3"})
    assert reply.headers["x-request-id"] == peer.headers[0]["x-request-id"] == "order-17/cam.3"


@pytest.mark.parametrize("given", [None, "", "a" * 129, "two words", 'quoted"', "caf\xe9", "<script>"])
def test_without_a_valid_id_the_trace_names_the_request(caller: Caller, peer: Peer, given: str | None) -> None:
    peer.headers.clear()
    named = {"traceparent": TRACEPARENT} | ({} if given is None else {"X-Request-Id": given})
    reply = caller.classify(encoded(), "quality=best", **named)
    assert reply.headers["x-request-id"] == TRACEPARENT.split("-")[1] == peer.headers[0]["x-request-id"]
    assert reply.headers["traceparent"].split("-")[1] == TRACEPARENT.split("-")[1]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/classify"),
        ("GET", "/v1/classify"),
        ("POST", "/v2/models/imagenet/infer"),
        ("GET", "/v2/models/imagenet"),
        ("GET", "/v1/targets"),
        ("GET", "/metrics"),
        ("GET", "/no/such/path"),
        *(("GET", path) for path in sorted(OPEN_PATHS)),
    ],
)
def test_every_reply_names_its_request(caller: Caller, method: str, path: str) -> None:
    reply = caller.send(method, path, b"no image" if method == "POST" else None)
    assert MADE.fullmatch(reply.headers["x-request-id"])
    assert reply.headers["traceparent"].split("-")[1] == reply.headers["x-request-id"]
    given = caller.send(method, path, b"x" if method == "POST" else None, {"X-Request-Id": "mine"})
    assert given.headers["x-request-id"] == "mine"


def lines(node: ServerProcess) -> list[dict[str, object]]:
    return [json.loads(line) for line in node.output().splitlines() if not line.startswith(("ready: ", "datagram: "))]


def test_lines_about_a_request_carry_its_id_and_all_lines_are_json_if_that_is_set() -> None:
    with (
        running_peer(status=415, error_code="unsupported_media") as peer,
        running(
            "edge", "--port", "0", "--backend", "noop", "--datacenter-url", peer.url, "--log-format", "json"
        ) as node,
    ):
        caller = Caller(node)
        caller.classify(encoded(), "quality=balanced", **{"X-Request-Id": "mine", "traceparent": TRACEPARENT})
        caller.close()
        assert node.stop() == 0
    about = [line for line in lines(node) if "refused an image" in str(line["message"])]
    assert [(line["level"], line["request_id"], line["trace_id"]) for line in about] == [
        ("WARNING", "mine", TRACEPARENT.split("-")[1])
    ]
    others = [line for line in lines(node) if line not in about]
    assert {line["request_id"] for line in others} == {None}
    assert any("backend noop" in str(line["message"]) for line in others), "an operator sees what runs"
