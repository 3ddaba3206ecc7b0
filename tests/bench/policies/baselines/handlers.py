"""How a baseline handles requests: each goes where its route says, and the edge stands by until the deadline."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace

from edge.escalation.reply_validation import Escalated
from edge.inference.edge_stage import EdgePrediction
from edge.serving.outcome import below_target, datacenter_answer
from edge.serving.request import RoutedImage
from edge.serving.request_handler import RequestHandler
from hawkvision.core.errors import RequestError
from hawkvision.core.types import Answer, OnMiss, Reason

log = logging.getLogger("hawkvision.edge")


async def nothing_to_close() -> None:
    """For baselines that hold nothing of their own."""


def waiting(image: RoutedImage) -> RoutedImage:
    """The same request with `on_miss=wait`."""
    request = image.request
    return replace(image, request=replace(request, asked=replace(request.asked, on_miss=OnMiss.WAIT)))


class BaselineHandler(RequestHandler):
    """The edge answers just before a deadline that the datacenter misses.

    It learns nothing of the link: the next request waits as long. Requests without a deadline, or with another
    `on_miss` than `degrade`, wait for the tier that the route names, however late the answer comes; the node itself
    carries out `on_miss=fail`, afterwards. The edge answers in place of a datacenter that fails or is known to be down,
    and the answer is marked as degraded: the systems compared with would answer with an error.
    """

    async def try_partial_image(self) -> tuple[Answer | None, bool]:
        """None: only HawkVision answers before the whole image is there."""
        return None, False

    @property
    def cannot_meet_target(self) -> bool:
        """Never: a baseline does not tell a partial image from a whole one."""
        return False

    @property
    def falls_back(self) -> bool:
        """Whether the edge answers this request when the deadline is near."""
        request = self.image.request
        return request.deadline is not None and request.asked.on_miss is OnMiss.DEGRADE

    async def answer(self) -> Answer:
        """See `RequestHandler.answer`."""
        if not self.falls_back:
            self.image = waiting(self.image)
            return await super().answer()
        running = asyncio.ensure_future(self.run_edge())
        try:
            edge, reason = None, Reason.TARGET
            if not self.image.route.direct:
                edge, reason = await running, Reason.LOW_CONFIDENCE
                if self.image.route.threshold == -math.inf or not below_target(self.image, edge):
                    return self.finish_at_edge(edge)
            escalated = await self.until_deadline(reason)
            if escalated is not None:
                return datacenter_answer(self.context, self.image, escalated, reason, edge)
            return self.finish_at_edge(await running, reason)
        finally:
            await cancelled(running)

    async def until_deadline(self, reason: Reason) -> Escalated | None:
        """The datacenter's reply; None if there is none just before the deadline, or the link is down.

        Raises:
            CallerGone: if the caller hung up meanwhile.
        """
        cutoff, datacenter = self.cutoff, self.context.datacenter
        if cutoff is None or cutoff.passed(self.context.clock.now()) or datacenter is None or not datacenter.up:
            return None
        try:
            return await self.escalate(reason, cutoff)
        except RequestError as error:
            log.warning("the datacenter refused an image that the edge can read: %s", error)
            return None


async def cancelled(running: asyncio.Future[EdgePrediction]) -> None:
    """Cancel an inference that is of no use any more, and retrieve its error, so that nothing is logged of it."""
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
