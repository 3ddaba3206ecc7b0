"""HTTP connections within bounds: a real node on the no-op backend, and callers who mean it no good."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hawkvision.servers.connections import ConnectionRegistry, Limits, address_of, connections_for
from hawkvision.servers.protocol import MAX_DRAINED_BYTES, MAX_HEAD_BYTES, MAX_PIPELINED, MAX_URL_BYTES
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller, Reply
from tests.hawkvision.servers.impatient import PER_ADDRESS
from tests.images import encoded

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
KEY = "a-key-of-the-node"
BEARER = f"Authorization: Bearer {KEY}\r\n".encode()
FILES = 144
"""Leaves 16 connections."""


@pytest.fixture(scope="module")
def node() -> Iterator[ServerProcess]:
    with running("edge", "--port", "0", "--backend", "noop", "--api-key", KEY) as node:
        yield node


@pytest.fixture(scope="module")
def impatient() -> Iterator[ServerProcess]:
    with running("tests.hawkvision.servers.impatient") as server:
        yield server


@pytest.fixture
def limited() -> Iterator[ServerProcess]:
    with running("tests.edge.limited", str(FILES), "--port", "0", "--backend", "noop") as node:
        yield node


def connect(server: ServerProcess, sends: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(sends)
    return connection


def until_closed(connection: socket.socket) -> bytes:
    """Everything the server still says; a reset counts as a close."""
    said = b""
    try:
        while piece := connection.recv(1 << 20):
            said += piece
    except ConnectionError:
        pass
    return said


def answer(connection: socket.socket) -> int:
    """The status of one answer on a connection that stays open, read to its end."""
    said = b""
    while not (found := replies(said)) or len(found[0].body) < int(found[0].headers.get("content-length", "1")):
        said += connection.recv(65536)
    return found[0].status


def replies(said: bytes) -> list[Reply]:
    """Several answers that came one after the other."""
    found = []
    while said:
        head, _, rest = said.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = int(headers.get("content-length", "0"))
        found.append(Reply(int(status.split()[1]), headers, rest[:size]))
        said = rest[size:]
    return found


def ask(server: ServerProcess, sends: bytes) -> list[Reply]:
    with connect(server, sends) as connection:
        return replies(until_closed(connection))


def flood(connection: socket.socket, mebibytes: int) -> None:
    """Send as much as the server takes."""
    block = b"a" * (1 << 20)
    try:
        for _ in range(mebibytes):
            connection.sendall(block)
    except ConnectionError:
        pass


def resets(connection: socket.socket) -> bool:
    """Whether the server stops taking what is sent, within half a minute."""
    poll = select.poll()
    poll.register(connection, 0)  # errors are always reported
    try:
        for _ in range(600):
            connection.sendall(b"x")
            if poll.poll(50):
                return True
    except ConnectionError:
        return True
    return False


def resident_bytes(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def healthy(server: ServerProcess) -> bool:
    with closing(Caller(server)) as caller:
        return caller.get("/healthz").status == 200


def refusal(found: list[Reply]) -> tuple[int, str]:
    """Status and code of the only answer, which must be in the documented form."""
    (only,) = found
    assert only.headers["content-type"] == "application/json"
    assert only.headers["connection"] == "close"
    assert set(only.json) == {"error", "code"}
    return only.status, only.json["code"]


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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_a_refusal_waits_for_the_answers_before_it(node: ServerProcess) -> None:
    *good, bad = ask(node, GET * 3 + b"nonsense\r\n\r\n")
    assert [reply.status for reply in good] == [200, 200, 200]
    assert refusal([bad]) == (400, "bad_field")


def test_a_broken_pipelined_body_is_refused_in_its_turn(node: ServerProcess) -> None:
    broken = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"
    *good, bad = ask(node, GET * 2 + broken)
    assert [reply.status for reply in good] == [200, 200]
    assert refusal([bad]) == (400, "bad_field")


def test_pipelines_have_a_bound(node: ServerProcess) -> None:
    *good, refused = ask(node, GET * 1000)
    assert [reply.status for reply in good] == [200] * (MAX_PIPELINED + 1), "the one at work and those behind it"
    assert refusal([refused]) == (429, "overloaded")
    assert refused.headers["retry-after"] == "1"


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_a_caller_that_expects_100_continue_gets_it(node: ServerProcess) -> None:
    image = encoded()
    lines = ("POST /v1/classify?quality=fast HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", "Connection: close")
    head = "".join(f"{line}\r\n" for line in lines)
    with connect(node, f"{head}Content-Length: {len(image)}\r\nExpect: 100-continue\r\n\r\n".encode()) as connection:
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(image)
        assert [reply.status for reply in replies(until_closed(connection))] == [200]


OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "websocket": b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\n",
    "TLS": b"Upgrade: TLS/1.2, TLS/1.0\r\nConnection: Upgrade\r\n",
}


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS.keys())
@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"])
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


def test_an_offer_with_100_continue_is_told_to_go_on(node: ServerProcess) -> None:
    image = encoded()
    head = b"POST /v1/classify?quality=fast HTTP/1.1\r\nHost: x\r\n" + BEARER + OFFERS["h2c"]
    with connect(node, head + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(image)) as connection:
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(image + GET)
        assert answer(connection) == 200


def test_many_offers_in_one_piece_have_the_bound_of_pipelines(node: ServerProcess) -> None:
    offer = b"GET /healthz HTTP/1.1\r\nHost:\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n"
    *good, refused = ask(node, offer * 3000)
    assert [reply.status for reply in good] == [200] * (MAX_PIPELINED + 1)
    assert refusal([refused]) == (429, "overloaded")


def test_broken_requests_behind_an_offer_are_refused(node: ServerProcess) -> None:
    offer = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + OFFERS["h2c"] + b"\r\n"
    good, bad = ask(node, offer + b"nonsense\r\n\r\n")
    assert good.status == 200
    assert refusal([bad]) == (400, "bad_field")


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


# ------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("sends", [b"G", b"GET /hea", GET[:-2], GET + b"GET /hea"])
def test_an_unfinished_head_is_told_that_time_is_up(impatient: ServerProcess, sends: bytes) -> None:
    found = ask(impatient, sends)
    assert len(found) == 1 + sends.startswith(GET)
    assert refusal(found[-1:]) == (408, "request_timeout")


@pytest.mark.parametrize(("begins", "drips"), [(b"GET / HTTP/1.1\r\n", b"X-A: b\r\n"), (b"", b"\r\n")])
def test_a_head_that_drips_is_told_that_time_is_up(impatient: ServerProcess, begins: bytes, drips: bytes) -> None:
    with connect(impatient, begins) as connection:
        connection.settimeout(0.05)
        said = b""
        for _ in range(600):
            try:
                said = connection.recv(65536)
                break
            except TimeoutError:
                connection.sendall(drips)
    assert refusal(replies(said)) == (408, "request_timeout")


def test_a_connection_that_never_speaks_is_closed(impatient: ServerProcess) -> None:
    with connect(impatient) as connection:
        assert until_closed(connection) == b""


def test_the_rest_of_a_refused_body_has_its_time(impatient: ServerProcess) -> None:
    (answer,) = ask(impatient, b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc")
    assert answer.status == 200, "and then the connection was closed, without a second answer"


def test_a_refused_body_that_comes_on_is_let_finish(impatient: ServerProcess) -> None:
    size = 3 * MAX_DRAINED_BYTES // 4
    with connect(impatient, b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size) as connection:
        assert answer(connection) == 200
        until, step = time.monotonic() + 2.0, size // 400
        for left in range(400, 0, -1):
            connection.sendall(bytes(step))
            while time.monotonic() < until - 2.0 * (left / 400):
                assert healthy_too(impatient)
        connection.sendall(bytes(size - 400 * step) + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer(connection) == 200, "after four times what it may take without"


def healthy_too(server: ServerProcess) -> bool:
    with closing(Caller(server)) as caller:
        return caller.get("/").status == 200


def test_a_body_that_stops_is_told_that_it_came_too_slowly(impatient: ServerProcess) -> None:
    head = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    for begins in (b"", b"x", bytes(80_000)):
        with connect(impatient, head + begins) as connection:
            assert answer(connection) == 408


def test_a_refused_caller_that_does_not_hang_up_is_cut_off(impatient: ServerProcess) -> None:
    with connect(impatient, b"nonsense\r\n\r\n") as connection:
        assert refusal(replies(until_closed(connection))) == (400, "bad_field")
        assert resets(connection)


@pytest.mark.parametrize("behind", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_caller_that_never_reads_is_cut_off(impatient: ServerProcess, version: bytes, behind: bytes) -> None:
    sends = b"GET /large HTTP/" + version + b"\r\n\r\n" + behind
    with connect(impatient, sends), closing(Caller(impatient)) as other:
        until = time.monotonic() + 20
        while int(other.get("/open").body) > 1 and time.monotonic() < until:
            pass
        assert int(other.get("/open").body) == 1


def test_a_caller_that_reads_late_gets_all_of_its_answer_and_may_ask_again(impatient: ServerProcess) -> None:
    with (
        connect(impatient, b"GET /medium HTTP/1.1\r\nHost: x\r\n\r\n") as connection,
        connection.makefile("rb") as said,
    ):
        while (line := said.readline()) != b"\r\n":
            assert line
        assert len(said.read(8 << 20)) == 8 << 20
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer(connection) == 200


@pytest.mark.slow
def test_half_open_and_silent_connections_to_a_node_are_closed_after_ten_seconds(node: ServerProcess) -> None:
    with connect(node, b"GET /hea") as half, connect(node) as silent:
        assert healthy(node)
        assert refusal(replies(until_closed(half))) == (408, "request_timeout")
        assert until_closed(silent) == b""


# ------------------------------------------------------------------------------------------------- number


def working(server: ServerProcess) -> socket.socket:
    """A connection whose request is being read: the node has asked for the rest."""
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    connection = connect(server, head)
    assert connection.recv(65536).startswith(b"HTTP/1.1 100")
    return connection


def resting(server: ServerProcess) -> socket.socket:
    """A kept-alive connection that has had an answer."""
    connection = connect(server, GET)
    assert answer(connection) == 200
    return connection


def test_when_all_connections_work_a_new_one_is_turned_away_and_may_come_back(limited: ServerProcess) -> None:
    room = connections_for(FILES)
    with ExitStack() as stack:
        busy = [stack.enter_context(working(limited)) for _ in range(room)]
        for _ in range(3 * room):
            found = ask(limited, b"")
            assert refusal(found) == (503, "not_ready")
            assert found[0].headers["retry-after"] == "1"
        busy[0].sendall(bytes(100))
        assert answer(busy[0]) == 415
        assert healthy(limited)
        busy[1].sendall(bytes(100))
        assert answer(busy[1]) == 415, "those at work were left alone"


def test_the_connection_idle_longest_makes_room_for_a_new_one(limited: ServerProcess) -> None:
    with ExitStack() as stack:
        first, second, *_ = [stack.enter_context(resting(limited)) for _ in range(connections_for(FILES))]
        first.sendall(GET)  # no longer the one that has been idle longest
        assert answer(first) == 200
        newest = stack.enter_context(resting(limited))
        assert until_closed(second) == b""
        for kept in (first, newest):
            kept.sendall(GET)
            assert answer(kept) == 200


def test_half_open_connections_do_not_keep_out_those_that_finish(limited: ServerProcess) -> None:
    room = connections_for(FILES)
    with ExitStack() as stack:
        half_open = [stack.enter_context(connect(limited, b"GET /hea")) for _ in range(10 * room)]
        answered = False
        until = time.monotonic() + 9.0
        while not answered and time.monotonic() < until:  # the oldest have a second to finish
            found = ask(limited, GET.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            answered = [reply.status for reply in found] == [200]
        assert answered
        half_open[room - 1].setblocking(False)
        with pytest.raises(BlockingIOError):  # it made room before the ten seconds were over
            half_open[room - 1].recv(1)


@pytest.mark.parametrize(
    ("client", "counts_for"),
    [
        (None, None),
        (("127.0.0.1", 1), None),
        (("127.8.9.1", 1), None),
        (("::1", 1), None),
        (("::ffff:127.0.0.1", 1), None),
        (("10.1.2.3", 1), "10.1.2.3"),
        (("::ffff:10.1.2.3", 1), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1), "fe80::/64"),
    ],
)
def test_a_connection_counts_for_its_address_and_those_of_this_machine_for_none(
    client: tuple[str, int] | None, counts_for: str | None
) -> None:
    assert address_of(client) == counts_for


def test_one_address_never_gets_more_than_half_of_all_connections() -> None:
    bounds = [
        ConnectionRegistry(Limits(all_of_them, asked)).per_address for all_of_them, asked in ((4096, 512), (16, 512))
    ]
    assert bounds == [512, 8]
    assert ConnectionRegistry(Limits(16, 0)).per_address == 0


@pytest.mark.slow
def test_one_address_holds_its_share_and_no_more_and_others_do_not_notice() -> None:
    own = "ip link set lo up; ip address add 192.0.2.1/32 dev lo; ip address add 192.0.2.2/32 dev lo; exec "
    inside = ["unshare", "-rn", "sh", "-c"]
    if subprocess.run([*inside, own + "true"], capture_output=True).returncode:
        pytest.skip("this user may not make network namespaces")
    asks = f"{sys.executable} -m tests.hawkvision.servers.two_addresses"
    done = subprocess.run([*inside, own + asks], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["of one"] == [200] * PER_ADDRESS
    assert seen["one more"] == [429, "overloaded"]
    assert seen["of another"] == [200] * PER_ADDRESS
    assert seen["of this machine"] == [200] * (2 * PER_ADDRESS)
    assert seen["after one has left"] == 200


def test_connections_follow_from_the_files_that_may_be_open() -> None:
    assert [connections_for(files) for files in (64, FILES, 256, 1024, 65_536)] == [16, 16, 128, 896, 4096]
