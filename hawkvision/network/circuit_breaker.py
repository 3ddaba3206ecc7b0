"""Whether callers wait for the datacenter: a circuit breaker without an estimator of its own.

             P(reply on time) < p_min, or the connection failed              a probe is sent
    ┌────────┐ ────────────────────────────────────────────► ┌──────┐ ──────────────────────► ┌───────────┐
    │ CLOSED │                                               │ OPEN │                         │ HALF_OPEN │
    └────────┘ ◄──────────────────────────┐                  └──────┘ ◄────────────────────── └───────────┘
                  P(reply on time) >= p_min, and connected              no reply, or too late

P is that of `ResponseTimes` at t = 0, for the caller's own remaining time; `state` uses the longest recent one. A probe
is a background copy of a recent request. It waits for as long as the longest recent deadline.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Final

from hawkvision.network.response_time import MIN_ON_TIME_PROBABILITY, ResponseTimes

LONGEST_INTERVAL_S: Final = 30.0
GROWTH: Final = 1.0 / (1.0 - MIN_ON_TIME_PROBABILITY)
"""Growth of the interval after a missed probe; the first interval is as long as the probe waited. The mean time until a
probe is on time is finite for GROWTH < 1 / (1 - p), with p the probability of a reply on time: wherever waiting pays.
After an outage of t seconds the breaker closes at most t / 20 later."""
RECENT: Final = 16
"""Number of recent callers whose deadlines count."""


class BreakerState(StrEnum):
    """The state of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """The breaker of one link over one transport. Times are seconds of a monotonic clock, durations milliseconds."""

    def __init__(self, times: ResponseTimes, *, connected: bool = True) -> None:
        """Start closed, or open until there is a connection."""
        self.times = times
        self.connected = connected
        """Whether the link works as far as is known; the caller sets it after a connection attempt."""
        self._failed = float("-inf")
        self._recent_ms: deque[float] = deque(maxlen=RECENT)
        self._refused_ms: float | None = None
        """The remaining time of the last caller that was refused."""
        self._probing = False
        self._interval_s = 0.0
        self._next_probe = float("-inf")

    @property
    def longest_ms(self) -> float:
        """The longest remaining time of recent callers; 0 before the first."""
        return max(self._recent_ms, default=0.0)

    def admits(self, within_ms: float, now: float) -> bool:
        """Whether a caller with this remaining time waits for the datacenter; never if no time remains."""
        if within_ms <= 0.0:
            return False
        self._recent_ms.append(within_ms)
        if self.connected and self._likely(within_ms, now):
            return True
        self._refused_ms = within_ms
        return False

    def state(self, now: float) -> BreakerState:
        """The state for callers with the longest recent remaining time."""
        if self.connected and (not self._recent_ms or self._likely(self.longest_ms, now)):
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._probing else BreakerState.OPEN

    def failed(self, now: float) -> None:
        """The link does not work: a connection was refused or broke off, or nothing came back."""
        self.connected, self._failed = False, now

    def replied(self, sent: float) -> None:
        """A request sent then has a reply, so the link works; unless it failed after that."""
        if sent >= self._failed:
            self.connected = True

    def begin_probe(self, now: float) -> bool:
        """Whether a probe is due and none is running; if so, `end_probe` must follow."""
        if self._probing or not self.connected or now < self._next_probe:
            return False
        self._probing = True
        return True

    def end_probe(self, now: float) -> None:
        """End a probe, which `times` has recorded. The next is due later, unless callers are admitted."""
        self._probing = False
        if self._likely(self.longest_ms if self._refused_ms is None else self._refused_ms, now):
            self._interval_s, self._next_probe = 0.0, float("-inf")
        else:
            waited_s = 1e-3 * self.longest_ms
            self._interval_s = min(max(waited_s, GROWTH * self._interval_s), LONGEST_INTERVAL_S)
            self._next_probe = now - waited_s + self._interval_s

    def _likely(self, within_ms: float, now: float) -> bool:
        return self.times.on_time(within_ms, now) >= self.times.min_on_time_probability
