"""Time as an argument: what waits or measures asks a `Clock`, so tests can move it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary origin, never decreasing."""
        ...


class MonotonicClock:
    """The machine's own clock, the one `asyncio` loops run on."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until told to move."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """See `Clock.now`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: if `seconds` is negative, for a monotonic clock cannot go back.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
