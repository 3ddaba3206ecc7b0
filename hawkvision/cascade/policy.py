"""Who answers: from a target and a profile to a route, and from a score, a deadline and a prediction to a decision.

Everything here is pure. A `Route` says what the target means on this ladder; `decide` is asked once the edge has its
score. What happens after a decision (uploads, timers) is `edge.node`'s affair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hawkvision.cascade.profile import Certificate, Pair, Profile, threshold_value
from hawkvision.errors import TargetUnreachable
from hawkvision.types import (
    AccuracyPromise,
    Basis,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    OnMiss,
    PromiseStatus,
    Quality,
    Reason,
    Target,
)


@dataclass(frozen=True, slots=True)
class Route:
    """What a target means on a ladder.

    The edge's own answer is accepted when its score is at least `threshold`; +∞ sends the picture straight to the best
    rung, −∞ never escalates. `by_confidence` compares the calibrated top-1 probability instead of the pair's score.
    """

    threshold: float
    promise: AccuracyPromise
    escalation: float
    """Expected share of escalations, 0..1."""
    by_confidence: bool = False

    @property
    def direct(self) -> bool:
        """Whether the edge rung is not asked at all."""
        return self.threshold == math.inf


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer with the edge's result. `degraded` means below target, because time, link or load forced it."""

    degraded: bool = False


@dataclass(frozen=True, slots=True)
class Escalate:
    """Ask the best rung; if `cutoff_ms` is given, stop waiting that many milliseconds from now."""

    reason: Reason
    cutoff_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """The deadline would pass and the caller asked to be told (`on_miss=fail`)."""


Decision = Accept | Escalate | Miss

INTERVAL_DELTA = 0.025
"""Probability that an accuracy lies below the lower end of its 95 % interval."""

ANSWER_MARGIN_MS = 5.0
"""The timer fires this long before the deadline. At one millisecond, as first designed, three of eight answers came
after the deadline on two busy cores: waking up and writing takes that long by itself."""


class Policy:
    """Maps targets to routes for one edge rung backed by one best rung."""

    def __init__(self, profile: Profile, edge: str, best: str, *, alone: bool = False) -> None:
        """Map targets for `edge` backed by `best`; `alone` if there is no datacenter to run `best`."""
        self.alone = alone
        self.pair: Pair = profile.pair(edge, best)
        self.edge_accuracy = profile.rung(edge).accuracy
        self.best_accuracy = profile.rung(best).accuracy
        # Until lossy pictures arrive, every picture is whole: the first condition.
        self._condition = self.pair.conditions[0]
        self._routes: dict[Target, Route] = {quality: self._quality(quality) for quality in Quality}

    def route(self, target: Target) -> Route:
        """What this target means here.

        Raises:
            TargetUnreachable: if even the ladder's best rung misses the target; says what it reaches.
        """
        known = self._routes.get(target)
        if known is not None:
            return known
        match target:
            case MaxAccuracyDrop(value):
                return self._drop(target, value)
            case MinAccuracy(value):
                return self._accuracy(target, value)
            case MinConfidence(value):
                return self._confidence(target, value)
            case Quality():  # pragma: no cover - all are in _routes
                raise AssertionError(target)

    def _quality(self, quality: Quality) -> Route:
        match quality:
            case Quality.FAST:
                return _certified(quality, self._condition.fast)
            case Quality.BALANCED:
                return _certified(quality, self._condition.balanced)
            case Quality.BEST:
                return _best(quality)

    def _drop(self, target: Target, max_drop: float) -> Route:
        """The certificate with the largest ε that does not exceed the target's."""
        if max_drop >= self._condition.fast.max_drop:
            return _certified(target, self._condition.fast)
        usable = [c for c in self._condition.certificates if c.max_drop <= max_drop and c.threshold != "always"]
        if not usable:
            return _best(target)
        return _certified(target, max(usable, key=lambda c: c.max_drop))

    @property
    def maximum_accuracy(self) -> float:
        """The largest `min_accuracy` that is not refused: what the best rung within reach was measured at."""
        return (self.edge_accuracy if self.alone else self.best_accuracy).value

    def held_accuracy(self, max_drop: float) -> float:
        """The accuracy that a certified drop makes certain, counted from the lower end of the best rung's interval."""
        return round(self.best_accuracy.low - max_drop, 6)

    def _accuracy(self, target: Target, accuracy: float) -> Route:
        """Certified relative to the best rung; absolutely only as far as that rung's own interval reaches.

        The drop is what is certified. The best rung's accuracy is an estimate with an error of its own, so a promise
        in absolute terms is `held` only from the lower end of its 95 % interval, whose 2.5 % add to the certificate's.
        """
        if accuracy > self.maximum_accuracy:
            rung, measured = (
                (self.pair.edge, self.edge_accuracy) if self.alone else (self.pair.best, self.best_accuracy)
            )
            raise TargetUnreachable(
                f"min_accuracy {accuracy:g} is more than can be reached here: the best rung {rung} was measured at "
                f"{measured.value:.4f} on {measured.n} pictures",
                maximum=measured.value,
            )
        if accuracy <= self.edge_accuracy.value:
            promise = AccuracyPromise(target, PromiseStatus.BEST_EFFORT, Basis.PROFILE, n=self.edge_accuracy.n)
            if accuracy <= self.edge_accuracy.low:
                promise = replace(
                    promise, status=PromiseStatus.HELD, basis=Basis.LABELLED, delta=INTERVAL_DELTA,
                    max_drop=self._condition.fast.max_drop,
                )  # fmt: skip
            return Route(-math.inf, promise, 0.0)
        # Rounded, so that an accuracy that was listed maps back to the very drop it was listed for.
        route = self._drop(target, round(self.best_accuracy.value - accuracy, 9))
        promise = route.promise
        drop = promise.max_drop or 0.0
        held = accuracy <= self.held_accuracy(drop)
        return replace(
            route,
            promise=replace(
                promise,
                status=PromiseStatus.HELD if held else PromiseStatus.BEST_EFFORT,
                delta=round((promise.delta or 0.0) + INTERVAL_DELTA, 6) if held else promise.delta,
                n=self.best_accuracy.n,
                basis=Basis.LABELLED,
            ),
        )

    def _confidence(self, target: Target, confidence: float) -> Route:
        """Per answer, calibrated but not certified: probabilities are right on average, not one by one."""
        promise = AccuracyPromise(target, PromiseStatus.BEST_EFFORT, Basis.PROFILE, n=self.best_accuracy.n)
        escalation = next(
            (p.escalation for p in reversed(self._condition.frontier) if threshold_value(p.threshold) >= confidence),
            1.0,
        )
        return Route(confidence, promise, escalation, by_confidence=True)


def _certified(target: Target, certificate: Certificate) -> Route:
    promise = AccuracyPromise(
        target,
        PromiseStatus.HELD,
        Basis(certificate.basis),
        max_drop=certificate.max_drop,
        delta=certificate.delta,
        n=certificate.n,
    )
    return Route(threshold_value(certificate.threshold), promise, certificate.escalation)


def _best(target: Target) -> Route:
    """Everything to the best rung: nothing can be given up, so nothing needs a sample."""
    return Route(math.inf, AccuracyPromise(target, PromiseStatus.HELD, Basis.PROFILE, max_drop=0.0), 1.0)


def weakened(promise: AccuracyPromise) -> AccuracyPromise:
    """The promise of an answer that had to fall short: the target stands, the certificate is not claimed."""
    return AccuracyPromise(promise.target, PromiseStatus.BEST_EFFORT, Basis.PROFILE)


def decide(
    route: Route,
    score: float,
    *,
    slack_ms: float | None,
    predicted_ms: float | None,
    on_miss: OnMiss,
) -> Decision:
    """Accept the edge's answer or escalate.

    Args:
        route: of the request's target.
        score: the edge's score of this picture (its confidence, if `route.by_confidence`).
        slack_ms: time left before the deadline; None without one.
        predicted_ms: how long the datacenter would take from now; None when it cannot be reached.
        on_miss: what the caller wants when the deadline would pass.
    """
    if score >= route.threshold:
        return Accept()
    reason = Reason.TARGET if route.direct else Reason.LOW_CONFIDENCE
    if predicted_ms is None:
        return Accept(degraded=True)
    if slack_ms is None or on_miss is OnMiss.WAIT:
        return Escalate(reason)
    if predicted_ms > slack_ms - ANSWER_MARGIN_MS:
        return Miss() if on_miss is OnMiss.FAIL else Accept(degraded=True)
    return Escalate(reason, cutoff_ms=slack_ms - ANSWER_MARGIN_MS)
