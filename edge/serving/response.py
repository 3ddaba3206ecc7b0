"""Builds the answer that a caller gets, once it is known which tier answered."""

from __future__ import annotations

import math

from edge.escalation.reply_validation import Escalated
from edge.inference.edge_stage import EdgePrediction
from edge.serving.context import ServingContext
from edge.serving.image_request import ImageRequest
from hawkvision.core.trace_context import random_hex
from hawkvision.core.types import Answer, Reason, Received, Tier, Timing


def edge_answer(
    context: ServingContext, image: ImageRequest, edge: EdgePrediction, *, degraded: bool, reason: Reason | None = None
) -> Answer:
    """The edge's answer.

    Args:
        context: of the node.
        image: the request.
        edge: the edge stage's prediction.
        degraded: whether it is below the target.
        reason: of the escalation, if the datacenter was asked and gave no answer that could be used.
    """
    guarantees, result = context.guarantees, edge.result
    degraded = degraded or image.route.below_target
    if degraded:
        context.metrics.degraded.labels(context.task).inc()
    total_ms = (context.clock.now() - image.started) * 1e3
    return Answer(
        id=random_hex(32),
        task=context.task,
        prediction=result.prediction,
        model=edge.model,
        tier=Tier.EDGE,
        accuracy=guarantees.of_answer(
            image.route,
            Tier.EDGE,
            image.controllers,
            # A certificate is about one look at an image. After another one an acceptance adds to what it gives up.
            degraded=degraded or image.declined_before,
            version=image.versions is context.served.versions and guarantees.as_certified(image.route, image.received),
        ),
        # True also for a datacenter that was asked and answered too late.
        escalated=reason is not None,
        reason=reason,
        degraded=degraded,
        received_fraction=_rounded_down(image.received),
        deadline_met=_deadline_met(image, total_ms),
        timing_ms=Timing(result.decode_ms, edge.queue_ms, result.infer_ms, total=total_ms),
    )


def datacenter_answer(
    context: ServingContext, image: ImageRequest, escalated: Escalated, reason: Reason, edge: EdgePrediction | None
) -> Answer:
    """The datacenter's answer.

    Args:
        context: of the node.
        image: the request.
        escalated: the datacenter's reply.
        reason: of the escalation.
        edge: the edge stage's prediction, if it ran before.
    """
    guarantees, reply = context.guarantees, escalated.reply
    received = _through_both(image.received, Received(reply.received_fraction, reply.quality))
    route = image.route if received == image.received else guarantees.policy.route(image.asked.target, received)
    below_target = route.below_target or not (reply.whole or reply.model == context.best) or not reply.complete
    if not reply.complete:
        context.metrics.incomplete_answers.labels(context.task).inc()
    if below_target:
        context.metrics.degraded.labels(context.task).inc()
    total_ms = (context.clock.now() - image.started) * 1e3
    certified = image.versions is context.served.versions and guarantees.as_certified(route, received, reply)
    # Certificates of received images are about edge and reference stage on the same one. Here the edge saw more of it.
    uncovered = below_target or received != image.received
    return Answer(
        id=random_hex(32),
        task=context.task,
        prediction=reply.prediction,
        model=reply.model,
        tier=Tier.DATACENTER,
        accuracy=guarantees.of_answer(route, Tier.DATACENTER, image.controllers, degraded=uncovered, version=certified),
        escalated=True,
        reason=reason,
        degraded=below_target,
        received_fraction=_rounded_down(received),
        deadline_met=_deadline_met(image, total_ms),
        timing_ms=_timing(escalated, edge, total_ms),
    )


def _timing(escalated: Escalated, edge: EdgePrediction | None, total_ms: float) -> Timing:
    dc_ms = escalated.datacenter_ms
    return Timing(
        decode=edge.result.decode_ms if edge else 0.0,
        queue=edge.queue_ms if edge else 0.0,
        infer=edge.result.infer_ms if edge else 0.0,
        uplink=escalated.round_trip_ms - dc_ms,
        dc=dc_ms,
        total=total_ms,
    )


def _deadline_met(image: ImageRequest, total_ms: float) -> bool | None:
    return None if image.asked.deadline_ms is None else total_ms <= image.asked.deadline_ms


def _through_both(at_edge: Received, of_that: Received) -> Received:
    """The part of the caller's image that the datacenter used: what it received of what the edge had received.

    Losses on the two links are independent, so the fractions multiply.
    """
    qualities = [quality for quality in (at_edge.quality, of_that.quality) if quality is not None]
    return Received(at_edge.fraction * of_that.fraction, min(qualities, default=None))


def _rounded_down(received: Received) -> float:
    """The fraction to four digits, rounded down: a partial image must not read as whole."""
    return math.floor(received.fraction * 1e4) / 1e4
