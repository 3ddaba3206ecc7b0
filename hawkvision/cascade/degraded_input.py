"""Routes of images that crossed a lossy link: re-encoded by the sender, with concealed missing parts, or both.

Small networks are confidently wrong about images with missing parts, so confidence alone accepts nothing. Each
condition (quality class, received fraction) has its own temperature, thresholds and certificates, all relative to the
reference stage on the *whole original image*. A target leads to one of three cases:

    certified      a certificate of this condition meets it: accept from its threshold on, escalate the rest as received
    below target   none does, but accepting loses no more than ε beyond what the link has lost: accept from that
                   threshold on, escalate the rest, guarantee nothing
    unknown        nothing was measured of such images: accept nothing, guarantee nothing
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import replace
from typing import Any, Final

from hawkvision.cascade.certification.profile import Certificate, Pair, ReceivedCondition, threshold_value
from hawkvision.cascade.route import (
    Controls,
    Route,
    certificates_name,
    guaranteed,
    without_guarantee,
)
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Quality,
    Received,
    StatusReason,
    Target,
)
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.monitor import Claim, Claims, claims_of
from hawkvision.models.manifest import MeasuredAccuracy

KNOWN_ROUTES: Final = 512
"""Routes that are cached: twenty conditions for the targets of a few dozen callers."""


class ReceivedRoutes:
    """Maps targets to routes for one pair, in every condition that was measured of it."""

    def __init__(self, pair: Pair, models: Any, best_accuracy: MeasuredAccuracy, *, elsewhere: bool) -> None:
        """Map targets for `pair`.

        Args:
            pair: with its conditions.
            models: fingerprints that become part of the claims' names.
            best_accuracy: of the reference stage on whole images; absolute targets are relative to it.
            elsewhere: whether site certificates are in force. Then these certificates are only the best estimate.
        """
        self._pair = pair
        self._models = models
        self._best_accuracy = best_accuracy
        self._elsewhere = elsewhere
        self._conditions = {(c.min_quality, c.min_received_fraction): c for c in pair.received}
        self._claims = {place: self._claims_in(condition) for place, condition in self._conditions.items()}
        self.profiles = frozenset(claims.profile for claims in self._claims.values() if claims is not None)
        self._known = functools.lru_cache(KNOWN_ROUTES)(self._make)

    def route(self, target: Target, received: Received) -> Route:
        """The route of a target, which the reference stage meets on whole images, for an image received so."""
        condition = self._pair.condition(received)
        if condition is None:
            return _nothing_accepted(target)
        return self._known(target, condition.min_quality, condition.min_received_fraction)

    def _make(self, target: Target, quality: int, fraction: float) -> Route:
        condition = self._conditions[quality, fraction]
        route = self._in(condition, target)
        if self._elsewhere:
            route = replace(route, guarantee=without_guarantee(target, StatusReason.PARTIAL_IMAGE), controls=None)
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
                    return _nothing_accepted(target)
                return self._edge_alone(condition, guaranteed(target, condition.fast))
            case Quality.BALANCED:
                balanced = self._pair.conditions[0].balanced.max_drop
                return self._drop(condition, target, balanced) or self._below_target(condition, target, balanced)
            case Quality.BEST:
                # No stage does better, but the reference stage itself does worse than on the original.
                return _nothing_accepted(target)

    def _drop(self, condition: ReceivedCondition, target: Target, max_drop: float) -> Route | None:
        """By the certificate with the largest ε that does not exceed the target's; None if there is none."""
        known = (condition.best, *condition.certificates)
        kept = _largest(tuple(c for c in known if c.basis != "profile"), max_drop)
        if kept is None:
            return None
        guarantee = guaranteed(target, kept)
        if threshold_value(kept.threshold) == math.inf:
            # Audits cannot measure what the link lost: the original is not here.
            return _by(kept, without_guarantee(target, StatusReason.UNMONITORED))
        return replace(_by(kept, guarantee), controls=Controls(self._claims[_place(condition)]))

    def _below_target(self, condition: ReceivedCondition, target: Target, max_drop: float) -> Route:
        accepting = _largest(condition.accept_certificates, max_drop)
        none_accepted = _nothing_accepted(target)
        return (
            none_accepted if accepting is None else replace(_by(accepting, none_accepted.guarantee), below_target=True)
        )

    def _accuracy(self, condition: ReceivedCondition, target: Target, accuracy: float) -> Route:
        """As for whole images: by the drop that this accuracy allows, best effort."""
        best, guarantee = self._best_accuracy, without_guarantee(target, StatusReason.MIN_ACCURACY)
        if condition.fast is not None and accuracy <= condition.edge_accuracy.value:
            return self._edge_alone(condition, guarantee)
        certain, estimated = (round(a - accuracy, 9) for a in (best.low, best.value))
        route = self._drop(condition, target, certain) or self._drop(condition, target, estimated)
        if route is None:
            return self._below_target(condition, target, estimated)
        return replace(route, guarantee=guarantee)

    def _confidence(self, condition: ReceivedCondition, target: Target, confidence: float) -> Route:
        """Per answer: calibrated in this condition but not certified."""
        if condition.fast is None:
            return _nothing_accepted(target)
        guarantee = without_guarantee(target, StatusReason.NO_CERTIFICATE)
        scores = condition.curve.scores  # margins, if the pair compares those, never exceed confidences
        escalation = bisect.bisect_left(scores, confidence) / len(scores)
        return Route(confidence, guarantee, escalation, by_confidence=True, to_best=escalation)

    def _edge_alone(self, condition: ReceivedCondition, guarantee: AccuracyGuarantee) -> Route:
        controls = Controls(self._claims[_place(condition)]) if guarantee.status is AccuracyStatus.CERTIFIED else None
        return Route(-math.inf, guarantee, 0.0, to_best=0.0, controls=controls)

    def _claims_in(self, condition: ReceivedCondition) -> Claims | None:
        """The claims of all certificates about the edge in a condition; None if none accepts its answers."""
        certificates = [
            certificate
            for certificate in (*condition.certificates, *([] if condition.fast is None else [condition.fast]))
            if certificate.basis != "profile" and threshold_value(certificate.threshold) < math.inf
        ]
        found = [Claim(threshold_value(each.threshold), each.edge_watch.disagreement) for each in certificates]
        name = certificates_name(self._models, condition)
        stage = f"{self._pair.edge}, quality {condition.min_quality}, received {condition.min_received_fraction}"
        return claims_of(name, stage, found, min(each.delta for each in certificates)) if found else None


def _place(condition: ReceivedCondition) -> tuple[int, float]:
    return condition.min_quality, condition.min_received_fraction


def _largest(certificates: tuple[Certificate, ...], max_drop: float) -> Certificate | None:
    """As `Policy` chooses. Choosing by results would spend δ twice."""
    usable = [c for c in certificates if stated_drop(c.max_drop) <= max_drop]
    return max(usable, key=lambda c: c.max_drop, default=None)


def _by(certificate: Certificate, guarantee: AccuracyGuarantee) -> Route:
    threshold = threshold_value(certificate.threshold)
    return Route(threshold, guarantee, certificate.escalation, to_best=certificate.to_best)


def _nothing_accepted(target: Target) -> Route:
    return Route(math.inf, without_guarantee(target, StatusReason.PARTIAL_IMAGE), 1.0, below_target=True)
