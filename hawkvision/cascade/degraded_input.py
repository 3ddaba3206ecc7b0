"""Routes of images that crossed a lossy link: coarser than the caller sent them, with holes filled up, or both.

With holes a small network becomes confidently wrong, so confidence alone accepts nothing: an image's condition
(quality class, received fraction) has its own temperature, thresholds and certificates, all against the reference stage
on the *whole original image*. Three things can come of a target:

    kept      a certificate of this condition keeps it: accept from its threshold on, escalate the rest as received
    short     none does, though it may be that accepting gives up no more than ε beyond what the link has lost already:
              accept from there on, escalate the rest, guarantee nothing
    unknown   nothing was measured of images like this: the edge is not believed, guarantee nothing
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import replace
from typing import Any, Final

from hawkvision.cascade.certification.profile import Certificate, Pair, ReceivedCondition, threshold_value
from hawkvision.cascade.drift.monitor import Claim, Claims, claims_of
from hawkvision.cascade.route import (
    INTERVAL_DELTA,
    Controls,
    Route,
    certificates_name,
    controller_spec,
    guaranteed,
    unmonitored,
    without_guarantee,
)
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Basis,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Quality,
    Received,
    Target,
)
from hawkvision.models.manifest import MeasuredAccuracy

KNOWN_ROUTES: Final = 512
"""Routes that are kept: twenty conditions under the targets of a few dozen callers. Making one takes 20 to 40 µs on two
busy cores, finding it 1.4."""


class ReceivedRoutes:
    """Maps targets to routes for one pair, in every condition that was measured of it."""

    def __init__(self, pair: Pair, models: Any, best_accuracy: MeasuredAccuracy, *, elsewhere: bool) -> None:
        """Map targets for `pair`.

        Args:
            pair: with its conditions.
            models: what the controllers' keys are bound to.
            best_accuracy: of the reference stage on whole images, which absolute targets are counted from.
            elsewhere: whether the node guarantees for other traffic than the profile's, so that these certificates are
                the best there is, and no guarantee.
        """
        self._pair = pair
        self._models = models
        self._best_accuracy = best_accuracy
        self._elsewhere = elsewhere
        self._conditions = {(c.min_quality, c.min_received_fraction): c for c in pair.received}
        self._decided: dict[tuple[int, float, Certificate], Controls] = {}  # bounded by the profile
        self._claims = {place: self._claims_in(condition) for place, condition in self._conditions.items()}
        self.profiles = frozenset(claims.profile for claims in self._claims.values() if claims is not None)
        self._known = functools.lru_cache(KNOWN_ROUTES)(self._make)

    def route(self, target: Target, received: Received) -> Route:
        """What a target that the reference stage reaches on whole images means for an image received so."""
        condition = self._pair.condition(received)
        if condition is None:
            return _unbelieved(target)
        return self._known(target, condition.min_quality, condition.min_received_fraction)

    def _make(self, target: Target, quality: int, fraction: float) -> Route:
        condition = self._conditions[quality, fraction]
        route = self._in(condition, target)
        if self._elsewhere:
            route = replace(route, guarantee=without_guarantee(route.guarantee), controls=None)
        return replace(route, temperature=condition.edge_temperature)

    def _in(self, condition: ReceivedCondition, target: Target) -> Route:
        match target:
            case MaxAccuracyDrop(value):
                return self._drop(condition, target, value) or self._below_target(condition, target, value)
            case MinAccuracy(value):
                return self._accuracy(condition, target, value)
            case MinConfidence(value):
                return self._confidence(condition, target, value)
            case Quality.FAST:
                if condition.fast is None:
                    return _unbelieved(target)
                return self._edge_alone(condition, guaranteed(target, condition.fast))
            case Quality.BALANCED:
                balanced = self._pair.conditions[0].balanced.max_drop
                return self._drop(condition, target, balanced) or self._below_target(condition, target, balanced)
            case Quality.BEST:
                # No stage does better, but its answer to this image is below its answer to the original.
                guarantee = replace(guaranteed(target, condition.best), status=AccuracyStatus.BEST_EFFORT)
                return Route(math.inf, guarantee, 1.0, below_target=True)

    def _drop(self, condition: ReceivedCondition, target: Target, max_drop: float) -> Route | None:
        """By the certificate with the largest ε that does not exceed the target's; None if nothing keeps it."""
        known = (condition.best, *condition.certificates)
        kept = _largest(tuple(c for c in known if c.basis != "profile"), max_drop)
        if kept is None:
            return None
        guarantee = guaranteed(target, kept)
        if threshold_value(kept.threshold) == math.inf:
            # What the link has lost, no audit can see: the original is not there to ask the reference stage about.
            return _by(kept, unmonitored(guarantee))
        return replace(_by(kept, guarantee), controls=self._controls(condition, kept))

    def _below_target(self, condition: ReceivedCondition, target: Target, max_drop: float) -> Route:
        accepting = _largest(condition.accept_certificates, max_drop)
        unbelieved = _unbelieved(target)
        return unbelieved if accepting is None else replace(_by(accepting, unbelieved.guarantee), below_target=True)

    def _accuracy(self, condition: ReceivedCondition, target: Target, accuracy: float) -> Route:
        """As for whole images: held from the lower end of an interval, whose 2.5 % add to the certificate's δ."""
        edge, best, fast = condition.edge_accuracy, self._best_accuracy, condition.fast
        if fast is not None and accuracy <= edge.value:
            guarantee = AccuracyGuarantee(target, AccuracyStatus.BEST_EFFORT, Basis.PROFILE, n=edge.n)
            if accuracy <= edge.low and fast.basis != "profile":
                guarantee = replace(guaranteed(target, fast), delta=round(INTERVAL_DELTA + fast.delta, 6))
            return self._edge_alone(condition, guarantee)
        certain, estimated = (round(a - accuracy, 9) for a in (best.low, best.value))
        route = self._drop(condition, target, certain)
        if route is not None:
            delta = round(INTERVAL_DELTA + (route.guarantee.delta or 0.0), 6)
            return replace(route, guarantee=replace(route.guarantee, delta=delta))
        # The certified drop is stated, but the reference stage's own accuracy is an estimate there.
        route = self._drop(condition, target, estimated)
        if route is not None:
            return replace(route, guarantee=replace(route.guarantee, status=AccuracyStatus.BEST_EFFORT))
        return self._below_target(condition, target, estimated)

    def _confidence(self, condition: ReceivedCondition, target: Target, confidence: float) -> Route:
        """Per answer: calibrated in this condition, not certified."""
        if condition.fast is None:
            return _unbelieved(target)
        guarantee = AccuracyGuarantee(target, AccuracyStatus.BEST_EFFORT, Basis.PROFILE, n=condition.edge_accuracy.n)
        scores = condition.curve.scores  # margins, where the pair compares those, are no larger than confidences
        escalation = bisect.bisect_left(scores, confidence) / len(scores)
        return Route(confidence, guarantee, escalation, by_confidence=True, to_best=escalation)

    def _edge_alone(self, condition: ReceivedCondition, guarantee: AccuracyGuarantee) -> Route:
        controls = Controls(self._claims[_place(condition)]) if guarantee.status is AccuracyStatus.CERTIFIED else None
        return Route(-math.inf, guarantee, 0.0, to_best=0.0, controls=controls)

    def _controls(self, condition: ReceivedCondition, certificate: Certificate) -> Controls:
        place = (*_place(condition), certificate)
        if place not in self._decided:
            threshold, watch = threshold_value(certificate.threshold), certificate.edge_watch
            name = f"edge, quality {condition.min_quality}, received {condition.min_received_fraction}"
            followed = controller_spec(name, self._models, certificate, threshold, watch, condition.curve)
            self._decided[place] = Controls(self._claims[_place(condition)], followed)
        return self._decided[place]

    def _claims_in(self, condition: ReceivedCondition) -> Claims | None:
        """What all certificates claim of the edge in a condition; None if none believes it."""
        certificates = [
            certificate
            for certificate in (*condition.certificates, *([] if condition.fast is None else [condition.fast]))
            if certificate.basis != "profile" and threshold_value(certificate.threshold) < math.inf
        ]
        found = [Claim(threshold_value(each.threshold), each.edge_watch.disagreement) for each in certificates]
        name = certificates_name(self._models, condition, condition.curve)
        stage = f"{self._pair.edge}, quality {condition.min_quality}, received {condition.min_received_fraction}"
        return claims_of(name, stage, found, min(each.delta for each in certificates)) if found else None


def _place(condition: ReceivedCondition) -> tuple[int, float]:
    return condition.min_quality, condition.min_received_fraction


def _largest(certificates: tuple[Certificate, ...], max_drop: float) -> Certificate | None:
    """That of the largest ε up to `max_drop`, chosen by ε alone: by what it showed would spend δ twice."""
    usable = [c for c in certificates if c.max_drop <= max_drop]
    return max(usable, key=lambda c: c.max_drop, default=None)


def _by(certificate: Certificate, guarantee: AccuracyGuarantee) -> Route:
    threshold = threshold_value(certificate.threshold)
    return Route(threshold, guarantee, certificate.escalation, to_best=certificate.to_best)


def _unbelieved(target: Target) -> Route:
    return Route(math.inf, AccuracyGuarantee(target, AccuracyStatus.BEST_EFFORT, Basis.PROFILE), 1.0, below_target=True)
