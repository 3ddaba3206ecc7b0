"""How often a tier process is replaced, and after which pauses."""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_RESTARTS: Final = 5
WITHIN_S: Final = 600.0
"""After more restarts within this time the launcher gives up with an exit status."""
MAX_PAUSE_S: Final = 8.0


class Restarts:
    """The recent restarts, and the pause before the next one."""

    def __init__(self) -> None:
        self._past: deque[float] = deque()
        """The times within the last `WITHIN_S`; at most `MAX_RESTARTS`."""

    @property
    def count(self) -> int:
        """The restarts within `WITHIN_S` of the last one."""
        return len(self._past)

    def pause_s(self, now: float) -> float | None:
        """Count a restart, and return the pause before it; None if there were too many. `now` is monotonic."""
        while self._past and now - self._past[0] > WITHIN_S:
            self._past.popleft()
        if len(self._past) >= MAX_RESTARTS:
            return None
        pause_s = min(2.0 ** (len(self._past) - 1), MAX_PAUSE_S) if self._past else 0.0
        self._past.append(now)
        return pause_s
