"""Predicting the datacenter round trip, without starving.

Trap (found in simulation): an estimate fed only by uploads never recovers from one bad spell, because a bad estimate
stops the uploads that would mend it; the edge then never escalates again. So the estimate decays back towards its
prior while no samples come. And a link that failed is not probed with callers' requests, which may have none to spare,
but by whoever watches it (`edge.node` asks for the served rungs at growing intervals) until `restored`.
"""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_MS = 40.0
"""Round trip assumed before anything was measured: a metropolitan link and 10 ms of datacenter work."""
GAIN = 0.125
VARIANCE_GAIN = 0.25
DEVIATIONS = 4.0
"""Smoothing as in RFC 6298 §2, which waits SRTT + 4 RTTVAR before it calls an answer late."""
HALF_LIFE_S = 2.0


@dataclass(slots=True)
class LinkEstimate:
    """Smoothed round trip and deviation; every method takes `now` in seconds of a monotonic clock."""

    mean_ms: float = PRIOR_MS
    deviation_ms: float = PRIOR_MS / 4
    up: bool = True
    """Whether the last attempt got through."""
    _updated: float | None = None

    def succeeded(self, round_trip_ms: float, now: float) -> None:
        """Learn from an answer."""
        self._learn(round_trip_ms, now)
        self.up = True

    def late(self, waited_ms: float, now: float) -> None:
        """Learn from an answer that had not come after `waited_ms`: it takes at least that long."""
        if waited_ms > self.mean_ms:
            self._learn(waited_ms, now)

    def failed(self) -> None:
        """The connection was refused or broke, or nothing came for as long as anybody waits."""
        self.up = False

    def restored(self) -> None:
        """A probe got through."""
        self.up = True

    def predict_ms(self, now: float) -> float | None:
        """How long an escalation would take, pessimistically; None while the link is down."""
        if not self.up:
            return None
        self._decay(now)
        return self.mean_ms + DEVIATIONS * self.deviation_ms

    def _learn(self, round_trip_ms: float, now: float) -> None:
        self._decay(now)
        self.deviation_ms += VARIANCE_GAIN * (abs(round_trip_ms - self.mean_ms) - self.deviation_ms)
        self.mean_ms += GAIN * (round_trip_ms - self.mean_ms)

    def _decay(self, now: float) -> None:
        if self._updated is not None and now > self._updated:
            keep = 0.5 ** ((now - self._updated) / HALF_LIFE_S)
            if self.mean_ms > PRIOR_MS:
                self.mean_ms = PRIOR_MS + keep * (self.mean_ms - PRIOR_MS)
            if self.deviation_ms > PRIOR_MS / 4:
                self.deviation_ms = PRIOR_MS / 4 + keep * (self.deviation_ms - PRIOR_MS / 4)
        self._updated = now
