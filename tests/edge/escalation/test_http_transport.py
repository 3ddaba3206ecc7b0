"""Escalation over HTTP with late answers: connections stay open, callers do not wait, and nothing is left over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from edge.escalation.client import DatacenterClient
from edge.escalation.http_transport import DRAIN_BYTES, HttpTransport
from edge.escalation.transport import Escalation, Ingress, ReplyLate, TransportBroken
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import EscalationFailed
from hawkvision.core.escalation_api import EscalationRequest
from hawkvision.core.trace_context import start_trace
from tests.edge.peer import Peer, running_peer
from tests.hawkvision.tasks.classes import TEN
from tests.waiting import until

CONNECTIONS = 4
LATE_S = 0.05
LONG_S = 20.0
HURRIED = EscalationRequest(variant="reference", deadline_ms=LATE_S * 1e3)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with running_peer() as peer:
        yield peer


async def ask(
    transport: HttpTransport, timeout_s: float, request: EscalationRequest = HURRIED, body: bytes = b"image"
) -> int:
    status, _ = await transport.send(Escalation(body, request, start_trace(), timeout_s))
    return status


def test_a_late_answer_keeps_its_connection_open_for_the_next_image(peer: Peer) -> None:
    async def scenario() -> None:
        transport = HttpTransport(Ingress(peer.url, connections=CONNECTIONS))
        for number in range(8):
            peer.held = True
            with pytest.raises(ReplyLate):
                await ask(transport, LATE_S)
            peer.held = False
            await until(lambda number=number: peer.answered > number)  # type: ignore[misc]
        await transport.close()

    asyncio.run(scenario())
    assert len(peer.bodies) == 8
    assert len(peer.ports) <= 3, "an answer may still be on its way when the next image leaves"


@pytest.mark.parametrize("asked", [HURRIED, EscalationRequest(variant="reference")], ids=["deadline", "none"])
def test_a_connection_stays_open_when_its_answer_is_not_wanted_any_more(peer: Peer, asked: EscalationRequest) -> None:
    async def scenario() -> None:
        transport = HttpTransport(Ingress(peer.url, connections=CONNECTIONS))
        for number in range(1, 9):
            peer.held = True
            leaving = asyncio.create_task(ask(transport, LONG_S, asked))
            await until(lambda number=number: len(peer.bodies) == number)  # type: ignore[misc]
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            peer.held = False
            await until(lambda: transport.draining == 0)
        await transport.close()

    asyncio.run(scenario())
    assert (peer.answered, peer.gone, len(peer.ports)) == (8, 0, 1)


def test_an_image_too_large_to_continue_is_cut_off_when_its_answer_is_not_wanted(peer: Peer) -> None:
    async def scenario() -> None:
        transport = HttpTransport(Ingress(peer.url, connections=CONNECTIONS))
        peer.held = True
        leaving = asyncio.create_task(ask(transport, LONG_S, body=bytes(DRAIN_BYTES + 1)))
        await until(lambda: len(peer.bodies) == 1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(lambda: peer.gone == 1)
        await transport.close()

    asyncio.run(scenario())


def test_answers_that_never_come_leave_connections_for_the_next_image(peer: Peer) -> None:
    async def scenario() -> None:
        transport = HttpTransport(Ingress(peer.url, connections=CONNECTIONS), drain_s=10 * LONG_S)
        peer.delay_s = 10 * LONG_S
        for _ in range(2):
            late = await asyncio.gather(*(ask(transport, LATE_S) for _ in range(CONNECTIONS)), return_exceptions=True)
            assert all(isinstance(each, ReplyLate) for each in late)
        assert transport.draining == CONNECTIONS // 2
        peer.delay_s = 0.0
        assert await ask(transport, LONG_S) == 200
        await transport.close()

    asyncio.run(scenario())


def test_an_abandoned_exchange_ends_after_its_bound(peer: Peer) -> None:
    async def scenario() -> None:
        transport = HttpTransport(Ingress(peer.url, connections=CONNECTIONS), drain_s=LATE_S)
        peer.held = True
        with pytest.raises(ReplyLate):
            await ask(transport, LATE_S)
        await until(lambda: transport.draining == 0)
        assert len(peer.bodies) == 1
        assert not peer.answered
        peer.held = False
        await transport.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_", "body", "drains"),
    [(HURRIED, b"image", 1), (EscalationRequest(), b"image", 0), (HURRIED, bytes(DRAIN_BYTES + 1), 0)],
    ids=["deadline", "no deadline", "large"],
)
def test_only_small_images_with_deadlines_continue_when_they_are_late(
    peer: Peer, request_: EscalationRequest, body: bytes, drains: int
) -> None:
    async def scenario() -> None:
        transport = HttpTransport(Ingress(peer.url, connections=CONNECTIONS))
        peer.held = True
        with pytest.raises(ReplyLate):
            await ask(transport, LATE_S, request_, body)
        assert transport.draining == drains
        peer.held = False
        await until(lambda: transport.draining == 0)
        await transport.close()

    asyncio.run(scenario())


def test_an_image_that_never_got_a_connection_is_not_sent_later(peer: Peer) -> None:
    async def scenario() -> None:
        transport = HttpTransport(Ingress(peer.url, connections=CONNECTIONS))
        peer.held = True
        waiting = [asyncio.create_task(ask(transport, LONG_S)) for _ in range(CONNECTIONS)]
        await until(lambda: len(peer.bodies) == CONNECTIONS)
        with pytest.raises(ReplyLate):
            await ask(transport, LATE_S)
        peer.held = False
        assert await asyncio.gather(*waiting) == [200] * CONNECTIONS
        assert await ask(transport, LONG_S) == 200
        await transport.close()

    asyncio.run(scenario())
    assert len(peer.bodies) == CONNECTIONS + 1


def test_closing_ends_all_exchanges(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        transport = HttpTransport(Ingress(peer.url, connections=CONNECTIONS))
        peer.held = True
        with pytest.raises(ReplyLate):
            await ask(transport, LATE_S)
        waiting = [asyncio.create_task(ask(transport, LONG_S)) for _ in range(2 * CONNECTIONS)]
        await until(lambda: len(peer.bodies) == CONNECTIONS)
        await transport.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, TransportBroken) for each in results)
        with pytest.raises(TransportBroken, match="closed at this end"):
            await ask(transport, LONG_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        peer.held = False

    with caplog.at_level(logging.DEBUG, logger="asyncio"):
        asyncio.run(scenario())
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_connections_with_abandoned_exchanges_are_not_idle(peer: Peer) -> None:
    async def scenario() -> None:
        datacenter = DatacenterClient(Ingress(peer.url, connections=2), TEN, MonotonicClock())
        peer.held = True
        with pytest.raises(EscalationFailed):
            await datacenter.infer(Escalation(b"image", HURRIED, start_trace(), LATE_S))
        assert (datacenter.up, datacenter.idle) == (True, True), "one of two connections is free"
        asking = asyncio.create_task(datacenter.infer(Escalation(b"image", HURRIED, start_trace(), LONG_S)))
        await until(lambda: len(peer.bodies) == 2)
        assert (datacenter.up, datacenter.idle) == (True, False)
        peer.held = False
        await asking
        await until(lambda: datacenter.idle)
        await datacenter.close()

    asyncio.run(scenario())


def test_a_listing_that_times_out_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edge.escalation.http_transport.LISTING_TIMEOUT_S", LATE_S)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server:
            transport = HttpTransport(Ingress(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            with pytest.raises(EscalationFailed, match=r": TimeoutError$"):
                await transport.stages()
            await transport.close()

    asyncio.run(scenario())
