"""HTTP requests within bounds: a real node on the no-op backend, and callers who mean it no good."""

from __future__ import annotations

import json
import socket
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.servers.protocol import MAX_HEAD_BYTES, MAX_PIPELINED, MAX_URL_BYTES
from hawkvision.system.child_server import ServerProcess
from tests.fuzz.examples import SHARED_FIXTURE, examples
from tests.hawkvision.servers.raw_http import (
    GET,
    KEY,
    OFFERS,
    answer,
    ask,
    connect,
    flood,
    healthy,
    refusal,
    replies,
    until_closed,
)
from tests.images import encoded

BEARER = f"Authorization: Bearer {KEY}\r\n".encode()


def resident_bytes(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# ------------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize(
    ("begins", "status", "code"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: ", 431, "headers_too_large"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A", 431, "headers_too_large"),
        (b"GET /", 414, "uri_too_long"),
        (GET + b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nX-A: ", 431, "headers_too_large"),
    ],
)
def test_a_head_of_64_mib_is_refused_without_being_held(
    node: ServerProcess, begins: bytes, status: int, code: str
) -> None:
    assert healthy(node)
    before = resident_bytes(node)
    with connect(node, begins) as connection:
        flood(connection, 64)
        assert healthy(node), "while the attack is still connected"
        *good, refused = replies(until_closed(connection))
    assert [reply.status for reply in good] == [200] * begins.count(GET)
    assert refusal([refused]) == (status, code)
    assert resident_bytes(node) - before < 6 << 20


def test_many_small_headers_are_too_large_together(node: ServerProcess) -> None:
    head = b"GET /healthz HTTP/1.1\r\n" + b"X-A: b\r\n" * (MAX_HEAD_BYTES // 8) + b"\r\n"
    assert refusal(ask(node, head)) == (431, "headers_too_large")


def test_a_head_at_its_bound_is_served_whole_or_in_pieces(node: ServerProcess) -> None:
    begins, ends = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-A: ", b"\r\n\r\n"
    head = begins + b"a" * (MAX_HEAD_BYTES - len(begins) - len(ends)) + ends
    assert [reply.status for reply in ask(node, head)] == [200]
    with connect(node) as connection:
        for start in range(0, len(head), 1000):
            connection.sendall(head[start : start + 1000])
        assert [reply.status for reply in replies(until_closed(connection))] == [200]
    assert refusal(ask(node, head[: -len(ends)] + b"a" + ends)) == (431, "headers_too_large")


@pytest.mark.parametrize(("length", "status"), [(MAX_URL_BYTES, 200), (MAX_URL_BYTES + 1, 414)])
def test_urls_have_a_bound(node: ServerProcess, length: int, status: int) -> None:
    url = b"/healthz?".ljust(length, b"a")
    (reply,) = ask(node, b"GET " + url + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert reply.status == status


def test_a_large_body_right_behind_its_head_is_no_large_head(impatient: ServerProcess) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3000000\r\n\r\n"
    assert [reply.body for reply in ask(impatient, head + bytes(3_000_000))] == [b"3000000"]


# -------------------------------------------------------------------------------------------- malformed


@pytest.mark.parametrize(
    "sends",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
        b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_malformed_requests_are_refused_in_the_documented_form(node: ServerProcess, sends: bytes) -> None:
    assert refusal(ask(node, sends)) == (400, "bad_field")


def test_a_broken_chunk_is_refused_while_the_body_is_awaited(impatient: ServerProcess) -> None:
    sends = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nxyz\r\n"
    assert refusal(ask(impatient, sends)) == (400, "bad_field")


@settings(max_examples=examples(150), deadline=None, suppress_health_check=SHARED_FIXTURE)
@given(st.binary(max_size=60), st.integers(0, len(GET)), st.integers(0, len(GET)))
def test_whatever_is_sent_the_answer_is_json_and_the_next_request_is_unharmed(
    node: ServerProcess, noise: bytes, start: int, end: int
) -> None:
    with connect(node, GET[:start] + noise + GET[end:]) as connection:
        connection.shutdown(socket.SHUT_WR)
        for reply in replies(until_closed(connection)):
            assert json.loads(reply.body), reply
    assert healthy(node)


# ------------------------------------------------------------------------------------- what must go on working


def test_a_connection_is_used_again_and_again(node: ServerProcess) -> None:
    with connect(node) as connection:
        for _ in range(50):
            connection.sendall(GET)
            assert answer(connection) == 200


def test_pipelined_requests_are_answered_in_order(impatient: ServerProcess) -> None:
    posts = [b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + bytes(size) for size in range(20)]
    found = ask(impatient, b"".join(posts) + b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert [int(reply.body) for reply in found] == [*range(20), 0]


OFFER = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + OFFERS["h2c"] + b"\r\n"
BROKEN_BODY = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"


@pytest.mark.parametrize("begins", [GET, OFFER])
@pytest.mark.parametrize("broken", [b"nonsense\r\n\r\n", BROKEN_BODY])
def test_a_refusal_waits_for_the_answers_before_it(node: ServerProcess, begins: bytes, broken: bytes) -> None:
    *good, bad = ask(node, begins * 3 + broken)
    assert [reply.status for reply in good] == [200, 200, 200]
    assert refusal([bad]) == (400, "bad_field")


@pytest.mark.parametrize(
    "request_", [GET, b"GET /healthz HTTP/1.1\r\nHost:\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n"]
)
def test_pipelines_have_a_bound(node: ServerProcess, request_: bytes) -> None:
    *good, refused = ask(node, request_ * 3000)
    assert [reply.status for reply in good] == [200] * (MAX_PIPELINED + 1), "the one at work and those behind it"
    assert refusal([refused]) == (429, "overloaded")
    assert refused.headers["retry-after"] == "1"


@settings(max_examples=examples(250), deadline=None, suppress_health_check=SHARED_FIXTURE)
@given(st.lists(st.integers(0, 140), max_size=8))
def test_a_chunked_request_may_arrive_in_any_pieces(impatient: ServerProcess, cuts: list[int]) -> None:
    whole = (
        b"\r\nPOST /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nabcde\r\n1e\r\n" + bytes(30) + b"\r\n0\r\n\r\n"
    )
    edges = [0, *sorted(cuts), len(whole)]
    with connect(impatient) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in pairwise(edges):
            connection.sendall(whole[start:end])
        assert [reply.body for reply in replies(until_closed(connection))] == [b"35"]


@pytest.mark.parametrize("offer", [b"", OFFERS["h2c"]])
def test_a_caller_that_expects_100_continue_gets_it(node: ServerProcess, offer: bytes) -> None:
    image = encoded()
    head = b"POST /v1/classify?quality=fast HTTP/1.1\r\nHost: x\r\n" + BEARER + offer
    with connect(node, head + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(image)) as connection:
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(image + GET)
        assert answer(connection) == 200


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS.keys())
@pytest.mark.parametrize("method", [b"GET", b"POST"])
@pytest.mark.parametrize("body", ["none", "sized", "chunked"])
def test_an_offered_upgrade_is_declined_by_answering(
    impatient: ServerProcess, offer: bytes, method: bytes, body: str
) -> None:
    framing = {
        "none": b"\r\n",
        "sized": b"Content-Length: 5\r\n\r\nabcde",
        "chunked": b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n",
    }[body]
    request = method + b" / HTTP/1.1\r\nHost: x\r\n" + offer + framing
    end = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    found = ask(impatient, request * 3 + end)  # pipelined, on a connection that lives on
    size = b"0" if body == "none" else b"5"
    assert [(reply.status, reply.body) for reply in found] == [(200, size)] * 3 + [(200, b"2")]


def test_an_offered_upgrade_may_arrive_in_any_pieces(impatient: ServerProcess) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\n" + OFFERS["h2c"] + b"Content-Length: 5\r\n\r\n"
    with connect(impatient) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(len(head) - 8, len(head)):
            for piece in (head[:start], head[start:], b"ab", b"cde"):
                connection.sendall(piece)
            assert answer(connection) == 200


# ------------------------------------------------------------------------------- read in one way, or not at all


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"Host: x\r\nHost: x\r\n",
        b"Host: x\r\nHost: y\r\n",
        b"Host: x y\r\n",
        b"Host: x/y\r\n",
        b"Host: user@x\r\n",
        b"Host: x:80a\r\n",
        b"Host: [::1\r\n",
        b"Host: x,y:80:\r\n",
    ],
)
def test_a_host_that_is_missing_doubled_or_malformed_is_refused(node: ServerProcess, lines: bytes) -> None:
    status, code = refusal(ask(node, b"GET /healthz HTTP/1.1\r\n" + lines + b"\r\n"))
    assert (status, code) == (400, "bad_field")


@pytest.mark.parametrize(
    "sends",
    [
        b"GET /healthz HTTP/1.0\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhOST: [fe80::1]:8080\r\nConnection: close\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: edge_1.local.:8080\r\nConnection: close\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: \t x \t\r\nConnection: close\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: Chunked \r\n\r\n0\r\n\r\n",
        b"GET http://edge/healthz HTTP/1.1\r\nHost: edge\r\nConnection: close\r\n\r\n",
    ],
)
def test_hosts_as_clients_write_them_are_taken(node: ServerProcess, sends: bytes) -> None:
    assert [reply.status for reply in ask(node, sends)] == [200]


SMUGGLED = GET.replace(b"/healthz", b"/metrics")


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Content-Length: 5\r\nContent-Length: 5",
        b"Content-Length: 5, 5",
        b"Content-Length: 0x5",
        b"Content-Length : 5",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding:\x0bchunked",
        b"X: y\r\n Transfer-Encoding: chunked",
        b"X: y\rContent-Length: 5",
        b"X: y\nContent-Length: 5",
    ],
)
def test_a_body_whose_end_is_in_doubt_is_refused_and_nothing_behind_it_is_answered(
    impatient: ServerProcess, lines: bytes
) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n\r\n"
    assert refusal(ask(impatient, head + b"0\r\n\r\n" + SMUGGLED)) == (400, "bad_field")


def test_a_trailer_is_no_header(node: ServerProcess) -> None:
    head = b"POST /v1/classify?quality=fast HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    image = encoded()
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(image), image)
    trailers = b"Host: y\r\n" + BEARER + b"X-HawkVision-Colour: red\r\n\r\n"
    assert [reply.status for reply in ask(node, head + chunked + trailers)] == [401]
    allowed = head + BEARER
    assert [reply.status for reply in ask(node, allowed + chunked + trailers)] == [200]


@pytest.mark.parametrize("behind", [b"0\r\nX-A: ", b"0\r\nX-A", b"5;x="])
def test_trailers_and_chunk_extensions_of_64_mib_are_refused_without_being_held(
    impatient: ServerProcess, behind: bytes
) -> None:
    before = resident_bytes(impatient)
    with connect(impatient, b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + behind) as connection:
        flood(connection, 64)
        assert refusal(replies(until_closed(connection))) == (431, "headers_too_large")
    assert resident_bytes(impatient) - before < 6 << 20
