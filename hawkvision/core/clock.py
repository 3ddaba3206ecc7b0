"""Clocks that code takes as arguments, and deadlines."""

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
    """The machine's monotonic clock, which `asyncio` loops use."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """The time by which a response must arrive. It travels as remaining time, because clocks of machines differ."""

    at: float
    """Seconds of a monotonic clock of this process; each `now` below is from the same clock."""

    @classmethod
    def after_s(cls, seconds: float, now: float) -> Deadline:
        """The deadline `seconds` after `now`."""
        return cls(now + seconds)

    @classmethod
    def after_ms(cls, ms: float, now: float) -> Deadline:
        """The deadline `ms` milliseconds after `now`."""
        return cls(now + ms * 1e-3)

    def remaining_s(self, now: float) -> float:
        """Seconds left; negative after the deadline."""
        return self.at - now

    def remaining_ms(self, now: float) -> float:
        """Milliseconds left; negative after the deadline."""
        return (self.at - now) * 1e3

    def passed(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return now >= self.at
