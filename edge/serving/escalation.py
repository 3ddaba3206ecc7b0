"""Asks the datacenter about one image: what is asked, how long it is waited for, and what is made of failures."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from edge.escalation.reply_validation import Escalated
from edge.escalation.wait_cutoff import WaitAbandoned
from edge.inference.edge_stage import EdgePrediction
from edge.serving.context import ServingContext
from edge.serving.image_request import ImageRequest
from edge.serving.monitoring_evidence import score_of, update_controllers
from hawkvision.core.clock import Deadline
from hawkvision.core.errors import EscalationFailed
from hawkvision.core.escalation_api import EscalationRequest, IntermediateOffer
from hawkvision.core.types import OnMiss, Reason
from hawkvision.servers.bodies import CallerGone

log = logging.getLogger("hawkvision.edge")

MIN_TIMEOUT_S = 0.001
"""An escalation whose cutoff passed while the image was made smaller is still sent, and waited for this long."""


async def escalate(
    context: ServingContext,
    image: ImageRequest,
    reason: Reason,
    cutoff: Deadline | None,
    edge: EdgePrediction | None = None,
) -> Escalated | None:
    """Ask the datacenter; None if it has not answered by the cutoff or cannot be reached.

    The controllers get its reply, compared with `edge` if that is given.

    Raises:
        RequestError: what the datacenter found wrong with the image.
        CallerGone: if the caller hung up meanwhile.
    """
    datacenter, metrics, clock = context.datacenter, context.metrics, context.clock
    if datacenter is None:
        return None
    try:
        body = await datacenter.prepare_image(image.body, image.header, math.inf if cutoff is None else cutoff.at)
    except EscalationFailed as error:
        _count_failure(context, error, logging.INFO)
        return None
    timeout_s = context.datacenter_timeout_s
    if cutoff is not None:
        timeout_s = min(timeout_s, max(MIN_TIMEOUT_S, cutoff.remaining_s(clock.now())))
    metrics.escalations.labels(context.task, reason.value).inc()
    # With `wait`, a late answer is still wanted: the datacenter must not drop the image as expired.
    wanted_ms = None if image.on_miss is OnMiss.WAIT else image.slack_ms(clock.now())
    strict = image.on_miss is OnMiss.FAIL  # then no other answer will do
    lossless = wanted_ms is None or datacenter.fits_lossless(body, timeout_s, strict=strict)
    request = _request(context, image, reason, edge, wanted_ms, lossless=lossless)
    # An edge answer that is ready serves a caller who takes it better than waiting for an unlikely reply.
    wait_full_deadline = edge is None or cutoff is None or image.on_miss is not OnMiss.DEGRADE
    asking = datacenter.infer(
        body, request, image.trace.child(), timeout_s, lossless=lossless, wait_full_deadline=wait_full_deadline
    )
    try:
        escalated = await _unless_gone(asking, image.hang_up)
    except EscalationFailed as error:
        _count_failure(context, error, logging.DEBUG)
        return None
    update_controllers(context, image, escalated.reply, edge)
    return escalated


def probe_in_background(
    context: ServingContext, image: ImageRequest, reason: Reason, edge: EdgePrediction | None
) -> None:
    """Escalate a copy behind the caller's back, to learn whether a reply would be in time."""
    datacenter = context.datacenter
    assert datacenter is not None, "only a datacenter that is configured has a circuit breaker"
    timeout_ms = datacenter.probe_timeout_s * 1e3

    def request(lossless: bool) -> EscalationRequest:
        return _request(context, image, reason, edge, timeout_ms, lossless=lossless)

    datacenter.probe_with(image.body, image.header, request, image.trace.child())


def circuit_open(context: ServingContext, image: ImageRequest, cutoff: Deadline | None) -> bool:
    """Whether a reply by the cutoff is too unlikely to be waited for.

    False if the edge could not answer sooner: then the caller waits in any case.
    """
    datacenter = context.datacenter
    if datacenter is None or cutoff is None:
        return False
    within_ms = cutoff.remaining_ms(context.clock.now())
    if datacenter.admits(min(within_ms, context.datacenter_timeout_s * 1e3)):
        return False
    return image.on_miss is OnMiss.FAIL or context.executor.pool.predicted_wait_ms() < within_ms


def _request(
    context: ServingContext,
    image: ImageRequest,
    reason: Reason,
    edge: EdgePrediction | None,
    wanted_ms: float | None,
    *,
    lossless: bool,
) -> EscalationRequest:
    """The wire request. An intermediate stage is asked only about the caller's own bytes, as its certificate demands.

    Args:
        context: of the node.
        image: the request.
        reason: of the escalation.
        edge: the edge stage's prediction, if it ran.
        wanted_ms: milliseconds after which a reply is of no use; None without a bound.
        lossless: whether the image travels without loss.
    """
    terms = _intermediate(context, image, edge) if lossless and reason is not Reason.EDGE_BUSY else None
    route = image.route.intermediate
    return EscalationRequest(
        task=context.task,
        variant=image.reference if terms is None or route is None else route.stage,
        deadline_ms=wanted_ms,
        top_k=image.asked.top_k,
        intermediate=terms,
        progressive=wanted_ms is not None and image.on_miss is OnMiss.DEGRADE,
    )


def _intermediate(
    context: ServingContext, image: ImageRequest, edge: EdgePrediction | None
) -> IntermediateOffer | None:
    """The score from which the intermediate stage may answer; None asks the reference stage.

    The certificate covers images that the certified threshold escalates. It does not cover those that a raised
    threshold, an accuracy debt or a busy edge adds. While the guarantee is suspended, the intermediate stage still
    scores images without answering: its log must show when traffic is as certified again.
    """
    route, controllers = image.route.intermediate, image.controllers
    if route is None or not context.served.serves(route.stage):
        return None
    if edge is not None and (edge.result.truncated or score_of(image, edge) >= image.route.threshold):
        return None
    controller = controllers.intermediate
    bar = max(0.0, route.threshold if controller is None else controller.control.threshold)
    if controllers.suspended:
        bar = math.inf
    return IntermediateOffer(route.score, bar, context.best)


def _count_failure(context: ServingContext, error: EscalationFailed, level: int) -> None:
    context.metrics.escalation_failures.labels(context.task).inc()
    if isinstance(error, WaitAbandoned):
        context.metrics.escalations_abandoned.labels(context.task).inc()
    log.log(level, "escalation failed: %s", error)


async def _unless_gone(
    asking: Coroutine[Any, Any, Escalated], hang_up: Callable[[], Awaitable[object]] | None
) -> Escalated:
    """Await the datacenter, but not for a caller that is gone.

    Raises:
        CallerGone: if it is.
    """
    if hang_up is None:
        return await asking
    answer = asyncio.ensure_future(asking)
    leaving = asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise CallerGone
        return answer.result()
    finally:
        leaving.cancel()
        answer.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)
