"""When the wait for a reply ends, so that an answer leaves before its deadline."""

from __future__ import annotations

from collections import deque
from typing import Final

from hawkvision.core.clock import Deadline

KEPT: Final = 100
"""The last waits that the margin follows."""
LATER: Final = 2
"""The margin allows for the second longest overrun of these, so that one very late timer changes nothing."""
FIRST_OVERRUN_MS: Final = 4.0
"""Assumed of each wait, until there have been `KEPT`."""
OUTSIDE_MS: Final = 2.0
"""What no wait shows: the request's way to the node, composing and writing the answer, its way to the caller."""
MOST: Final = 0.25
"""The largest margin, as a share of the deadline: a node whose timers were late still asks the datacenter."""


class Cutoffs:
    """The margin before deadlines follows how late the waits really end: where cores are busy, a timer fires late."""

    def __init__(self) -> None:
        self._overruns_ms = deque([FIRST_OVERRUN_MS] * KEPT, maxlen=KEPT)
        self.margin_ms = FIRST_OVERRUN_MS + OUTSIDE_MS
        """Before a deadline that is far enough away."""

    def before(self, deadline_ms: float, started: float) -> Deadline:
        """When to stop waiting for the datacenter, for a deadline `deadline_ms` after the clock time `started`."""
        return Deadline.after_ms(deadline_ms - min(self.margin_ms, MOST * deadline_ms), started)

    def waited(self, cutoff: Deadline, ended: float) -> None:
        """Learn from a wait that ended at a clock time; one that ended before its cutoff says nothing."""
        if cutoff.passed(ended):
            self._overruns_ms.append(-cutoff.remaining_ms(ended))
            self.margin_ms = sorted(self._overruns_ms)[-LATER] + OUTSIDE_MS
