"""Waiting for the datacenter as long as it pays, while answers of some of a rung's members come before that of all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from hawkvision.hop import HopReply


@dataclass(frozen=True, slots=True)
class Escalated:
    """The datacenter's answer and the whole round trip in milliseconds."""

    reply: HopReply
    round_trip_ms: float

    @property
    def until_first_ms(self) -> float:
        """When there was an answer to be had, though perhaps not yet of all of the rung's members."""
        timing = self.reply.timing_ms
        return self.round_trip_ms - (0.0 if timing.first is None else max(0.0, timing.total - timing.first))


@dataclass(slots=True)
class SoFar:
    """The latest answer that has come of a progressive request while the last is still awaited."""

    latest: Escalated | None = None
    first_ms: float | None = None
    """When the first came."""
    given_up: bool = False
    """Whether nobody waits any more, and nothing came while somebody did."""
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, answer: Escalated) -> None:
        """Another one, of more members."""
        self.latest = answer
        self.first_ms = answer.round_trip_ms if self.first_ms is None else self.first_ms
        self.heard.set()


async def while_hopeful(
    task: asyncio.Task[Escalated],
    so_far: SoFar,
    first_s: float,
    rest_s: Callable[[float], float],
    stuck: asyncio.Event | None = None,
) -> bool:
    """Wait for the task; whether it ended while there was hope.

    Until `first_s` it is worth waiting for anything at all, unless the picture is `stuck` on the way. Once something
    was heard, `rest_s` is asked, with when that was in milliseconds since the picture was sent, how long it is worth
    waiting for the whole.
    """
    others = [asyncio.create_task(event.wait()) for event in (so_far.heard, stuck) if event is not None]
    try:
        await asyncio.wait({task, *others}, timeout=first_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for other in others:
            other.cancel()
    if not task.done() and so_far.first_ms is not None:
        await asyncio.wait({task}, timeout=rest_s(so_far.first_ms))
    return task.done()
