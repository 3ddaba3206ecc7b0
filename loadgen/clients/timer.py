"""Timers that are precise to about 0.1 ms.

asyncio and libuv round every wait up to a whole millisecond, which would be the largest error of a scheduled send or of
an emulated link. A kernel timer (timerfd_create(2)) that the event loop watches like a socket is more precise; the
sender wakes earlier by the remaining error (`engine.AHEAD_S`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from typing import Final

from hawkvision.core.errors import NotReady

_ABSOLUTE: Final = 1
"""TFD_TIMER_ABSTIME of timerfd_settime(2)."""


class Timer:
    """Calls back once at a time of `time.monotonic`, by a timerfd. Close it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._at: float | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise NotReady(f"no timer: {os.strerror(ctypes.get_errno())}")
        loop.add_reader(self._timer, self._stage)

    def set(self, at: float | None) -> None:
        """Ring at this time, at once if it has passed, never if None; replaces what was set before."""
        if at == self._at:
            return
        self._at = at
        # struct itimerspec {interval {s, ns}, value {s, ns}}; a value of 0 disarms.
        seconds, nanos = (0, 0) if at is None else divmod(max(1, round(at * 1e9)), 1_000_000_000)
        spec = (ctypes.c_long * 4)(0, 0, seconds, nanos)
        self._libc.timerfd_settime(self._timer, _ABSOLUTE, spec, None)

    def close(self) -> None:
        """Never ring again."""
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    def _stage(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set anew between ringing and now
            os.read(self._timer, 8)
        self._at = None
        self._ring()


class PreciseTimer:
    """Waits for moments of `time.monotonic`, one at a time, on the running loop. Close it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._timer = Timer(self._loop, self.ring)

    async def until(self, at: float) -> None:
        """Return some 0.1 ms after that moment, or at once if it has passed or `ring` is called meanwhile."""
        if at <= time.monotonic():
            return
        self._waiting = self._loop.create_future()
        self._timer.set(at)
        try:
            await self._waiting
        finally:
            self._waiting = None
            self._timer.set(None)

    def ring(self) -> None:
        """Wake all waiters now."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """Give the timer back."""
        self._timer.close()
