"""Asks the datacenter about one image: what is asked, how long it is waited for, and what is made of failures."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from edge.escalation.background import WaitAbandoned
from edge.escalation.reply_validation import Escalated
from edge.escalation.transport import Escalation
from edge.inference.edge_stage import EdgePrediction
from edge.serving.context import ServingContext
from edge.serving.outcome import score_of
from edge.serving.request import RoutedImage
from hawkvision.core.clock import Deadline
from hawkvision.core.errors import EscalationFailed
from hawkvision.core.escalation_api import EscalationRequest, IntermediateOffer
from hawkvision.core.types import OnMiss, Reason
from hawkvision.servers.bodies import CallerGone

log = logging.getLogger("hawkvision.edge")

UNSCORED: Final = (Reason.EDGE_BUSY, Reason.EDGE_SLOW, Reason.EDGE_NOT_READY)
"""Reasons of images that leave before the edge has scored them; the intermediate stage is certified for others only."""
MIN_TIMEOUT_S: Final = 0.001
"""An escalation whose cutoff passed while the image was made smaller is still sent, and waited for this long."""


async def escalate(
    context: ServingContext,
    image: RoutedImage,
    reason: Reason,
    cutoff: Deadline | None,
    edge: EdgePrediction | None = None,
    reference: str | None = None,
) -> Escalated | None:
    """Ask the datacenter; None if it has not answered by the cutoff or cannot be reached.

    An intermediate stage may answer if `edge` was not sure enough. `reference` is the stage that is asked otherwise;
    None asks the reference stage.

    Raises:
        RequestError: what the datacenter found wrong with the image.
        CallerGone: if the caller hung up meanwhile.
    """
    datacenter, metrics, clock = context.datacenter, context.metrics, context.clock
    asking, on_miss = image.request, image.request.asked.on_miss
    if datacenter is None:
        return None
    try:
        body = await datacenter.prepare_image(asking.body, asking.header, math.inf if cutoff is None else cutoff.at)
    except EscalationFailed as error:
        _count_failure(context, error, logging.INFO)
        return None
    timeout_s = context.datacenter_timeout_s
    if cutoff is not None:
        timeout_s = min(timeout_s, max(MIN_TIMEOUT_S, cutoff.remaining_s(clock.now())))
    metrics.escalations.labels(context.task, reason.value).inc()
    # With `wait`, a late answer is still wanted: the datacenter must not drop the image as expired.
    wanted_ms = None if asking.promised is None else (asking.promised - clock.now()) * 1e3
    strict = on_miss is OnMiss.FAIL  # then no other answer will do
    lossless = wanted_ms is None or datacenter.fits_lossless(body, timeout_s, strict=strict)
    offer = _intermediate(context, image, edge) if lossless and reason not in UNSCORED else None
    request = _request(context, image, offer, wanted_ms, reference)
    # An edge answer that is ready, or soon, serves a caller who takes it better than waiting for an unlikely reply.
    ready = edge is not None or reason is Reason.EDGE_SLOW
    wait_full_deadline = not ready or cutoff is None or on_miss is not OnMiss.DEGRADE
    escalation = Escalation(body, request, asking.trace.child(), timeout_s, lossless)
    reply = datacenter.infer(escalation, wait_full_deadline=wait_full_deadline)
    try:
        return await _unless_gone(reply, asking.hang_up)
    except EscalationFailed as error:
        _count_failure(context, error, logging.DEBUG)
        return None


def probe_in_background(
    context: ServingContext, image: RoutedImage, reason: Reason, edge: EdgePrediction | None
) -> None:
    """Escalate a copy behind the caller's back, to learn whether a reply would be in time."""
    datacenter, asking = context.datacenter, image.request
    assert datacenter is not None, "only a datacenter that is configured has a circuit breaker"
    timeout_s = datacenter.probe_timeout_s

    async def copied() -> Escalation:
        body = await datacenter.prepare_image(asking.body, asking.header)
        lossless = datacenter.fits_lossless(body, timeout_s)
        offer = _intermediate(context, image, edge) if lossless and reason not in UNSCORED else None
        request = _request(context, image, offer, timeout_s * 1e3)
        return Escalation(body, request, asking.trace.child(), timeout_s, lossless, probe=True)

    datacenter.probe_with(copied)


def circuit_open(context: ServingContext, image: RoutedImage, cutoff: Deadline | None) -> bool:
    """Whether a reply by the cutoff is too unlikely to be waited for.

    False if the edge has no time for the image: then the caller waits in any case.
    """
    datacenter = context.datacenter
    if datacenter is None or cutoff is None:
        return False
    within_ms = cutoff.remaining_ms(context.clock.now())
    if datacenter.admits(min(within_ms, context.datacenter_timeout_s * 1e3)):
        return False
    return image.request.asked.on_miss is OnMiss.FAIL or context.executor.has_time(image)


def _request(
    context: ServingContext,
    image: RoutedImage,
    offer: IntermediateOffer | None,
    wanted_ms: float | None,
    reference: str | None = None,
) -> EscalationRequest:
    """The request on the wire. `wanted_ms`: after this a reply is of no use; None without a bound."""
    route, asked = image.route.intermediate, image.request.asked
    return EscalationRequest(
        task=context.task,
        variant=route.stage if offer is not None and route is not None else reference or context.best,
        deadline_ms=wanted_ms,
        top_k=asked.top_k,
        intermediate=offer,
        progressive=wanted_ms is not None and asked.on_miss is OnMiss.DEGRADE,
    )


def _intermediate(context: ServingContext, image: RoutedImage, edge: EdgePrediction | None) -> IntermediateOffer | None:
    """The score from which the intermediate stage may answer; None asks the reference stage.

    Its certificate is about the caller's own bytes, so it is asked only about images that travel without loss. It
    covers images that the certified threshold escalates, and not those that an alarm or a busy edge adds. While the
    guarantee is suspended, the intermediate stage still scores images without answering: its log must show when traffic
    is as certified again.
    """
    route = image.route.intermediate
    if route is None or not context.served.serves(route.stage):
        return None
    if edge is not None and (edge.result.truncated or score_of(image, edge) >= image.route.threshold):
        return None
    return IntermediateOffer(route.score, math.inf if image.suspended else max(0.0, route.threshold), context.best)


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
