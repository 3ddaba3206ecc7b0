"""Edge nodes before 0.2 and a datacenter of this release: their request bytes, and the replies that they can read.

The bytes and the types are those of `hawkvision/hop.py` and of the edge's HTTP client in the release before.
"""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from hawkvision.system.child_server import running
from tests.hawkvision.datacenter.conftest import KEY, Running, image

pytestmark = pytest.mark.slow

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class HopClass(msgspec.Struct, frozen=True):
    index: int
    confidence: float


class HopTiming(msgspec.Struct, frozen=True):
    decode: float
    queue: float
    infer: float
    total: float
    first: float | None = None


class HopReply(msgspec.Struct, frozen=True):
    top_k: tuple[HopClass, ...]
    model: str
    timing_ms: HopTiming
    batch_size: int
    score: float | None = None
    passed_over: dict[str, float | str | None] | None = None
    received_fraction: float = 1.0
    quality: int | None = None
    complete: bool = True


def exchange(url: str, request: bytes) -> tuple[int, bytes]:
    """Status and body of the reply to these bytes, which ask to close the connection."""
    host, _, port = urlsplit(url).netloc.rpartition(":")
    with socket.create_connection((host, int(port)), 60.0) as connection:
        connection.sendall(request)
        reply = b""
        while received := connection.recv(65536):
            reply += received
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def get(url: str, path: str, *lines: str) -> Any:
    status, body = exchange(url, request("GET", path, *lines))
    assert status == 200, body
    return json.loads(body)


def request(method: str, path: str, *lines: str, body: bytes = b"") -> bytes:
    """A request as an edge node before 0.2 sends it."""
    head = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {KEY}",
        "Accept: */*",
        "User-Agent: Python/3.11 aiohttp/3.11",
        *lines,
        *([f"Content-Length: {len(body)}", "Content-Type: application/octet-stream"] if body else []),
        "Connection: close",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def escalation(*lines: str) -> bytes:
    return request(
        "POST",
        "/v1/infer",
        "X-HawkVision-Top-K: 2",
        "X-HawkVision-Task: shapes",
        "X-HawkVision-Variant: medium",
        "X-HawkVision-Deadline-Ms: 30000.0",
        "X-HawkVision-Accept-Score: 1.0",
        "X-HawkVision-Score: top1",
        "X-HawkVision-Otherwise: committee",
        f"traceparent: {TRACE}",
        *lines,
        body=image(),
    )


def test_an_edge_before_0_2_gets_the_stages_as_rungs(service: Running) -> None:
    rungs = [
        {"name": "medium", "members": [{"name": "medium", "sha256": None}], "fingerprint": None},
        {
            "name": "committee",
            "members": [{"name": "small", "sha256": None}, {"name": "medium", "sha256": None}],
            "fingerprint": None,
        },
    ]
    listing = get(service.url, "/v1/rungs")
    for rung in listing["rungs"]:
        rung.pop("ran")  # added since; that edge ignores it
    assert listing == {"task": "shapes", "best": "committee", "rungs": rungs}


def test_an_edge_before_0_2_gets_an_answer_that_it_can_read(service: Running) -> None:
    status, body = exchange(service.url, escalation())
    assert status == 200
    assert json.loads(body).keys() - {"fingerprint"} == set(HopReply.__struct_fields__)
    reply = msgspec.json.decode(body, type=HopReply)
    assert (reply.model, len(reply.top_k), reply.complete) == ("committee", 2, True)
    assert reply.passed_over is not None
    assert reply.passed_over.keys() - {"fingerprint"} == {"index", "score"}


def test_a_datacenter_offers_its_datagram_port_under_the_word_before_and_the_present_one(service: Running) -> None:
    offer = get(service.url, "/v1/transport")
    assert offer.keys() == {"datagram", "lossy"}
    assert offer["lossy"] == offer["datagram"]
    assert offer["lossy"].keys() == {"port", "certificate", "name", "version"}


def test_an_edge_offers_its_datagram_port_under_the_word_before_and_the_present_one() -> None:
    with running("edge", "--backend", "noop", "--port", "0", "--datagram-port", "0") as node:
        offer = get(node.url, "/v1/transport")
    assert offer["lossy"] == offer["datagram"]
    assert offer["lossy"].keys() == {"port", "certificate", "name", "version"}


@pytest.mark.parametrize("version", ["1", "2"])
def test_the_previous_and_the_present_wire_version_are_served(service: Running, version: str) -> None:
    line = f"X-HawkVision-Wire: {version}"
    assert exchange(service.url, escalation(line))[0] == 200
    assert get(service.url, "/v1/stages", line)["best"] == "committee"


@pytest.mark.parametrize("version", ["0", "3", "two", ""])
def test_an_unknown_wire_version_is_refused_with_the_ones_that_are_served(service: Running, version: str) -> None:
    line = f"X-HawkVision-Wire: {version}"
    for sent in (escalation(line), request("GET", "/v1/stages", line)):
        status, body = exchange(service.url, sent)
        error = json.loads(body)
        assert (status, error["code"]) == (400, "bad_field")
        assert error["error"].startswith(f"X-HawkVision-Wire: expected 1 or 2, got {version!r}")
