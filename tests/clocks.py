"""A clock that tests move."""

from __future__ import annotations


class ManualClock:
    """A `Clock` that moves only by `advance`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """See `Clock.now`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: if `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
