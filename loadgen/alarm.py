"""Waking up on time: event loops count milliseconds, the kernel's timers nanoseconds.

asyncio rounds every wait up to a whole millisecond and libuv does alike, which would be seen in each latency that
counts from the scheduled time. A timer of the kernel (timerfd_create(2)) that the loop watches like a socket wakes it
within some 0.1 ms. Where there is none, the loop's own timers do.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from typing import Final

_NONBLOCK: Final = 0o4000
_CLOEXEC: Final = 0o2000000
_ABSOLUTE: Final = 1
_NS: Final = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Waits for moments of `time.monotonic`, one at a time, on the running loop. Close it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._libc: ctypes.CDLL | None = None
        self._timer = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK | _CLOEXEC)
        if self._timer >= 0:
            self._loop.add_reader(self._timer, self._rang)

    async def until(self, at: float) -> None:
        """Return at that moment, or at once if it has passed or `ring` is called meanwhile."""
        left_s = at - time.monotonic()
        if left_s <= 0.0:
            return
        self._waiting = self._loop.create_future()
        handle: asyncio.TimerHandle | None = None
        if self._timer < 0 or self._libc is None:
            handle = self._loop.call_later(left_s, self.ring)
        else:
            seconds, nanoseconds = divmod(int(at * _NS), _NS)
            setting = _Setting(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
            if self._libc.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(setting), None) != 0:
                raise OSError(ctypes.get_errno(), "timerfd_settime")
        try:
            await self._waiting
        finally:
            self._waiting = None
            if handle is not None:
                handle.cancel()

    def ring(self) -> None:
        """Wake whoever waits, now."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """Give the timer back."""
        if self._timer >= 0:
            self._loop.remove_reader(self._timer)
            os.close(self._timer)
            self._timer = -1

    def _rang(self) -> None:
        try:
            os.read(self._timer, 8)
        except BlockingIOError:  # set anew since it expired
            return
        self.ring()
