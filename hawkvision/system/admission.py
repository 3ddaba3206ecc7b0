"""Admission: refuses a request that cannot be answered in time at the current rate, when it arrives.

    wait = requests ahead · time between completions − time since the last completion
    admitted if wait <= HEADROOM · (time left − time of one request)

A queue that is longer than that only makes everybody late: under overload its order decides who is in time, and first
come, first served with a short queue serves the newest that still can be. The idea is that of CoDel (Nichols and
Jacobson, ACM Queue 2012) and Breakwater (Cho et al., OSDI 2020), which bound the time in the queue; here the bound
follows from the deadline of each request.

Callers take turns, so a caller waits behind as many requests of each other caller as it has itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final

from hawkvision.core.errors import Overloaded

HEADROOM: Final = 0.5
"""Share of the time to spare that a request may wait. The rest is for the way back, and for a rate that falls."""
GAIN: Final = 0.05
"""Weight of the newest sample in the smoothed time between completions."""
MOST_GROWTH: Final = 16.0
"""A sample counts as at most so many times the estimate: one pause of the process must not pass for the rate."""


class TooLateToBegin(Overloaded):
    """The request would be late at the current rate."""


class Admission:
    """Counts the requests inside by caller, and learns the rate at which they leave. Time is the caller's clock.

    A request that finds a worker free is admitted whatever the estimate says, so that the estimate always learns.
    """

    def __init__(self, limit: int, parallel: int) -> None:
        """Start empty.

        Args:
            limit: most requests inside; if they are reached, a caller with less than its share may still come in.
            parallel: requests that are worked on at once.
        """
        self.limit = limit
        self.parallel = parallel
        self.inside = 0
        self.interval_s = 0.0
        """Smoothed time between two completions when all workers are busy; 0 before the first."""
        self._of: Counter[Hashable] = Counter()
        self._since = 0.0
        """When the last request left, or the first came after that."""

    def wait_s(self, caller: Hashable, now: float) -> float:
        """How long a request of this caller would wait for a worker."""
        own = self._of.get(caller, 0)
        ahead = own + sum(min(number, own + 1) for other, number in self._of.items() if other != caller)
        # No more than one interval: a worker that stands still is not nearly done.
        begun_s = min(max(0.0, now - self._since), self.interval_s)
        return max(0.0, (ahead + 1 - self.parallel) * self.interval_s - begun_s)

    def check(self, caller: Hashable, left_s: float | None, now: float) -> None:
        """Refuse a request that would wait too long.

        Args:
            caller: whose turn it takes.
            left_s: seconds until its deadline; None if it has none.
            now: the time.

        Raises:
            Overloaded: if `limit` requests are inside.
            TooLateToBegin: if it would be late.
        """
        full = self.inside >= self.limit and self._of.get(caller, 0) >= self.limit // (len(self._of) + 1)
        if full:
            raise Overloaded(f"{self.inside} requests are already waiting or under way", self._retry_after_s())
        if left_s is None:
            return
        spare_s = max(0.0, left_s - self.interval_s * self.parallel)
        if (wait_s := self.wait_s(caller, now)) > HEADROOM * spare_s:
            raise TooLateToBegin(
                f"requests wait about {wait_s * 1e3:.0f} ms now, and {max(0.0, left_s) * 1e3:.0f} ms are left before "
                "the deadline",
                self._retry_after_s(),
            )

    def enter(self, caller: Hashable, now: float) -> None:
        """Record that a request has come in."""
        if not self.inside:
            self._since = max(self._since, now)
        self.inside += 1
        self._of[caller] += 1

    def leave(self, callers: Sequence[Hashable], at: float | None) -> None:
        """Record that requests have left together.

        Args:
            callers: of each.
            at: when their work ended; None if they were dropped.
        """
        if at is not None and callers:
            busy = min(self.inside, self.parallel)
            sample_s = max(0.0, at - self._since) / len(callers) * busy / self.parallel
            if not self.interval_s:
                self.interval_s = sample_s
            sample_s = min(sample_s, MOST_GROWTH * self.interval_s)
            self.interval_s += (1.0 - (1.0 - GAIN) ** len(callers)) * (sample_s - self.interval_s)
            self._since = max(self._since, at)
        self.inside -= len(callers)
        self._of.subtract(callers)
        for caller in set(callers):
            if not self._of[caller]:
                del self._of[caller]

    def _retry_after_s(self) -> float:
        return max(1.0, math.ceil(self.inside * self.interval_s))
