"""Drift control: per stream and target, an accept threshold that follows audits, without labels.

A certificate holds for traffic like its own images. Rain, a dirty lens or a new camera change the traffic; a fixed
threshold would then give up more than was certified, unnoticed. An answer that agrees with the reference stage gives
nothing up, so the mean disagreement of accepted answers bounds the drop, or stands for it. Each accepted answer has an
estimate ℓ̃ of its disagreement in [0, 1]: m, predicted from its score, or if it was audited m + (ℓ − m)/π, with ℓ the
audit's outcome and π the probability of the audit. Its mean is right whether the prediction is or not (doubly robust;
Robins, Rotnitzky and Zhao, JASA 1994). Answers that could not have been audited move nothing. Escalations update m.

The threshold follows θ ← θ + η (ℓ̃ − goal), in ranks of the profile's scores. This is integral control: the average of
ℓ̃ over T requests exceeds the goal by at most 1/(ηT) plus one audit's weight, whatever the traffic (Gibbs and Candès,
NeurIPS 2021; Angelopoulos, Candès and Tibshirani, NeurIPS 2023). Above rank 1 nothing is accepted; θ may exceed 1 by as
much as one audit can add. It never falls below the certified threshold. The goal is the disagreement that was certified
with the drop, or ε if that is more; while the guarantee is suspended (`cascade.drift.monitor`) it is ε, the target
without labels. A target that never escalates escalates only while it is suspended.

Agreement does not tell which of two differing stages is right. Some shifts hurt the reference more than the edge; then
control escalates to the worse stage, which only labels or a site's own certificate can show.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

import msgspec

AUDIT_SHARE: Final = 0.02
"""Share of the images scored by a stage that are audited by the reference stage."""

GAIN: Final = 0.002
"""η, ranks per unit of loss: an unexpected disagreement raises the threshold past 0.2 % of the traffic."""

SMALLEST_PREDICTION: Final = 2e-3
"""Lower limit of a predicted disagreement."""

PREDICTION_GAIN: Final = 0.01
PREDICTION_RANGE: Final = (0.3, 6.0)
"""Step size and range of the factor by which escalations correct the profile's predictions."""

LARGEST_DEBT: Final = 50.0
"""Upper limit in expected wrong answers, so that after a day without a link not everything is escalated."""


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """A certificate as the controller uses it. Shares are of the requests that reach this controller."""

    key: str
    """Name of the certificate, models and curve; state saved under another key is not restored."""
    threshold: float
    """The certified threshold."""
    max_drop: float
    """ε."""
    disagreement: float
    """Upper bound of the mean disagreement of accepted answers, others counting 0, in certified traffic."""
    scores: tuple[float, ...]
    """Knots of equal share of the profile's traffic, rising."""
    disagreements: tuple[float, ...]
    drops: tuple[float, ...]


class ControllerState(msgspec.Struct):
    """The state of a controller, as a store keeps it."""

    key: str
    theta: float
    correction: float = 1.0
    debt: float = 0.0
    suspended: bool = False
    """Whether the guarantee was suspended at the last update."""
    requests: int = 0
    accepted: int = 0
    audits: int = 0
    disagreements: float = 0
    escalations: int = 0
    degraded: int = 0


@dataclass(slots=True)
class DriftController:
    """The controller of one stream and target. Not thread-safe: for one event loop."""

    spec: ControllerSpec
    audit_share: float = AUDIT_SHARE
    state: ControllerState = field(init=False)
    _floor: float = field(init=False)
    _ceiling: float = field(init=False)
    _bar: float = field(init=False)

    def __post_init__(self) -> None:
        self._floor = self._rank(self.spec.threshold)
        self._ceiling = 1.0 + GAIN / (self.audit_share or 1.0)
        self.state = ControllerState(self.spec.key, self._floor)
        self._bar = self.spec.threshold

    @property
    def bar(self) -> float:
        """The current accept threshold without debt."""
        return self._bar

    @property
    def threshold(self) -> float:
        """The current accept threshold: `bar`, or higher while there is debt."""
        debt = self.state.debt
        if debt <= 0.0:
            return self._bar
        allowed = self.expected_drop(self._bar) * max(0.0, 1.0 - debt / 2.0)
        return max(self._bar, self._surest_with(allowed))

    def follow(self, suspended: bool) -> None:
        """Set whether the guarantee is suspended, for the updates that follow."""
        if self.state.suspended and not suspended:
            # Integral control alone would need thousands of requests to come back.
            self.state.theta = self._floor
            self._place()
        self.state.suspended = suspended

    def estimate(self, score: float, weight: float, disagreement: float | None) -> float:
        """ℓ̃ of an accepted answer; `weight` is the inverse of its audit's probability."""
        predicted = self._predicted(score)
        return predicted if disagreement is None else predicted + (disagreement - predicted) * weight

    def accepted(self, score: float, weight: float, disagreement: float | None) -> None:
        """Record an accepted answer that might have been audited; `disagreement` is the outcome, None without one."""
        state = self.state
        state.requests += 1
        state.accepted += 1
        if disagreement is not None:
            state.audits += 1
            state.disagreements += disagreement
        self._move(self.estimate(score, weight, disagreement))

    def unseen(self) -> None:
        """Record an accepted answer for which no audit was possible; the threshold stays."""
        self.state.requests += 1
        self.state.accepted += 1

    def escalated(self, score: float, disagreement: float | None) -> None:
        """Record an escalation; `disagreement` is of edge and reference stage, None without the latter's answer."""
        state = self.state
        predicted = self._predicted(score)
        state.requests += 1
        state.escalations += 1
        if disagreement is not None:
            low, high = PREDICTION_RANGE
            factor = math.exp(PREDICTION_GAIN * (disagreement - predicted))
            state.correction = min(max(state.correction * factor, low), high)
        if score >= self._bar and state.debt > 0.0:
            state.debt = max(0.0, state.debt - self.expected_drop(score))
        self._move(0.0)

    def fell_short(self, score: float) -> None:
        """Record an answer below the threshold, forced by time, link or load, as debt."""
        self.state.requests += 1
        self.state.degraded += 1
        self.state.debt = min(LARGEST_DEBT, self.state.debt + self.expected_drop(score))

    def expected_drop(self, score: float) -> float:
        """The expected drop of accepting an answer of this score."""
        return _interpolate(self.spec.scores, self.spec.drops, score)

    def restore(self, state: ControllerState) -> bool:
        """Restore a saved state; False, without effect, if it is of another certificate."""
        if state.key != self.spec.key:
            return False
        self.state = state
        self._place()
        return True

    def _move(self, estimate: float) -> None:
        """One step of integral control."""
        spec, state = self.spec, self.state
        if spec.threshold == -math.inf and not state.suspended:
            return
        goal = spec.max_drop if state.suspended else max(spec.max_drop, spec.disagreement)
        state.theta = min(max(state.theta + GAIN * (estimate - goal), self._floor), self._ceiling)
        self._place()

    def _place(self) -> None:
        theta = self.state.theta
        self._bar = math.inf if theta > 1.0 else max(self.spec.threshold, self._score_of(theta))

    def _predicted(self, score: float) -> float:
        profiled = _interpolate(self.spec.scores, self.spec.disagreements, score)
        return min(1.0, max(SMALLEST_PREDICTION, profiled * self.state.correction))

    def _rank(self, score: float) -> float:
        """Share of the profile's traffic with a smaller score."""
        knots = self.spec.scores
        if score <= knots[0]:
            return 0.0
        if score > knots[-1]:
            return 1.0
        right = bisect_left(knots, score)
        left = right - 1
        return (left + (score - knots[left]) / (knots[right] - knots[left])) / (len(knots) - 1)

    def _score_of(self, rank: float) -> float:
        if rank <= 0.0:
            return -math.inf
        knots = self.spec.scores
        place = rank * (len(knots) - 1)
        left = min(int(place), len(knots) - 2)
        return knots[left] + (place - left) * (knots[left + 1] - knots[left])

    def _surest_with(self, drop: float) -> float:
        """The smallest score with an expected drop of at most `drop`; +∞ if there is none."""
        scores, drops = self.spec.scores, self.spec.drops
        for index, expected in enumerate(drops):  # falling, and few
            if expected <= drop:
                return scores[index]
        return math.inf


def _interpolate(knots: tuple[float, ...], values: tuple[float, ...], x: float) -> float:
    if x <= knots[0]:
        return values[0]
    if x >= knots[-1]:
        return values[-1]
    right = bisect_left(knots, x)
    left = right - 1
    share = (x - knots[left]) / (knots[right] - knots[left])
    return values[left] + share * (values[right] - values[left])
