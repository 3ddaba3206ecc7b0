"""What a busy node does at the end of a request's head: real sockets, an edge stage that does not end."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from typing import Any

import pytest

from edge.serving.node import EdgeNode
from hawkvision.core.types import Quality
from tests.edge.bench import SURE, bench, run
from tests.edge.peer import Peer
from tests.edge.tasks.test_tasks import served
from tests.images import encoded
from tests.waiting import until

HURRIED = "/v1/classify?quality=fast&deadline_ms=300"


def request(path: str, body: bytes, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", *lines]
    if not any(line.startswith("Transfer-Encoding") for line in lines):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*head, "", "")).encode() + body


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def exchange(port: int, *sent: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """The replies to what is sent over one connection, in pieces, until as many have come or it ends."""
    found: list[tuple[int, dict[str, str], bytes]] = []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection, connection.makefile("rb") as replies:
        for piece in sent:
            connection.sendall(piece)
        while len(found) < 2 and (status := replies.readline()):
            lines = iter(lambda: replies.readline().decode().strip(), "")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            found.append((int(status.split()[1]), headers, replies.read(int(headers["content-length"]))))
    return found


def busy_replies(*sent: bytes) -> tuple[list[tuple[int, dict[str, str], bytes]], EdgeNode]:
    async def scenario() -> tuple[list[tuple[int, dict[str, str], bytes]], EdgeNode]:
        async with bench(None, SURE) as it, served(it) as (_, port):
            queued = await it.occupy(5)
            found = await asyncio.to_thread(exchange, port, *sent)
            it.backend.gate.set()
            await asyncio.gather(*queued)
            await until(lambda: it.node.pool._queue.admission.inside == 0)
            return found, it.node

    return run(scenario)


CHUNKED = b"5\r\nabcde\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        (request(HURRIED, encoded()), HEALTH),
        (request(HURRIED, encoded()) + HEALTH,),
        (request(HURRIED, bytes(900_000)), HEALTH),
        (request(HURRIED, CHUNKED, "Transfer-Encoding: chunked"), HEALTH),
        (request("/v1/infer?quality=fast", encoded(), "X-HawkVision-Deadline-Ms: 300"), HEALTH),
    ],
    ids=["one by one", "together", "a long body", "chunked", "the deadline in a header"],
)
def test_what_would_be_late_is_refused_and_the_connection_goes_on(sent: tuple[bytes, ...]) -> None:
    ((status, headers, body), healthy), node = busy_replies(*sent)
    assert (status, json.loads(body)["code"], healthy[0]) == (429, "overloaded", 200)
    assert int(headers["retry-after"]) >= 1
    assert headers["x-request-id"]
    labels = {"task": node.task, "reason": "deadline"}
    assert node.metrics.registry.get_sample_value("hawkvision_shed_total", labels) in (None, 1.0)


def test_who_closes_gets_the_refusal_and_the_end(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = busy_replies(request(HURRIED, encoded(), "Connection: close") + HEALTH)
    assert [status for status, _, _ in found] == [429]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("path", "lines", "status"),
    [
        (HURRIED + "&stream=a&nonsense=1", (), 400),
        (HURRIED + "&task=unknown", (), 404),
        (HURRIED, ("Content-Type: text/plain",), 415),
    ],
)
def test_errors_of_the_request_itself_are_told_first(path: str, lines: tuple[str, ...], status: int) -> None:
    (refused, healthy), _ = busy_replies(request(path, encoded(), *lines), HEALTH)
    assert (refused[0], healthy[0]) == (status, 200)


def test_an_idle_node_answers_whatever_the_estimate_says() -> None:
    async def scenario() -> list[Any]:
        async with bench(None, SURE) as it, served(it) as (_, port):
            await it.ask(target=Quality.FAST)
            it.node.pool._queue.admission.interval_s = 1e6
            sent = request(HURRIED, encoded())
            return await asyncio.to_thread(exchange, port, sent, sent)

    assert [status for status, _, _ in run(scenario)] == [200, 200]


def test_while_both_tiers_are_full_requests_for_the_datacenter_are_refused_at_once(peer: Peer) -> None:
    best = request("/v1/classify?quality=best&deadline_ms=1500", encoded(), "Connection: close")
    peer.status, before = 429, len(peer.bodies)

    async def scenario() -> list[tuple[int, int]]:
        async with bench(peer, SURE) as it, served(it) as (_, port):
            queued = await it.occupy(5)
            assert it.node.datacenter is not None
            memory, found = it.node.datacenter._exchanges, []
            for refused_at in (-math.inf, it.clock.now() + 60.0, -math.inf):
                memory.overloaded_at = refused_at
                ((status, _, _),) = await asyncio.to_thread(exchange, port, best)
                found.append((status, len(peer.bodies) - before))
            assert it.node.datacenter.overloaded
            it.backend.gate.set()
            await asyncio.gather(*queued)
            return found

    assert run(scenario) == [(429, 1), (429, 1), (429, 2)], "asked, left alone after a refusal, and asked again"
