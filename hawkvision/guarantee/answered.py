"""Whether a caller's requests are answered as routed, so that deadlines do not choose which answers remain.

A certificate bounds the mean loss over all images that a stage scores: E[ℓ · 1{answered below the reference}] ≤ ε.
Where a deadline lets only the edge's answers through, fewer answers share this loss. So a target ε uses certificates of
at most `USED_SHARE` · ε, and an answer is certified only while at least `USED_SHARE` of the last `WINDOW` scored
requests of its caller and target were answered as routed. With r that share, and g what the requests that are missing
would have gained, their mean loss is at most (0.95 ε + g) / r. Assumed: callers do not choose deadlines by the status
of earlier answers. Who is patient while it is late and hasty while it is certified deceives itself.

A caller with fewer than `LEAST` requests shares its target's window with all such callers. Otherwise a new name for
each few requests would never be late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, TypeAlias

USED_SHARE: Final = 0.95
WINDOW: Final = 1_000
LEAST: Final = 100
MOST_WINDOWS: Final = 1_024
"""Callers and targets that are remembered. Of those that are not late, the least recently used makes room. Who is late
is never forgotten: if there is no room, a new caller keeps to the shared window."""
MOST_LOOKS: Final = 16
"""Windows of which one may make room for a request."""
MOST_TARGETS: Final = 64
"""Shared windows. They are not forgotten either; nothing is certified for further targets."""

WindowState: TypeAlias = tuple[int, str]
"""Requests, and which of them are missing: bits, the latest last, in hexadecimal."""


def stated_drop(certified: float) -> float:
    """The drop that answers may state by a certificate, or the disagreement."""
    return min(1.0, round(certified / USED_SHARE, 6))


class Window:
    """The last requests of a caller, or of several, for one target."""

    __slots__ = ("_missing", "requests")

    def __init__(self, state: WindowState = (0, "0")) -> None:
        """Restore a state.

        Raises:
            ValueError: if no window can have it.
        """
        self.requests, self._missing = state[0], int(state[1], 16)
        if not 0 <= self.requests <= WINDOW or not 0 <= self._missing < 1 << self.requests:
            raise ValueError(f"no window can have the state {state}")

    def add(self, *, as_routed: bool) -> None:
        """Count a request."""
        self.requests = min(self.requests + 1, WINDOW)
        self._missing = (self._missing << 1 | (not as_routed)) & ((1 << self.requests) - 1)

    @property
    def enough(self) -> bool:
        """Whether few enough are missing."""
        return 20 * self._missing.bit_count() <= max(self.requests, LEAST)

    @property
    def state(self) -> WindowState:
        """What a file keeps."""
        return self.requests, f"{self._missing:x}"


class AnsweredRequests:
    """The windows of a node's callers. For one event loop."""

    def __init__(self, state: Mapping[str, WindowState] | None = None) -> None:
        """Restore a state.

        Raises:
            ValueError: if it is not one that `state` gives.
        """
        self._windows: OrderedDict[str, Window] = OrderedDict()
        self._shared: dict[str, Window] = {}
        for key, kept in (state or {}).items():
            (self._windows if key.partition("/")[0] else self._shared)[key] = Window(kept)
        if len(self._windows) > MOST_WINDOWS or len(self._shared) > MOST_TARGETS:
            raise ValueError(f"{len(self._windows)} windows and {len(self._shared)} shared ones are too many")

    def add(self, caller: str, target: str, *, as_routed: bool) -> None:
        """Count a scored request of a caller; `caller` is not empty and has no slash."""
        own = self._own(f"{caller}/{target}")
        if own is None or own.requests < LEAST:
            shared = self._of_target(target)
            if shared is not None:
                shared.add(as_routed=as_routed)
        if own is not None:
            own.add(as_routed=as_routed)

    def enough(self, caller: str, target: str) -> bool:
        """Whether enough requests of this caller, or of those who share its window, were answered as routed."""
        window = self._windows.get(f"{caller}/{target}")
        if window is None or window.requests < LEAST:
            window = self._of_target(target)
        return window is not None and window.enough

    @property
    def state(self) -> dict[str, WindowState]:
        """What a file keeps; the keys of shared windows begin with a slash."""
        return {key: window.state for key, window in (self._shared | self._windows).items()}

    def _own(self, key: str) -> Window | None:
        """The caller's window, which is made if there is room."""
        found = self._windows.get(key)
        if found is not None:
            self._windows.move_to_end(key)
            return found
        if len(self._windows) >= MOST_WINDOWS and not self._make_room():
            return None
        found = self._windows[key] = Window()
        return found

    def _make_room(self) -> bool:
        for _ in range(MOST_LOOKS):
            oldest, window = next(iter(self._windows.items()))
            if window.enough:
                del self._windows[oldest]
                return True
            self._windows.move_to_end(oldest)
        return False

    def _of_target(self, target: str) -> Window | None:
        """The window of callers with few requests; None for one target too many."""
        key = f"/{target}"
        if key not in self._shared and len(self._shared) < MOST_TARGETS:
            self._shared[key] = Window()
        return self._shared.get(key)
