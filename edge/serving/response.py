"""What a caller is told, once it is known who answered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from edge.escalation.reply_validation import Escalated
from edge.inference.edge_stage import Looked
from hawkvision.core.trace import random_hex
from hawkvision.core.types import Answer, Prediction, Reason, Received, Tier, Timing

if TYPE_CHECKING:
    from edge.serving.request_handler import Call


def from_edge(call: Call, edge: Looked, *, degraded: bool, reason: Reason | None = None) -> Answer:
    """The edge's answer; `reason` if the datacenter was asked in vain."""
    node = call.node
    degraded = degraded or call.route.below_target
    if degraded:
        node.metrics.degraded.labels(node.task).inc()
    total_ms = (node.clock.now() - call.started) * 1e3
    result = edge.result
    top_k = zip(result.indices[: call.request.top_k], result.confidences, strict=False)
    return Answer(
        id=random_hex(32),
        task=node.task,
        top_k=tuple(Prediction(node.labels[i], i, p) for i, p in top_k),
        model=edge.model,
        tier=Tier.EDGE,
        accuracy=node.guarantee(
            call.route,
            Tier.EDGE,
            call.watched,
            degraded=degraded,
            version=call.versions is node.versions and node.as_certified(call.route, call.received),
        ),
        # `escalated` says that the datacenter was asked, even if its answer came too late to be used.
        escalated=reason is not None,
        reason=reason,
        degraded=degraded,
        received_fraction=_shown(call.received),
        deadline_met=_met(call, total_ms),
        timing_ms=Timing(result.decode_ms, edge.queue_ms, result.infer_ms, total=total_ms),
    )


def from_datacenter(call: Call, escalated: Escalated, reason: Reason, edge: Looked | None) -> Answer:
    """The datacenter's answer; `edge` is what the edge had thought before, if it had looked."""
    node, reply = call.node, escalated.reply
    received = _through_both(call.received, Received(reply.received_fraction, reply.quality))
    route = call.route if received == call.received else node.policy.route(call.request.target, received)
    short = route.below_target or not (reply.whole or reply.model == node.best) or not reply.complete
    if not reply.complete:
        node.metrics.incomplete_answers.labels(node.task).inc()
    if short:
        node.metrics.degraded.labels(node.task).inc()
    total_ms = (node.clock.now() - call.started) * 1e3
    timing = Timing(
        decode=edge.result.decode_ms if edge else 0.0,
        queue=edge.queue_ms if edge else 0.0,
        infer=edge.result.infer_ms if edge else 0.0,
        uplink=max(0.0, escalated.round_trip_ms - reply.timing_ms.total),
        dc=reply.timing_ms.total,
        total=total_ms,
    )
    return Answer(
        id=random_hex(32),
        task=node.task,
        top_k=tuple(Prediction(node.labels[c.index], c.index, c.confidence) for c in reply.top_k),
        model=reply.model,
        tier=Tier.DATACENTER,
        accuracy=node.guarantee(
            route,
            Tier.DATACENTER,
            call.watched,
            degraded=short,
            version=call.versions is node.versions and node.as_certified(route, received, reply),
        ),
        escalated=True,
        reason=reason,
        degraded=short,
        received_fraction=_shown(received),
        deadline_met=_met(call, total_ms),
        timing_ms=timing,
    )


def _met(call: Call, total_ms: float) -> bool | None:
    return None if call.request.deadline_ms is None else total_ms <= call.request.deadline_ms


def _through_both(at_edge: Received, of_that: Received) -> Received:
    """What the datacenter looked at, of the caller's image: what it received of what the edge had received.

    The two links know nothing of one another, so the second loses as much of the first one's true pixels as of others.
    """
    qualities = [quality for quality in (at_edge.quality, of_that.quality) if quality is not None]
    return Received(at_edge.fraction * of_that.fraction, min(qualities, default=None))


def _shown(received: Received) -> float:
    """The fraction to four digits, rounded down: what is not whole must not look so."""
    return math.floor(received.fraction * 1e4) / 1e4
