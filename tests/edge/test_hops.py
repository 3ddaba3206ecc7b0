"""The hop over HTTP where answers are late: connections stay open, nobody waits for that, nothing is left over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from edge.hops import HopLate, HttpHop
from hawkvision.hop import HopRequest
from hawkvision.trace import start_trace
from tests.edge.peer import Peer, running_peer

CONNECTIONS = 4
LATE_S = 0.05


@pytest.fixture
def peer() -> Iterator[Peer]:
    with running_peer() as peer:
        yield peer


async def ask(hop: HttpHop, timeout_s: float) -> int:
    request = HopRequest(deadline_ms=timeout_s * 1e3)
    status, _ = await hop.send(b"picture", request, start_trace(), timeout_s, exact=False)
    return status


async def answered(peer: Peer, number: int) -> None:
    for _ in range(1_000):
        if peer.answered >= number:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the peer answered {peer.answered} pictures, not {number}")


def test_an_answer_that_is_late_keeps_its_connection_open_for_the_next_picture(peer: Peer) -> None:
    async def scenario() -> None:
        hop = HttpHop(peer.url, None, CONNECTIONS)
        peer.delay_s = 4 * LATE_S
        for number in range(1, 9):
            with pytest.raises(HopLate):
                await ask(hop, LATE_S)
            await answered(peer, number)
        await hop.close()

    asyncio.run(scenario())
    assert len(peer.bodies) == 8
    assert len(peer.ports) <= 3, "an answer may still be on its way when the next picture leaves"


def test_answers_that_never_come_leave_connections_for_the_next_picture(peer: Peer) -> None:
    async def scenario() -> None:
        hop = HttpHop(peer.url, None, CONNECTIONS)
        peer.delay_s = 30.0
        for _ in range(2):
            late = await asyncio.gather(*(ask(hop, LATE_S) for _ in range(CONNECTIONS)), return_exceptions=True)
            assert all(isinstance(each, HopLate) for each in late)
        peer.delay_s = 0.0
        assert await ask(hop, 1.0) == 200
        await hop.close()

    asyncio.run(scenario())


def test_a_picture_that_waited_for_a_connection_in_vain_is_not_sent_later(peer: Peer) -> None:
    async def scenario() -> None:
        hop = HttpHop(peer.url, None, CONNECTIONS)
        peer.delay_s = 6 * LATE_S
        patient = [asyncio.create_task(ask(hop, 10.0)) for _ in range(CONNECTIONS)]
        await asyncio.sleep(0)  # they have the connections
        with pytest.raises(HopLate):
            await ask(hop, LATE_S)
        assert await asyncio.gather(*patient) == [200] * CONNECTIONS
        assert await ask(hop, 10.0) == 200
        await hop.close()

    asyncio.run(scenario())
    assert len(peer.bodies) == CONNECTIONS + 1


def test_closing_ends_what_is_late_and_says_nothing_of_it(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        hop = HttpHop(peer.url, None, CONNECTIONS)
        peer.delay_s = 30.0
        with pytest.raises(HopLate):
            await ask(hop, LATE_S)
        await hop.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with caplog.at_level(logging.DEBUG, logger="asyncio"):
        asyncio.run(scenario())
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
