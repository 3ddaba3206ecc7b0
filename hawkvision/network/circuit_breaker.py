"""Whether the datacenter is asked at all: a circuit breaker without an estimator of its own.

             P(reply on time) < p_min, or the connection failed              a probe is sent
    ┌────────┐ ────────────────────────────────────────────► ┌──────┐ ──────────────────────► ┌───────────┐
    │ CLOSED │                                               │ OPEN │                         │ HALF_OPEN │
    └────────┘ ◄──────────────────────────┐                  └──────┘ ◄────────────────────── └───────────┘
                  P(reply on time) >= p_min, and connected              no reply, or too late

P is that of `ResponseTimes` at t = 0, of the caller's own remaining time; the state that is shown is for the longest
recent one. A probe is a background copy of a recent request, waited for as long as the longest recent deadline.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Final

from hawkvision.network.response_time import MIN_ON_TIME_PROBABILITY, ResponseTimes

LONGEST_INTERVAL_S: Final = 30.0
GROWTH: Final = 1.0 / (1.0 - MIN_ON_TIME_PROBABILITY)
"""Of the interval after a probe in vain; the first is as long as the probe was waited for. Over a link on time with
probability p, the mean time until a probe is on time is bounded only if GROWTH < 1 / (1 - p): wherever waiting pays.
After an outage of t seconds, callers are put off for a twentieth of t more at most."""
RECENT: Final = 16
"""Callers whose deadlines are recent."""


class BreakerState(StrEnum):
    """Of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Of one link over one transport. Times are seconds of a monotonic clock, durations milliseconds."""

    def __init__(self, times: ResponseTimes, *, connected: bool = True) -> None:
        """Begin closed, or open until there is a connection."""
        self.times = times
        self.connected = connected
        """Whether the last attempt got through; whoever tries says so."""
        self._recent_ms: deque[float] = deque(maxlen=RECENT)
        self._refused_ms: float | None = None
        """Of the last caller that was refused."""
        self._probing = False
        self._interval_s = 0.0
        self._next_probe = float("-inf")

    @property
    def longest_ms(self) -> float:
        """The longest remaining time of recent callers; 0 before the first."""
        return max(self._recent_ms, default=0.0)

    def admits(self, within_ms: float, now: float) -> bool:
        """Whether a caller that has so long waits for the datacenter; nobody does once the time is over."""
        if within_ms <= 0.0:
            return False
        self._recent_ms.append(within_ms)
        if self.connected and self._likely(within_ms, now):
            return True
        self._refused_ms = within_ms
        return False

    def state(self, now: float) -> BreakerState:
        """For callers that have the longest recent time."""
        if self.connected and (not self._recent_ms or self._likely(self.longest_ms, now)):
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._probing else BreakerState.OPEN

    def begin_probe(self, now: float) -> bool:
        """Whether a probe is due and none under way; then `end_probe` must follow."""
        if self._probing or not self.connected or now < self._next_probe:
            return False
        self._probing = True
        return True

    def end_probe(self, now: float) -> None:
        """A probe is over, and `times` has learned from it: the next is due later, unless callers are admitted."""
        self._probing = False
        if self._likely(self.longest_ms if self._refused_ms is None else self._refused_ms, now):
            self._interval_s, self._next_probe = 0.0, float("-inf")
        else:
            waited_s = 1e-3 * self.longest_ms
            self._interval_s = min(max(waited_s, GROWTH * self._interval_s), LONGEST_INTERVAL_S)
            self._next_probe = now - waited_s + self._interval_s

    def _likely(self, within_ms: float, now: float) -> bool:
        return self.times.on_time(within_ms, now) >= self.times.min_on_time_probability
