"""The baselines whose decision is a route: a pure function of the target and of registered accuracies.

Nothing is certified, so every guarantee is `best_effort`. A route is `below_target` if the model that it names is
registered with less accuracy than the target asks for; its answers then say that they are degraded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hawkvision.cascade.certification.profile import Pair, Profile, threshold_value
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import Route, without_guarantee
from hawkvision.core.types import (
    WHOLE,
    AccuracyGuarantee,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Quality,
    Received,
    StatusReason,
    Target,
)

DIGITS = 9
"""Accuracies are rounded to so many before they are compared: 0.88 less 0.02 must not miss 0.86."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The accuracies that a baseline knows, and the drop that `balanced` allows below the best of them."""

    edge: float
    best: float
    balanced_drop: float

    def required(self, target: Target) -> float:
        """The registered accuracy that a target asks for.

        `fast` asks for the edge stage's, as under HawkVision. A confidence is read as an accuracy, for a system that
        knows only averages can guarantee no more of one answer.
        """
        match target:
            case MinAccuracy(value) | MinConfidence(value):
                asked = value
            case MaxAccuracyDrop(value):
                asked = self.best - value
            case Quality.FAST:
                asked = self.edge
            case Quality.BALANCED:
                asked = self.best - self.balanced_drop
            case Quality.BEST:
                asked = self.best
        return round(asked, DIGITS)

    def below_target(self, accuracy: float, target: Target) -> bool:
        """Whether a model registered with this accuracy falls short of the target."""
        return round(accuracy, DIGITS) < self.required(target)


Rule = Callable[[Target], Route]
Thresholds = Sequence[tuple[float, float]]
"""Accuracy drops, and the threshold that was tuned for each; ±∞ escalate nothing and everything."""


class BaselineRoutes(Policy):
    """Routes by a baseline's rule. Accuracies, and which targets are unreachable, stay those of the profile.

    Partial images are routed as if they were whole.
    """

    def __init__(
        self,
        profile: Profile,
        edge: str,
        best: str,
        *,
        rule: Callable[[Policy], Rule],
        alone: bool = False,
        site: SiteCertificates | None = None,
    ) -> None:
        """See `Policy`; `rule` is made from HawkVision's policy for the same cascade."""
        super().__init__(profile, edge, best, alone=alone, site=site)
        self._rule = rule(self)

    def route(self, target: Target, received: Received = WHOLE) -> Route:
        """See `Policy.route`."""
        if isinstance(target, MinAccuracy):
            self._check_reachable(target.value)
        return self._rule(target)


def registered(policy: Policy) -> Registered:
    """A pair's accuracies as its profile has them."""
    return Registered(policy.edge_accuracy.value, policy.best_accuracy.value, policy.balanced.max_drop)


def threshold(policy: Policy, tuned: Thresholds) -> Rule:
    """The edge's answer from the lowest threshold on that was tuned for a drop of no more than the target allows."""
    accuracies = registered(policy)

    def rule(target: Target) -> Route:
        allowed = round(accuracies.best - accuracies.required(target), DIGITS)
        bar = min((bar for drop, bar in tuned if drop <= allowed), default=math.inf)
        escalation = expected_escalation(policy.pair, bar)
        return Route(bar, unguaranteed(target), escalation, to_best=escalation)

    return rule


def expected_escalation(pair: Pair, bar: float) -> float:
    """Share of images with scores below a threshold, 0..1; that of the next higher threshold that was measured."""
    if bar == -math.inf:
        return 0.0
    return next((each.escalation for each in reversed(pair.path) if threshold_value(each.threshold) >= bar), 1.0)


def to_best(target: Target, *, below_target: bool = False) -> Route:
    """Straight to the reference stage."""
    return Route(math.inf, unguaranteed(target), 1.0, below_target=below_target)


def to_edge(target: Target, *, below_target: bool = False) -> Route:
    """The edge's answer, whatever its score."""
    return Route(-math.inf, unguaranteed(target), 0.0, to_best=0.0, below_target=below_target)


def unguaranteed(target: Target) -> AccuracyGuarantee:
    """The guarantee without a certificate."""
    return without_guarantee(target, StatusReason.NO_CERTIFICATE)
