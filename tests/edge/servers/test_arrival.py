"""However a photograph arrives, it is one request: one token of its key, one in the metrics, one answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import closing

import pytest

from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller
from tests.edge.peer import Peer
from tests.edge.servers.conftest import RATE
from tests.hawkvision.servers.raw_http import connect, replies, until_closed
from tests.images import encoded, photograph

PAUSE_S = 0.02


def request(image: bytes, arrives: str, *lines: bytes) -> Iterable[bytes]:
    """The pieces in which a request for an answer is sent."""
    form = b"--b\r\nContent-Disposition: form-data; name=image; filename=a.jpg\r\n\r\n" + image + b"\r\n--b--\r\n"
    body = form if arrives == "form" else image
    length = b"Transfer-Encoding: chunked" if arrives == "chunked" else b"Content-Length: %d" % len(body)
    kind = b"multipart/form-data; boundary=b" if arrives == "form" else b"image/jpeg"
    head = b"\r\n".join((
        b"POST /v1/classify?quality=fast HTTP/1.1", b"Host: localhost", b"Connection: close", b"Content-Type: " + kind,
        length, *lines, b"", b"",
    ))  # fmt: skip
    step = len(body) // 4 + 1
    pieces = [body[at : at + step] for at in range(0, len(body), step)]
    if arrives == "chunked":
        return head, *(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"
    return (head, *pieces) if arrives == "in slow pieces" else (head + body,)


def status(node: ServerProcess, pieces: Iterable[bytes]) -> int:
    """The status of the one answer to a request that is sent piece by piece."""
    with connect(node) as connection:
        for number, piece in enumerate(pieces):
            time.sleep(PAUSE_S if number else 0.0)
            connection.sendall(piece)
        (reply,) = replies(until_closed(connection))
    return reply.status


def under_way(caller: Caller) -> float:
    """Requests that the node is answering."""
    page = caller.get("/metrics").body.decode()
    return float(page.partition("\nhawkvision_requests_in_flight ")[2].split()[0])


def counted(caller: Caller, operator: str, metric: str, labels: str) -> float:
    """The sum of a metric over the series whose labels match a pattern."""
    page = caller.send("GET", "/metrics", headers={"Authorization": f"Bearer {operator}"}).body.decode()
    return sum(float(value) for value in re.findall(rf"^{metric}{{[^}}]*{labels}[^}}]*}} (\S+)$", page, re.MULTILINE))


@pytest.mark.parametrize("arrives", ["whole", "in slow pieces", "chunked", "form"])
@pytest.mark.parametrize("kilobytes", [39, 196])
def test_one_photograph_costs_one_token_and_is_counted_once(
    keyed: ServerProcess, keys: dict[str, str], kilobytes: int, arrives: str
) -> None:
    key, operator = keys["camera"], keys["prometheus"]
    series = ("hawkvision_key_requests_total", 'key="camera"'), ("hawkvision_requests_total", "")
    with closing(Caller(keyed)) as caller:
        before = [counted(caller, operator, *each) for each in series]
        pieces = request(photograph(kilobytes), arrives, b"Authorization: Bearer " + key.encode())
        assert status(keyed, pieces) == 200
        assert [counted(caller, operator, *each) for each in series] == [each + 1 for each in before]


@pytest.mark.parametrize("kilobytes", [39, 196])
def test_as_many_photographs_as_the_rate_allows_are_answered_at_once(
    keyed: ServerProcess, keys: dict[str, str], kilobytes: int
) -> None:
    header = b"Authorization: Bearer " + keys[str(kilobytes)].encode()
    found = [status(keyed, request(photograph(kilobytes), "whole", header)) for _ in range(RATE)]
    assert found == [200] * RATE


def test_the_deadline_counts_from_the_head(edge: ServerProcess) -> None:
    head, body, *rest = request(encoded(), "in slow pieces", b"X-HawkVision-Deadline-Ms: 60000")
    with connect(edge, head) as connection:
        time.sleep(0.1)
        connection.sendall(b"".join((body, *rest)))
        (reply,) = replies(until_closed(connection))
    assert reply.json["timing_ms"]["total"] >= 50


def test_a_started_request_is_answered_when_the_node_stops() -> None:
    (sends,) = request(encoded(), "whole")
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


def test_a_caller_that_hangs_up_is_not_waited_for(caller: Caller, edge: ServerProcess, peer: Peer) -> None:
    peer.delay_s, asked = 20.0, len(peer.bodies)
    (sends,) = request(encoded(), "whole", b"X-HawkVision-Min-Confidence: 1")
    with connect(edge, sends.replace(b"quality=fast", b"")):
        while len(peer.bodies) == asked:
            assert under_way(caller) <= 1
    while under_way(caller):
        assert len(peer.bodies) == asked + 1
    peer.delay_s = 0.0
