"""The datacenter's HTTP server under callers who mean it no good: others are answered, and memory stays bounded."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.hawkvision.datacenter.conftest import KEY, Running, image
from tests.hawkvision.datacenter.servers.test_service import ask
from tests.hawkvision.servers.raw_http import GET, OFFERS, flood, replies, until_closed

pytestmark = pytest.mark.slow
POST = b"POST /v1/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % KEY.encode()
IN_FLIGHT = 8
"""All that the tier holds, running and queued."""


def connect(service: Running, sends: bytes = b"") -> socket.socket:
    address = urlsplit(service.url)
    assert address.hostname is not None
    connection = socket.create_connection((address.hostname, address.port or 0), timeout=30)
    connection.sendall(sends)
    return connection


def status(connection: socket.socket) -> int:
    return int(connection.recv(65536).split()[1])


def peak_bytes(service: Running) -> int:
    lines = Path(f"/proc/{service.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def answers(service: Running) -> bool:
    reply = ask(service, image())
    return reply.status == 200 and reply.json["model"] == "reference"


def test_a_header_of_108_mb_is_refused_without_being_held(service: Running) -> None:
    assert answers(service)
    before = peak_bytes(service)
    with connect(service, POST + b"X-A: ") as connection:
        flood(connection, 108)
        assert answers(service), "while the attack is still connected"
        assert [reply.status for reply in replies(until_closed(connection))] == [431]
    assert peak_bytes(service) - before < 6 << 20


def test_slow_heads_and_stalled_bodies_do_not_keep_others_out(service: Running) -> None:
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(service, b"GET /hea"))
        stalled = [
            stack.enter_context(connect(service, POST + b"Content-Length: 100000\r\n\r\n" + bytes(1000)))
            for _ in range(40 * IN_FLIGHT)
        ]
        assert answers(service)
        metrics = ask(service, path="/metrics").body.decode()
        assert 'hawkvision_datacenter_requests_in_flight{task="shapes"} 0.0' in metrics
        stalled[0].sendall(bytes(99_000))
        assert status(stalled[0]) == 415, "it was read to its end, and is no image"


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS.keys())
@pytest.mark.parametrize("lines", [b"", b"X-HawkVision-Progressive: 1\r\n"])
def test_an_offered_upgrade_is_declined_by_answering(service: Running, offer: bytes, lines: bytes) -> None:
    head = POST + offer + lines + b"Content-Length: %d\r\n\r\n" % len(image())
    with connect(service, head + image()) as connection:
        assert status(connection) == 200


@pytest.mark.parametrize(
    "sends",
    [
        GET.replace(b"Host: x\r\n", b""),
        GET.replace(b"Host: x", b"Host: x\r\nHost: x"),
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
        POST + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused_in_the_documented_form(service: Running, sends: bytes) -> None:
    with connect(service, sends) as connection:
        (reply,) = replies(until_closed(connection))
    assert (reply.status, reply.json["code"]) == (400, "bad_field")


def test_a_body_above_its_bound_is_refused_before_it_is_read(service: Running) -> None:
    with connect(service, POST + b"Content-Length: 1000000000\r\n\r\n") as connection:
        assert status(connection) == 413


@pytest.mark.parametrize(
    ("line", "expected"),
    [(b"X-HawkVision-Variant: huge", 404), (b"Content-Type: text/html", 415), (b"X-HawkVision-Top-K: no", 400)],
)
def test_what_the_head_rules_out_is_refused_before_the_body_comes(service: Running, line: bytes, expected: int) -> None:
    with connect(service, POST + line + b"\r\nContent-Length: 100000\r\n\r\n") as connection:
        assert status(connection) == expected
