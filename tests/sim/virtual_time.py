"""An event loop whose time is a simulated world's: what is awaited happens when the world says so, and at once."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Timed(Protocol):
    """A world that has a clock, and moves it."""

    now: float

    def advance(self, until: float, loop: VirtualLoop) -> None:
        """Let time pass until then, or until the loop has something to do."""
        ...


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in a world's time. It waits for no sockets: there are none."""

    def __init__(self, world: Timed) -> None:
        self._world = world
        super().__init__(_WorldSelector(self, world))

    def time(self) -> float:
        return self._world.now

    @property
    def changed(self) -> bool:
        """Whether a callback is ready to run."""
        return bool(self._ready)  # type: ignore[attr-defined]


class _WorldSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop, world: Timed) -> None:
        super().__init__()
        self._loop, self._world = loop, world

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0.0:
            self._world.advance(self._world.now + (math.inf if timeout is None else timeout), self._loop)
        return []


def run(world: Timed, main: Coroutine[Any, Any, T]) -> T:
    """The result of `main` in the world's time."""
    loop = VirtualLoop(world)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
