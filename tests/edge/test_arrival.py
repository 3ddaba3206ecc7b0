"""What the sender's kernel knows of a picture's way, over real sockets whose other end reads when it is told to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

import pytest
import uvloop

from edge.arrival import Sending, watch
from edge.uplink import GivenUp, Uplink
from hawkvision.cascade.patience import Patience
from hawkvision.clock import MonotonicClock
from hawkvision.errors import EscalationFailed
from hawkvision.hop import HopRequest
from hawkvision.trace import start_trace
from tests.edge.peer import Peer, running_peer
from tests.waiting import until

LARGE = bytes(16 * 1024 * 1024)
"""More than any two sockets' buffers hold."""
DEADLINE_S = 60.0
HELD_S = 0.02
HURRIED = HopRequest(variant="committee", deadline_ms=DEADLINE_S * 1e3)


ResultT = TypeVar("ResultT")


class Run(Protocol):
    def __call__(self, main: Coroutine[Any, Any, ResultT]) -> ResultT: ...


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """As `asyncio.run`, on either loop: their transports are alike, but have no class in common."""

    def running(main: Coroutine[Any, Any, ResultT]) -> ResultT:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(main)

    return running


@asynccontextmanager
async def deaf_peer() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]]:
    """A connection, and its other end, of which nobody reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        other, _ = await asyncio.get_running_loop().sock_accept(listener)
        with other:
            yield reader, writer, other
            writer.transport.abort()


async def read(other: socket.socket, size: int) -> None:
    while size:
        size -= len(await asyncio.get_running_loop().sock_recv(other, min(size, 1 << 20)))


def test_a_picture_is_under_way_until_the_other_end_has_taken_it(run: Run) -> None:
    async def scenario() -> tuple[list[bool], bool]:
        async with deaf_peer() as (_, writer, other):
            picture = Sending()
            picture.connected(writer.transport)
            before = [picture.under_way]  # nothing waits to be acknowledged, but nothing has been written
            picture.written()
            writer.write(LARGE)
            before.append(picture.under_way)
            await read(other, len(LARGE))
            await until(lambda: not picture.under_way)
            return before, picture.under_way

    assert run(scenario()) == ([True, True], False)


def test_a_picture_without_a_connection_is_under_way_and_one_whose_exchange_has_ended_is_not() -> None:
    picture = Sending()
    assert picture.under_way
    picture.end()
    assert not picture.under_way


def test_what_cannot_be_told_of_a_closed_connection_is_no_reason_to_give_up(run: Run) -> None:
    async def scenario() -> bool:
        async with deaf_peer() as (_, writer, _):
            picture = Sending()
            picture.connected(writer.transport)
            picture.written()
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
            return picture.under_way

    assert run(scenario()) is False


def test_arrivals_are_learned_and_so_is_what_did_not_arrive_early_enough(run: Run) -> None:
    clock, patience = MonotonicClock(), Patience()

    async def scenario() -> tuple[Sending, Sending]:
        async with deaf_peer() as (_, writer, other):
            there, late = Sending(), Sending()
            there.connected(writer.transport)
            there.written()
            await watch(there, patience, 1e9, clock)
            late.connected(writer.transport)
            late.written()
            writer.write(LARGE)
            watching = asyncio.create_task(watch(late, patience, 10.0, clock))
            await until(late.stuck.is_set)
            await read(other, len(LARGE))
            await watching
            return there, late

    there, late = run(scenario())
    assert [(wait.answered, wait.ms >= 10.0) for wait in patience._waits] == [(True, False), (False, True)]
    assert (there.stuck.is_set(), late.stuck.is_set()) == (False, True)
    assert there.arrived_at is not None
    assert late.arrived_at is not None, "it is looked at to the end, for what the tier takes from then on"


def test_of_an_exchange_that_has_ended_nobody_knows_when_the_picture_arrived() -> None:
    picture = Sending()
    picture.end()
    asyncio.run(watch(picture, Patience(), 1e9, MonotonicClock()))
    assert picture.arrived_at is None


@pytest.fixture
def peer() -> Iterator[Peer]:
    with running_peer() as peer:
        yield peer


@asynccontextmanager
async def uplink_to(url: str, give_up_below: float = 0.25) -> AsyncIterator[Uplink]:
    uplink = Uplink(url, None, connections=2, classes=1000, clock=MonotonicClock(), give_up_below=give_up_below)
    try:
        yield uplink
    finally:
        await uplink.close()


async def to_a_deaf_peer(give_up_below: float, timeout_s: float) -> tuple[EscalationFailed, int]:
    """What comes of a picture that nobody takes, when pictures arrived at once so far, and those still under way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        async with uplink_to(f"http://{host}:{port}", give_up_below) as uplink:
            now = uplink._clock.now()
            uplink._since_arrival_ms[uplink._ways.http].append(250.0)
            for _ in range(8):
                uplink.link.patience_for_arrival.answered(1.0, now)
                uplink.link.patience_for_arrival.late(DEADLINE_S * 1e3, now)
            with pytest.raises(EscalationFailed) as caught:
                await uplink.infer(LARGE, HURRIED, start_trace(), timeout_s, patient=False)
            return caught.value, uplink._pending


def test_who_waits_gives_up_when_a_picture_is_stuck_on_the_way_and_the_picture_travels_on(run: Run) -> None:
    error, pending = run(asyncio.wait_for(to_a_deaf_peer(0.25, DEADLINE_S), DEADLINE_S / 2))
    assert isinstance(error, GivenUp)
    assert "has not arrived" in str(error)
    assert pending == 1


def test_two_callers_who_gave_up_are_enough_for_doubt_though_their_answers_were_in_time(run: Run, peer: Peer) -> None:
    async def scenario() -> tuple[bool, bool, int]:
        async with uplink_to(peer.url) as uplink:
            now, patience = uplink._clock.now(), uplink.link.patience
            for _ in range(8):
                patience.answered(20.0, now)
                patience.late(DEADLINE_S * 1e3, now)
            known, before = len(patience._waits), uplink.doubts(20.0)
            peer.delay_s = 10 * HELD_S
            for _ in range(2):
                with pytest.raises(GivenUp):
                    await uplink.infer(b"picture", HURRIED, start_trace(), DEADLINE_S, patient=False)
            await until(lambda: not uplink._pending)
            return before, uplink.doubts(20.0), sum(wait.answered for wait in list(patience._waits)[known:])

    assert run(scenario()) == (False, True, 2)


def test_a_refusal_that_comes_after_somebody_gave_up_makes_the_wait_in_vain_no_longer(run: Run, peer: Peer) -> None:
    async def scenario() -> float:
        async with uplink_to(peer.url) as uplink:
            now, patience = uplink._clock.now(), uplink.link.patience
            for _ in range(8):
                patience.answered(20.0, now)
                patience.late(DEADLINE_S * 1e3, now)
            peer.delay_s, peer.status, peer.error_code = 20 * HELD_S, 504, "deadline_missed"
            with pytest.raises(GivenUp):
                await uplink.infer(b"picture", HURRIED, start_trace(), DEADLINE_S, patient=False)
            vain_s = uplink.trial_s
            await until(lambda: not uplink._pending)
            return uplink.trial_s - vain_s

    assert run(scenario()) == 0.0


def test_who_wants_to_wait_until_the_deadline_does(run: Run) -> None:
    error, _ = run(to_a_deaf_peer(0.0, 0.3))
    assert "not arrived" not in str(error)


def test_each_picture_over_a_kept_connection_arrives_by_itself_and_is_waited_for(run: Run, peer: Peer) -> None:
    async def scenario() -> tuple[list[bool], list[bool]]:
        async with uplink_to(peer.url) as uplink:
            waits = uplink.link.patience_for_arrival._waits

            async def ask(before: int) -> None:
                peer.held = True
                asking = asyncio.create_task(
                    uplink.infer(b"picture", HURRIED, start_trace(), DEADLINE_S, patient=False)
                )
                await until(lambda: len(waits) > before)  # while its answer is still awaited
                peer.delay_s = HELD_S
                peer.held = False
                await asking

            for pictures in range(3):
                await ask(pictures)
            took_ms = uplink._since_arrival_ms[uplink._ways.http]
            return [wait.answered for wait in waits], [HELD_S * 1e3 <= ms < DEADLINE_S * 1e3 for ms in took_ms]

    assert run(scenario()) == ([True] * 3, [True] * 3)
    assert len(peer.ports) == 1
