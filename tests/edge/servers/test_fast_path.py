"""The fast path gives the answers of uvicorn, in the same order."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.servers.fast_path import HOLD_S
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller, Reply
from tests.edge.peer import Peer
from tests.fuzz.examples import SHARED_FIXTURE, examples
from tests.hawkvision.imaging.images import jpeg_with_size
from tests.hawkvision.servers.raw_http import connect, replies, until_closed
from tests.images import encoded

LARGE = encoded(".png", 256, 400)


def post(body: bytes, query: bytes = b"quality=fast", *lines: bytes, path: bytes = b"/v1/classify") -> bytes:
    head = (b"POST " + path + b"?" + query + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *lines)
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def last(body: bytes, query: bytes = b"quality=fast", *lines: bytes) -> bytes:
    return post(body, query, b"Connection: close", *lines)


def ask(edge: ServerProcess, *pieces: bytes) -> list[Reply]:
    """The answers to a request that is sent in these pieces, which the node receives one by one."""
    with connect(edge) as connection:
        for piece in pieces:
            connection.sendall(piece)
            if len(pieces) > 1:
                with closing(Caller(edge)) as other:  # one event loop: it has read the piece before this
                    assert other.get("/healthz").status == 200
        return replies(until_closed(connection))


def under_way(caller: Caller) -> float:
    """Requests that the node is answering."""
    page = caller.get("/metrics").body.decode()
    return float(page.partition("\nhawkvision_requests_in_flight ")[2].split()[0])


def refused(caller: Caller) -> float:
    """Requests that the node has answered with 400."""
    page = caller.get("/metrics").body.decode()
    counted = [line for line in page.splitlines() if line.startswith("hawkvision_requests_total") and '"400"' in line]
    return sum(float(line.split()[-1]) for line in counted)


def essence(reply: Reply) -> tuple[int, list[str], object]:
    """What does not change from one answer to the next."""
    changing = ("id", "timing_ms", "deadline_met")
    said = {name: value for name, value in reply.json.items() if name not in changing}
    return reply.status, sorted(reply.headers), said


@pytest.mark.parametrize(
    "sends",
    [
        last(encoded()),
        last(encoded(), b"top_k=3&deadline_ms=60000"),
        last(encoded(), b"quality=fast", b"X-HawkVision-Top-K: 2"),
        last(encoded(), b"colour=red"),
        last(encoded(), b"quality=best"),
        last(encoded()[:100]),
        last(jpeg_with_size(encoded(), 60_000, 60_000)),
        last(b""),
        last(b"hello", b"", b"Content-Type: text/plain"),
        last(LARGE),
        last(b"--b\r\nnonsense", b"", b"Content-Type: multipart/form-data; boundary=b"),
        last(encoded(), b"", b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        last(encoded()).replace(b"HTTP/1.1", b"HTTP/1.0"),
        last(encoded()).replace(b"POST", b"PUT"),
        last(encoded(), b"quality=fast", b"Upgrade: h2c\r\nConnection: Upgrade, close"),
        last(encoded(), b"quality=fast&", b"Upgrade: websocket\r\nConnection: Upgrade, close"),
        last(encoded()).replace(b"fast", b"fast#part"),
        last(encoded()).replace(b"/v1/classify", b"/v1/classif%79"),
    ],
)
def test_the_fast_path_and_uvicorn_give_the_same_answer(caller: Caller, edge: ServerProcess, sends: bytes) -> None:
    (whole,) = ask(edge, sends)
    (parted,) = ask(edge, sends[:-1], sends[-1:])
    (of_uvicorn,) = ask(edge, sends.replace(b"/v1/classify", b"/v1/classif%79"))
    assert essence(whole) == essence(parted) == essence(of_uvicorn)
    assert whole.headers["connection"] == "close"


@pytest.mark.parametrize(("query", "status"), [(b"task=imagenet&quality=fast", 200), (b"task=another", 404)])
def test_infer_and_its_typed_form_answer_alike(edge: ServerProcess, query: bytes, status: int) -> None:
    typed = last(encoded(), query)
    (classified,) = ask(edge, typed)
    for path in (b"/v1/infer", b"/v1/infe%72"):  # on the fast path, and by uvicorn
        (inferred,) = ask(edge, typed.replace(b"/v1/classify", path))
        assert essence(inferred) == essence(classified)
        assert inferred.status == status


JAVA = (
    b"POST /v1/classify?quality=fast HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\n"
    b"Host: 127.0.0.1:8080\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAABgAGAAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/21.0.2\r\nContent-Type: image/jpeg\r\n\r\n"
)
KTOR = (
    b"POST /v1/classify?quality=fast HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nTransfer-Encoding: chunked\r\n"
    b"Host: 127.0.0.1:8080\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAABgAGAAA\r\nUpgrade: h2c\r\n"
    b"accept: */*\r\naccept-charset: UTF-8\r\nuser-agent: ktor-client\r\n\r\n"
)
CURL = (
    b"POST /v1/classify?quality=fast HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    b"Content-Length: %d\r\nContent-Type: application/x-www-form-urlencoded\r\n\r\n"
)


@pytest.mark.parametrize("client", [JAVA, KTOR, CURL], ids=["Java", "Ktor", "curl"])
@pytest.mark.parametrize("image", [encoded(), LARGE], ids=["small", "large"])
@pytest.mark.parametrize("together", [True, False])
def test_clients_that_offer_http_2_get_their_answers_and_keep_their_connections(
    caller: Caller, edge: ServerProcess, client: bytes, image: bytes, together: bool
) -> None:
    if client is KTOR:
        head, body = client, b"%x\r\n%b\r\n0\r\n\r\n" % (len(image), image)
    else:
        head, body = client % len(image), image
    pieces = [head + body] * 2 if together else [head, body, head, body]
    found = ask(edge, *pieces, last(encoded()))
    assert [reply.status for reply in found] == [200] * 3
    assert found[0].json["top_k"] == found[1].json["top_k"]


def test_a_late_body_is_awaited(caller: Caller, edge: ServerProcess) -> None:
    sends = last(encoded(), b"quality=fast&deadline_ms=60000")
    with connect(edge, sends[:-100]) as connection:
        until = time.monotonic() + 40 * HOLD_S
        while time.monotonic() < until:
            assert caller.get("/healthz").status == 200
        connection.sendall(sends[-100:])
        (reply,) = replies(until_closed(connection))
    assert reply.status == 200
    assert reply.json["timing_ms"]["total"] >= 20 * HOLD_S * 1e3, "the deadline counts from the head"


def test_a_refused_request_is_counted_once_however_late_its_body(caller: Caller, edge: ServerProcess) -> None:
    sends = last(encoded(), b"colour=red")
    for pause_s in (0.0, 40 * HOLD_S):
        before = refused(caller)
        with connect(edge, sends[:-100]) as connection:
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                assert caller.get("/healthz").status == 200
            connection.sendall(sends[-100:])
            assert [reply.status for reply in replies(until_closed(connection))] == [400]
        assert refused(caller) == before + 1


def test_callers_that_leave_while_their_heads_are_held_leave_nothing_behind(
    caller: Caller, edge: ServerProcess
) -> None:
    for cut in (1, 50, len(encoded())):
        connect(edge, post(encoded())[:-cut]).close()
    while under_way(caller):
        assert caller.classify(encoded(), "quality=fast").status == 200


def test_a_started_request_is_answered_when_the_node_stops() -> None:
    sends = last(encoded())
    with (
        running("edge", "--port", "0", "--backend", "noop") as node,
        connect(node, sends[:-5]) as connection,
        closing(Caller(node)) as other,
    ):
        assert other.get("/healthz").status == 200
        node.process.terminate()
        connection.sendall(sends[-5:])
        assert [reply.status for reply in replies(until_closed(connection))] == [200]
        assert node.process.wait(60) == 0


@given(cuts=st.lists(st.integers(0, len(last(encoded()))), max_size=3))
@settings(max_examples=examples(200), deadline=None, suppress_health_check=SHARED_FIXTURE)
def test_wherever_a_request_is_cut_it_is_answered(caller: Caller, edge: ServerProcess, cuts: list[int]) -> None:
    sends = last(encoded())
    pieces = [sends[a:b] for a, b in pairwise(sorted({0, len(sends), *cuts}))]
    assert [reply.status for reply in ask(edge, *pieces)] == [200]


def test_requests_in_one_piece_are_answered_in_order(caller: Caller, edge: ServerProcess) -> None:
    other = post(b"", path=b"/healthz").replace(b"POST", b"GET")
    sends = [
        post(encoded(), b"quality=fast&top_k=1"),
        other,
        post(encoded(), b"quality=fast&top_k=2"),
        post(b"x"),
        last(encoded(), b"quality=fast&top_k=4"),
    ]
    found = ask(edge, b"".join(sends))
    assert [reply.status for reply in found] == [200, 200, 200, 415, 200]
    assert [len(reply.json.get("top_k", [])) for reply in found] == [1, 0, 2, 0, 4]


@pytest.mark.parametrize(
    "behind", [b"nonsense\r\n\r\n", b"GET /" + bytes(3), b"POST /v1/classify HTTP/1.1\r\nHost: x\r\n\0"]
)
def test_broken_bytes_after_a_complete_request_do_not_harm_it(
    caller: Caller, edge: ServerProcess, behind: bytes
) -> None:
    assert [reply.status for reply in ask(edge, post(encoded()) + behind)] == [200, 400]


def test_an_incomplete_request_after_a_complete_one_is_awaited(caller: Caller, edge: ServerProcess) -> None:
    behind = last(encoded())
    assert [reply.status for reply in ask(edge, post(encoded()) + behind[:-5], behind[-5:])] == [200, 200]


def test_a_broken_body_is_refused_once(caller: Caller, edge: ServerProcess) -> None:
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert [reply.status for reply in ask(edge, head + b"3\r\nabc\r\nno number\r\n")] == [400]
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(encoded()), encoded())
    assert [
        reply.status for reply in ask(edge, head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunked)
    ] == [200]


@given(
    damage=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 255)), min_size=1, max_size=4),
    behind=st.binary(max_size=30),
)
@settings(max_examples=examples(150), deadline=None, suppress_health_check=SHARED_FIXTURE)
def test_damaged_heads_are_answered_or_refused_as_documented(
    caller: Caller, edge: ServerProcess, damage: list[tuple[int, int]], behind: bytes
) -> None:
    sends = bytearray(last(encoded()))
    for at, value in damage:
        sends[at] = value
    with connect(edge, bytes(sends) + behind) as connection:
        connection.shutdown(socket.SHUT_WR)  # who awaits more would do so for long
        found = replies(until_closed(connection))
    for reply in found:
        assert reply.status in (200, 400, 404, 405, 408, 413, 414, 415, 422, 431)
        if reply.status != 200 and reply.body:
            assert {"error", "code"} <= set(reply.json)
    assert caller.classify(encoded(), "quality=fast").status == 200


def test_a_caller_that_hangs_up_is_not_waited_for(caller: Caller, edge: ServerProcess, peer: Peer) -> None:
    peer.delay_s = 20.0
    asked = len(peer.bodies)
    with connect(edge, post(encoded(), b"quality=best")):
        while len(peer.bodies) == asked:
            assert under_way(caller) <= 1
    while under_way(caller):
        assert len(peer.bodies) == asked + 1


@pytest.fixture
def caller(edge: ServerProcess, peer: Peer) -> Iterator[Caller]:
    """A connection to `edge`, whose datacenter behaves before and after."""
    peer.delay_s, peer.status, peer.garbage = 0.0, 200, False
    caller = Caller(edge)
    yield caller
    caller.close()
    peer.delay_s = 0.0
