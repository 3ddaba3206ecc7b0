"""One stream: a log of audited outcomes per stage."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from edge.monitoring.state_store import StreamState
from edge.monitoring.stream_keys import DEFAULT_STREAM
from hawkvision.cascade.drift.monitor import Claims, Coverage, Monitor
from hawkvision.core.types import Prediction
from hawkvision.guarantee.answered import AnsweredRequests


class StageScore(NamedTuple):
    """One stage's score of an image, and its prediction."""

    claims: Claims
    score: float
    answered: Prediction


class Stream:
    """The logs of one stream."""

    def __init__(self, key: bytes, state: StreamState, profiles: Collection[str] | None) -> None:
        """Restore the logs that are about these profiles; None: about any."""
        self.key = key
        self.named = False
        """Whether a caller gave it its name."""
        if profiles is not None:  # logs about replaced certificates say nothing about those in force
            _forget(state.monitors, profiles)
        self.coverage = Coverage()
        self.monitors: dict[str, Monitor] = {}
        self.suspended = state.suspended
        """Whether an alarm stands in any of its logs."""
        self.answered = AnsweredRequests(state.answered)
        self._restorable = state
        """Logs that no request has used since they were read."""

    @property
    def shared(self) -> bool:
        """Whether several callers' images are in it."""
        return self.key == DEFAULT_STREAM

    def monitor(self, claims: Claims) -> Monitor:
        """The log of a stage."""
        found = self.monitors.get(claims.key)
        if found is None:
            found = self.monitors[claims.key] = Monitor(claims, shared=self.shared)
            kept = self._restorable.monitors.pop(claims.key, None)
            restored = kept is not None and found.restore(kept)
            alarm = self._restorable.suspended_before or (kept is not None and not restored and kept.failed is not None)
            if alarm and not found.suspended:
                found.suspend()  # it is not known which claim failed
            self._restorable.suspended_before = False
            self.update()
        return found

    def keep_only(self, profiles: Collection[str]) -> None:
        """Forget the logs about other certificates."""
        _forget(self._restorable.monitors, profiles)
        _forget(self.monitors, profiles)
        self.update()

    def update(self) -> None:
        """Compute anew whether an alarm stands."""
        kept = any(state.failed is not None for state in self._restorable.monitors.values())
        self.suspended = (
            self._restorable.suspended_before or kept or any(monitor.suspended for monitor in self.monitors.values())
        )

    @property
    def state(self) -> StreamState:
        """The state that a file keeps."""
        monitors = self._restorable.monitors | {key: monitor.state for key, monitor in self.monitors.items()}
        return StreamState(monitors, self._restorable.suspended_before, self.answered.state)


def _forget(logs: dict[str, Any], profiles: Collection[str]) -> None:
    for key in [key for key in logs if key.partition("/")[0] not in profiles]:
        del logs[key]
