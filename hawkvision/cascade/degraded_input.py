"""Routes of images that crossed a lossy link: re-encoded by the sender, with concealed missing parts, or both.

Small networks are confidently wrong about images with missing parts, so confidence alone accepts nothing. Each
condition (quality class, received fraction) has its own temperature and thresholds. Nothing is certified: every answer
to such an image is `best_effort`. A target leads to one of three cases:

    expected       compared with the reference stage on the *whole original image*, a threshold was measured to lose no
                   more than the target allows: accept from it on, escalate the rest as received
    below target   none does, but accepting loses no more than ε beyond what the link has lost: accept from that
                   threshold on, escalate the rest
    unknown        nothing was measured of such images: accept nothing
"""

from __future__ import annotations

import bisect
import math
from dataclasses import replace

from hawkvision.cascade.certification.profile import Pair, ReceivedCondition, ReceivedThreshold, threshold_value
from hawkvision.cascade.route import Route, without_guarantee
from hawkvision.core.types import (
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Quality,
    Received,
    StatusReason,
    Target,
)
from hawkvision.guarantee.answered import stated_drop
from hawkvision.models.manifest import MeasuredAccuracy


def received_route(pair: Pair, best_accuracy: MeasuredAccuracy, target: Target, received: Received) -> Route:
    """The route of a target, which the reference stage meets on whole images, for an image received so.

    Absolute targets are relative to `best_accuracy`, that of the reference stage on whole images.
    """
    condition = pair.condition(received)
    if condition is None:
        return _none_accepted(target)
    route = _in(condition, pair, best_accuracy, target)
    return replace(route, temperature=condition.edge_temperature)


def _in(condition: ReceivedCondition, pair: Pair, best_accuracy: MeasuredAccuracy, target: Target) -> Route:
    match target:
        case MaxAccuracyDrop(value):
            return _drop(condition, target, value)
        case MinAccuracy(value):
            if condition.accepts_edge and value <= condition.edge_accuracy:
                return _accepted(target, -math.inf, 0.0)
            certain, estimated = (round(a - value, 9) for a in (best_accuracy.low, best_accuracy.value))
            route = _drop(condition, target, certain)
            return _drop(condition, target, estimated) if route.below_target else route
        case Quality.BALANCED:
            return _drop(condition, target, stated_drop(pair.conditions[0].balanced.max_drop))
        case Quality.BEST:
            return _none_accepted(target)  # no stage does better, but the reference stage itself does worse
        case MinConfidence() | Quality.FAST if not condition.accepts_edge:
            return _none_accepted(target)
        case MinConfidence(value):
            # The scores may be margins, which never exceed confidences.
            escalation = bisect.bisect_left(condition.scores, value) / len(condition.scores)
            return replace(_accepted(target, value, escalation), by_confidence=True)
        case Quality.FAST:
            return _accepted(target, -math.inf, 0.0)


def _drop(condition: ReceivedCondition, target: Target, max_drop: float) -> Route:
    kept = _largest(condition.thresholds, max_drop)
    if kept is not None:
        return _accepted(target, threshold_value(kept.threshold), kept.escalation)
    beyond = _largest(condition.beyond_link, max_drop)
    if beyond is None:
        return _none_accepted(target)
    return replace(_accepted(target, threshold_value(beyond.threshold), beyond.escalation), below_target=True)


def _largest(thresholds: tuple[ReceivedThreshold, ...], max_drop: float) -> ReceivedThreshold | None:
    """The threshold with the largest ε up to `max_drop`, the first of equals."""
    return max((each for each in thresholds if each.max_drop <= max_drop), key=lambda t: t.max_drop, default=None)


def _accepted(target: Target, threshold: float, escalation: float) -> Route:
    return Route(threshold, without_guarantee(target, StatusReason.PARTIAL_IMAGE), escalation, to_best=escalation)


def _none_accepted(target: Target) -> Route:
    return replace(_accepted(target, math.inf, 1.0), below_target=True)
