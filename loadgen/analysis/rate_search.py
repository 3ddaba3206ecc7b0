"""Which rate to try next in a search for a capacity. It knows no servers; it is told what held and what failed.

    bracket   double until a rate fails, or halve until one holds; then halve the bracket, geometrically
    confirm   a long run at the highest rate that held; if it fails, 15 % less, `STEPS_DOWN` times at most

A probe that fails is repeated once with other arrivals, because one hiccup of a shared machine is not the server's
limit. A probe that holds is not repeated, so the bracket is too high as a rule. The confirming run corrects that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

LEAST_RATE: Final = 0.1
"""Below it even a confirming run has less than a request in ten seconds."""
STEP_DOWN: Final = 0.85
"""Of a rate that was not confirmed is tried next."""
STEPS_DOWN: Final = 5
"""At most: down to 44 % of what the probes found, which was never as much as twice too high (see above). What is not
confirmed by then was not found."""


@dataclass(frozen=True, slots=True)
class RateTrial:
    """One run at one rate."""

    rate: float
    confirming: bool = False
    again: bool = False
    """Whether the rate failed once before."""


@dataclass(slots=True)
class RateSearch:
    """First a bracket, then a confirmation."""

    first: float
    precision: float
    """The bracket is narrow enough when its ends differ by this share."""
    most: float
    """No rate above it is tried."""
    probes_left: int
    """Confirming runs are not counted among these."""
    low: float = 0.0
    """The highest rate that held in a probe."""
    high: float = math.inf
    """The lowest rate that failed, twice in probes or once in a confirming run."""
    confirmed: float | None = None
    refuted: list[float] = field(default_factory=list)
    """Rates whose confirming runs failed, falling."""
    doubted: float | None = None
    """A rate that failed once."""

    def next(self) -> RateTrial | None:
        """What to try next, or None when the search is over."""
        if self.confirmed is not None:
            return None
        if self.refuted:
            rate = STEP_DOWN * self.refuted[-1]
            return RateTrial(rate, confirming=True) if len(self.refuted) <= STEPS_DOWN and rate >= LEAST_RATE else None
        rate_or_none = self._bracketing() if self.probes_left > 0 else None
        if rate_or_none is not None:
            return RateTrial(rate_or_none, again=rate_or_none == self.doubted)
        return RateTrial(self.low, confirming=True) if self.low > 0.0 else None

    def record(self, tried: RateTrial, held: bool) -> None:
        """What came of it."""
        if tried.confirming:
            if held:
                self.confirmed = tried.rate
            else:
                self.refuted.append(tried.rate)
                self.high = min(self.high, tried.rate)
            return
        self.probes_left -= 1
        if held:
            self.low, self.doubted = max(self.low, tried.rate), None
        elif self.doubted is None:
            self.doubted = tried.rate
        else:
            self.high, self.doubted = min(self.high, tried.rate), None

    def _bracketing(self) -> float | None:
        if self.doubted is not None:
            return self.doubted
        if self.high == math.inf:
            if self.low >= self.most:
                return None
            return min(self.most, 2.0 * self.low if self.low else self.first)
        if self.low == 0.0:
            return self.high / 2.0 if self.high / 2.0 >= LEAST_RATE else None
        if self.high <= self.low * (1.0 + self.precision):
            return None
        return math.sqrt(self.low * self.high)
