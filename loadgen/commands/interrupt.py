"""Ctrl-C as an event, so that a command ends in order and reports what it has; a second one ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")
Handler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers
INTERRUPTED_STATUS: Final = 130
"""Exit status of a command that was interrupted, whatever it could still say."""
AT_ONCE: Final[Mapping[signal.Signals, Handler]] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
"""What the second one of each does."""


@contextmanager
def first_interrupt() -> Iterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets, as long as the context lasts. For the main thread, inside its loop.

    Not by `loop.add_signal_handler`: a second signal must be heard even while something keeps the loop from running.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def heed(_: int, __: FrameType | None) -> None:
        for each, handler in AT_ONCE.items():
            signal.signal(each, handler)
        loop.call_soon_threadsafe(stop.set)

    before = {each: signal.signal(each, heed) for each in AT_ONCE}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


async def run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What comes of some work; None if the event was set first, and so the work was cancelled."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    return None if task.cancelled() else task.result()
