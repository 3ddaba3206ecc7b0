"""Time as an argument: what waits or measures asks a `Clock`, so tests can move it by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A moment by which a response must be there; it travels as remaining time, for clocks of two machines differ."""

    at: float
    """Seconds of a monotonic clock of this process, from which every `now` here is, too."""

    @classmethod
    def after_s(cls, seconds: float, now: float) -> Deadline:
        """So many seconds from now; a negative number has passed."""
        return cls(now + seconds)

    @classmethod
    def after_ms(cls, ms: float, now: float) -> Deadline:
        """So many milliseconds from now."""
        return cls(now + ms * 1e-3)

    def remaining_s(self, now: float) -> float:
        """Seconds that are left; negative once it has passed."""
        return self.at - now

    def remaining_ms(self, now: float) -> float:
        """Milliseconds that are left; negative once it has passed."""
        return (self.at - now) * 1e3

    def passed(self, now: float) -> bool:
        """Whether nothing is left."""
        return now >= self.at
