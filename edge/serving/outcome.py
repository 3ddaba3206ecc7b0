"""The outcome of a request: whether it is below its target, the answer, and the evidence for the monitors.

Only this module decides that an answer is degraded. Every image is offered to the auditor once, whatever its target
and route, whether it was answered and whether the edge scored it. Without the others the sample would be distorted, and
a certificate would change the population that the next one is made from.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import msgspec

from edge.escalation.reply_validation import Escalated
from edge.inference.edge_stage import EdgePrediction
from edge.monitoring.audits import StageScore, Unscored
from edge.serving.context import ServingContext
from edge.serving.request import RoutedImage
from hawkvision.core.escalation_api import EscalationReply
from hawkvision.core.trace_context import random_hex
from hawkvision.core.types import (
    WHOLE,
    Answer,
    DegradedReason,
    Prediction,
    Reason,
    Received,
    StatusReason,
    Tier,
    Timing,
)
from hawkvision.tasks.last_answer import last_answer


def score_of(image: RoutedImage, edge: EdgePrediction) -> float:
    """The edge's score, as the target compares it."""
    return image.stage.kind.confidence(edge.result.prediction) if image.route.by_confidence else edge.result.score


def below_target(image: RoutedImage, edge: EdgePrediction | None) -> bool:
    """Whether an edge prediction is below the target.

    A truncated ensemble always is: its accuracy was never measured. So is any while the reference stage must answer.
    """
    if edge is None or edge.result.truncated or image.suspended:
        return True
    return score_of(image, edge) < image.route.threshold


# ----------------------------------------------------------------------------------------------------- answers


def edge_answer(
    context: ServingContext,
    image: RoutedImage,
    edge: EdgePrediction,
    reason: Reason | None = None,
    *,
    below: bool | None = None,
) -> Answer:
    """The edge's answer, which is reported as evidence.

    Args:
        context: of the node.
        image: the request.
        edge: the edge stage's prediction.
        reason: of the escalation, if the datacenter was asked and gave no answer that could be used.
        below: whether the prediction is below the target; None lets `below_target` decide.
    """
    guarantees, result, route, received = context.guarantees, edge.result, image.route, image.request.received
    below = below_target(image, edge) if below is None else below
    report_scored(context, image, edge)
    degraded = below or route.below_target
    if degraded:
        context.metrics.degraded.labels(context.task).inc()
    total_ms = (context.clock.now() - image.request.started) * 1e3
    lacking = _not_certified(
        degraded=degraded,
        # A certificate is about one inference of an image. After another one an acceptance adds to what it gives up.
        partial=image.declined_before,
        version=image.versions is context.served.versions and guarantees.as_certified(route),
    )
    if lacking in (None, StatusReason.DEGRADED):
        image.watched.answered(as_routed=lacking is None)
    return Answer(
        id=random_hex(32),
        task=context.task,
        prediction=result.prediction,
        model=edge.model,
        tier=Tier.EDGE,
        accuracy=guarantees.for_answer(route, Tier.EDGE, image.watched, lacking),
        # True also for a datacenter that was asked and answered too late.
        escalated=reason is not None,
        reason=reason,
        degraded=degraded,
        degraded_reason=_why_degraded(context, image, reason) if degraded else None,
        edge_score=_rounded(score_of(image, edge)),
        edge_threshold=_rounded(route.threshold),
        received_fraction=_rounded_down(received),
        deadline_met=_deadline_met(image, total_ms),
        timing_ms=Timing(result.decode_ms, edge.queue_ms, result.infer_ms, total=total_ms),
    )


def datacenter_answer(
    context: ServingContext, image: RoutedImage, escalated: Escalated, reason: Reason, edge: EdgePrediction | None
) -> Answer:
    """The datacenter's answer; its reply was reported when it came (`report_reply`).

    Args:
        context: of the node.
        image: the request.
        escalated: the datacenter's reply.
        reason: of the escalation.
        edge: the edge stage's prediction, if it ran before.
    """
    guarantees, reply, at_edge = context.guarantees, escalated.reply, image.request.received
    received = _through_both(at_edge, Received(reply.received_fraction, reply.quality))
    route = image.route if received == at_edge else guarantees.policy.route(image.request.asked.target, received)
    degraded = route.below_target or not (reply.whole or reply.model == context.best) or not reply.complete
    incomplete = DegradedReason.PARTIAL_IMAGE if route.below_target else DegradedReason.INCOMPLETE
    if not reply.complete:
        context.metrics.incomplete_answers.labels(context.task).inc()
    if degraded:
        context.metrics.degraded.labels(context.task).inc()
    total_ms = (context.clock.now() - image.request.started) * 1e3
    lacking = _not_certified(
        degraded=degraded,
        partial=received != at_edge,
        version=image.versions is context.served.versions and guarantees.as_certified(route, reply),
    )
    if guarantees.as_certified(image.route):  # then the edge's answers are certified
        image.watched.answered(as_routed=lacking is None)
    dc_ms = escalated.datacenter_ms
    return Answer(
        id=random_hex(32),
        task=context.task,
        prediction=reply.prediction,
        model=reply.model if escalated.edge is None else f"{escalated.edge}+{reply.model}",
        tier=Tier.DATACENTER,
        accuracy=guarantees.for_answer(route, Tier.DATACENTER, image.watched, lacking),
        escalated=True,
        reason=reason,
        degraded=degraded,
        degraded_reason=incomplete if degraded else None,
        edge_score=None if edge is None else _rounded(score_of(image, edge)),
        edge_threshold=_rounded(image.route.threshold),
        received_fraction=_rounded_down(received),
        deadline_met=_deadline_met(image, total_ms),
        timing_ms=Timing(
            decode=edge.result.decode_ms if edge else 0.0,
            queue=edge.queue_ms if edge else 0.0,
            infer=edge.result.infer_ms if edge else 0.0,
            uplink=escalated.round_trip_ms - dc_ms,
            dc=dc_ms,
            total=total_ms,
        ),
    )


def with_edge(
    context: ServingContext, image: RoutedImage, escalated: Escalated, edge: EdgePrediction
) -> Escalated | None:
    """A reply with the outputs of members (`EscalationReply.part`) together with the edge's prediction; others stay.

    None if the edge's prediction is all that counts: the datacenter had a part of the image, and is known to be right
    less often about such parts than the edge about what it had. Some members, unless the opposite is known.
    """
    reply, kind = escalated.reply, image.stage.kind
    if reply.received_fraction < 1.0:
        at_edge = image.request.received
        at_datacenter = _through_both(at_edge, Received(reply.received_fraction, reply.quality))
        better = context.guarantees.policy.datacenter_is_better(at_edge, at_datacenter)
        if better is False or (better is None and not reply.complete):
            return None
    if reply.part is None:
        return escalated
    output = last_answer(kind, edge.result.own(), reply.part, whole=reply.whole)
    if output is None or output is reply.part.output:
        return None if output is None else escalated
    reply = msgspec.structs.replace(reply, prediction=kind.predict(output, image.request.asked.top_k))
    return replace(escalated, reply=reply, edge=edge.model)


def _not_certified(*, degraded: bool, partial: bool, version: bool) -> StatusReason | None:
    """Why an answer cannot be certified; None if it can.

    Args:
        degraded: whether it is below the target.
        partial: whether stages saw different parts of the image.
        version: whether certified versions computed it.
    """
    if degraded:
        return StatusReason.DEGRADED
    if partial:
        return StatusReason.PARTIAL_IMAGE
    return None if version else StatusReason.UNCERTIFIED_VERSION


def _why_degraded(context: ServingContext, image: RoutedImage, reason: Reason | None) -> DegradedReason:
    """Why the edge's answer is below the target; `reason` is that of the escalation, if there was one."""
    if image.route.below_target:
        return DegradedReason.PARTIAL_IMAGE
    if context.datacenter is None:
        return DegradedReason.NO_DATACENTER
    if reason is not None:
        return DegradedReason.NO_REPLY
    return DegradedReason.NO_TIME if context.datacenter.up else DegradedReason.UNREACHABLE


def _deadline_met(image: RoutedImage, total_ms: float) -> bool | None:
    within_ms = image.request.asked.deadline_ms
    return None if within_ms is None else total_ms <= within_ms


def _through_both(at_edge: Received, at_datacenter: Received) -> Received:
    """The part of the caller's image that the datacenter used: what it received of what the edge had received.

    Losses on the two links are independent, so the fractions multiply.
    """
    qualities = [quality for quality in (at_edge.quality, at_datacenter.quality) if quality is not None]
    return Received(at_edge.fraction * at_datacenter.fraction, min(qualities, default=None))


def _rounded(value: float) -> float | None:
    """Six digits, as probabilities in answers; None for what is infinite, which JSON lacks."""
    return round(value, 6) if math.isfinite(value) else None


def _rounded_down(received: Received) -> float:
    """The fraction to four digits, rounded down: a partial image must not read as whole."""
    return math.floor(received.fraction * 1e4) / 1e4


# ---------------------------------------------------------------------------------------------------- evidence


def report_reply(
    context: ServingContext, image: RoutedImage, reply: EscalationReply, edge: EdgePrediction | None
) -> None:
    """Report the datacenter's reply, compared with the edge's prediction if there is one."""
    served, claims = context.served, image.watched.intermediate_claims
    by_reference, certified = reply.model == context.best, served.certified(reply)
    # A partial ensemble, another version, or less of the image than the edge used says nothing about the edge.
    comparable = served.serves(context.best) and reply.comparable and certified
    scores, between = _stage_scores(image, edge), None
    if reply.passed_over is not None and served.passed_over_certified(reply):
        between = reply.passed_over.score, reply.passed_over.prediction
    elif not by_reference and certified and reply.score is not None and image.route.intermediate is not None:
        between = reply.score, reply.prediction
    if between is not None and claims is not None:
        scores = (*scores, StageScore(reply.model, claims, *between))
    _consider(context, image, scores, reply.prediction if by_reference and comparable else None)


def report_scored(context: ServingContext, image: RoutedImage, edge: EdgePrediction) -> None:
    """Report an image that the edge scored and the datacenter did not answer."""
    _consider(context, image, _stage_scores(image, edge))


def report_unanswered(context: ServingContext, image: RoutedImage) -> None:
    """Report an image that got no answer, unless its score was reported."""
    _consider(context, image, ())


def _stage_scores(image: RoutedImage, edge: EdgePrediction | None) -> tuple[StageScore, ...]:
    """The edge's outcome for its log, and as evidence. A truncated ensemble has none, for it is another stage than the
    certified one; nor has a part of an image.
    """
    if edge is None or edge.result.truncated or image.request.received != WHOLE:
        return ()
    return (StageScore(edge.model, image.watched.edge_claims, edge.result.score, edge.result.prediction),)


def _consider(
    context: ServingContext,
    image: RoutedImage,
    scores: tuple[StageScore, ...],
    reference: Prediction | None = None,
) -> None:
    """Offer the image to the auditor; `reference` is the reference stage's prediction, if it has answered."""
    request, guarantees = image.request, context.guarantees
    if image.reported:
        return
    image.reported = True
    first_only = image.route.first_only
    scored = not first_only and any(each.stage == guarantees.stage.name for each in scores)
    scores = scores if guarantees.edge_certified(image.route) else ()
    runs = not scored and request.received == WHOLE and guarantees.whole_edge_certified
    if not (scores or runs):
        return
    claims = None if first_only else image.watched.edge_claims
    claimed = (runs and claims is not None) or any(each.claims is not None for each in scores)
    due = context.auditor.draw(image.watched, claimed=claimed)
    if due is None:
        return
    run = functools.partial(context.executor.score, image, guarantees.stage)
    unscored = Unscored(claims, lambda: context.executor.pool.has_room, run) if runs else None
    context.auditor.audit(due, scores, request.body, request.trace, reference, unscored)
