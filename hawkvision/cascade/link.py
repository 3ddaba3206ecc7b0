"""Predicting the datacenter round trip, without starving.

Trap (found in simulation): an estimate fed only by uploads never recovers from one bad spell, because a bad estimate
stops the uploads that would mend it; the edge then never escalates again. So the estimate decays back towards its
prior while no samples come, and after a failure single attempts are let through at growing intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PRIOR_MS = 40.0
"""Round trip assumed before anything was measured: a metropolitan link and 10 ms of datacenter work."""
GAIN = 0.125
VARIANCE_GAIN = 0.25
DEVIATIONS = 4.0
"""Smoothing as in RFC 6298 §2: SRTT + 4 RTTVAR covers about 99 % of round trips."""
HALF_LIFE_S = 2.0
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 5.0


@dataclass(slots=True)
class LinkEstimate:
    """Smoothed round trip and deviation; every method takes `now` in seconds of a monotonic clock."""

    mean_ms: float = PRIOR_MS
    deviation_ms: float = PRIOR_MS / 4
    _updated: float | None = None
    _failures: int = 0
    _retry_at: float = field(default=-math.inf)

    def succeeded(self, round_trip_ms: float, now: float) -> None:
        """Learn from an answer."""
        self._decay(now)
        self.deviation_ms += VARIANCE_GAIN * (abs(round_trip_ms - self.mean_ms) - self.deviation_ms)
        self.mean_ms += GAIN * (round_trip_ms - self.mean_ms)
        self._failures = 0

    def late(self, waited_ms: float, now: float) -> None:
        """Learn from an answer that had not come after `waited_ms`: it takes at least that long."""
        if waited_ms > self.mean_ms:
            failures = self._failures
            self.succeeded(waited_ms, now)
            self._failures = failures

    def failed(self, now: float) -> None:
        """Learn from a refused or broken connection: leave it alone for a while, at most 5 s."""
        self._retry_at = now + self._retry_interval_s()
        self._failures += 1

    @property
    def up(self) -> bool:
        """Whether the last attempt got through."""
        return self._failures == 0

    def predict_ms(self, now: float) -> float | None:
        """How long an escalation would take, pessimistically; None while the link is being left alone.

        After a failure, the first caller past the retry time is the probe: its call moves the retry time on, so that
        the callers beside it do not pile onto a dead link.
        """
        if self._failures:
            if now < self._retry_at:
                return None
            self._retry_at = now + self._retry_interval_s()
        self._decay(now)
        return self.mean_ms + DEVIATIONS * self.deviation_ms

    def _retry_interval_s(self) -> float:
        return min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures, 10))

    def _decay(self, now: float) -> None:
        if self._updated is not None and now > self._updated:
            keep = 0.5 ** ((now - self._updated) / HALF_LIFE_S)
            if self.mean_ms > PRIOR_MS:
                self.mean_ms = PRIOR_MS + keep * (self.mean_ms - PRIOR_MS)
            if self.deviation_ms > PRIOR_MS / 4:
                self.deviation_ms = PRIOR_MS / 4 + keep * (self.deviation_ms - PRIOR_MS / 4)
        self._updated = now
