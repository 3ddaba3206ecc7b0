"""Keeping a guarantee while traffic changes: per stream and target, a threshold that follows audits, without labels.

A certificate holds for traffic like its certification images. Rain, a dirty lens or a new camera make other traffic;
then a fixed threshold silently gives up more than was certified. An answer that agrees with the reference stage gives
nothing up, so the share of accepted answers that differ bounds the drop. Each accepted answer has an estimate of
whether it differs: m, predicted from its score, or where it was audited m + (ℓ − m)/π, with ℓ what the audit found and
π the probability that it took place. That is right on average whether the prediction is or not (doubly robust; Robins,
Rotnitzky and Zhao, JASA 1994). Answers that could not have been audited move nothing. Escalations refresh m for free.

The threshold follows θ ← θ + η (ℓ̃ − goal), in ranks of the profile's scores: integral control, whose average of ℓ̃
over T requests cannot exceed the goal by more than 1/(ηT), plus one audit's weight, whatever the traffic does (Gibbs
and Candès, NeurIPS 2021; Angelopoulos, Candès and Tibshirani, NeurIPS 2023). Above rank 1 nothing is accepted, and θ
may rise so far above it as one audit can push it. It never goes below the certified threshold. The goal is the
disagreement that was certified along with the drop, or ε if that is more; while the guarantee is suspended
(`cascade.drift.monitor`) it is ε itself, the label-free target. A target that never escalates does so only while it is
suspended.

What agreement cannot tell is who is right where two stages differ. Some shifts hurt the reference more than the edge;
then control escalates to the stage that is worse, and only labels, or a certificate of the site's own, can say so.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

import msgspec

AUDIT_SHARE: Final = 0.02
"""Share of the images that a stage scores of which the reference stage is asked, too."""

GAIN: Final = 0.002
"""η, ranks per unit of loss: an unexpected disagreement raises the threshold past 0.2 % of the traffic."""

SMALLEST_PREDICTION: Final = 2e-3
"""Of a disagreement: surer than one in 500 is no prediction's to claim."""

PREDICTION_GAIN: Final = 0.01
PREDICTION_RANGE: Final = (0.3, 6.0)
"""How fast and how far escalations may correct the profile's predictions, as a factor."""

LARGEST_DEBT: Final = 50.0
"""Wrong answers, in expectation. A link that is down for a day must not make the next day escalate everything."""


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """What a certificate says, in the controller's words. Shares are of the requests that this controller sees."""

    key: str
    """Names the certificate, models and curve; state kept under another key is not taken up."""
    threshold: float
    """Certified: accept from this score on."""
    max_drop: float
    """ε."""
    disagreement: float
    """Upper bound of P(accepted, and another label than the reference stage's) in traffic as certified."""
    scores: tuple[float, ...]
    """Knots of equal share of the profile's traffic, rising."""
    disagreements: tuple[float, ...]
    drops: tuple[float, ...]


class ControllerState(msgspec.Struct):
    """All that a controller remembers; what a store keeps."""

    key: str
    theta: float
    correction: float = 1.0
    debt: float = 0.0
    suspended: bool = False
    """Whether it last moved towards the target of a suspended guarantee."""
    requests: int = 0
    accepted: int = 0
    audits: int = 0
    disagreements: int = 0
    escalations: int = 0
    degraded: int = 0


@dataclass(slots=True)
class DriftController:
    """The controller of one stream and target. Not thread-safe: made and used on one event loop."""

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
        """The score from which on answers are accepted at present, without regard to debt."""
        return self._bar

    @property
    def threshold(self) -> float:
        """The score from which on answers are accepted now: `bar`, or more while there is debt to repay."""
        debt = self.state.debt
        if debt <= 0.0:
            return self._bar
        allowed = self.expected_drop(self._bar) * max(0.0, 1.0 - debt / 2.0)
        return max(self._bar, self._surest_with(allowed))

    def follow(self, suspended: bool) -> None:
        """Say whether the guarantee is suspended, before what is told next."""
        if self.state.suspended and not suspended:
            # Unwinding at η · goal a request would keep escalating for thousands of them.
            self.state.theta = self._floor
            self._place()
        self.state.suspended = suspended

    def estimate(self, score: float, weight: float, differs: bool | None) -> float:
        """ℓ̃ of an accepted answer; `weight` is the inverse of the probability with which its audit took place."""
        predicted = self._predicted(score)
        return predicted if differs is None else predicted + (differs - predicted) * weight

    def accepted(self, score: float, weight: float, differs: bool | None) -> None:
        """An answer was accepted that might have been audited; `differs` says what was found, None that it was not."""
        state = self.state
        state.requests += 1
        state.accepted += 1
        if differs is not None:
            state.audits += 1
            state.disagreements += differs
        self._move(self.estimate(score, weight, differs))

    def unseen(self) -> None:
        """An answer was accepted while no audit was possible: it says nothing about traffic, in either direction."""
        self.state.requests += 1
        self.state.accepted += 1

    def escalated(self, score: float, differs: bool | None) -> None:
        """An image was escalated; `differs` compares edge and reference stage, None if the reference stage did not
        answer.
        """
        state = self.state
        predicted = self._predicted(score)
        state.requests += 1
        state.escalations += 1
        if differs is not None:
            low, high = PREDICTION_RANGE
            factor = math.exp(PREDICTION_GAIN * (differs - predicted))
            state.correction = min(max(state.correction * factor, low), high)
        if score >= self._bar and state.debt > 0.0:
            state.debt = max(0.0, state.debt - self.expected_drop(score))
        self._move(0.0)

    def fell_short(self, score: float) -> None:
        """An answer below the threshold was given because time, link or load forced it: a debt."""
        self.state.requests += 1
        self.state.degraded += 1
        self.state.debt = min(LARGEST_DEBT, self.state.debt + self.expected_drop(score))

    def expected_drop(self, score: float) -> float:
        """What accepting an answer of this score gives up, on average."""
        return _interpolate(self.spec.scores, self.spec.drops, score)

    def restore(self, state: ControllerState) -> bool:
        """Take up a kept state; False, and nothing happens, if it was kept for another certificate."""
        if state.key != self.spec.key:
            return False
        self.state = state
        self._place()
        return True

    def _move(self, estimate: float) -> None:
        """Integral control; in traffic as certified, of the disagreement that was certified along with the drop."""
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
        """The smallest score at which accepting gives up at most `drop`; +∞ if none does."""
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
