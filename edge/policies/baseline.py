"""What a baseline brings to a node, and how its requests go: to where the baseline's routes say, without regard to
time.

The servers, the queue, the models, the escalation and the answers are the node's own, so that only the decision
differs.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from edge.escalation.reply_validation import Escalated
from edge.inference.edge_stage import Looked
from edge.serving.request_handler import Call
from edge.serving.response import from_datacenter
from hawkvision.cascade.decision import ANSWER_MARGIN_MS
from hawkvision.core.config import PolicyName
from hawkvision.core.errors import RequestError
from hawkvision.core.types import Answer, OnMiss, Reason

log = logging.getLogger("hawkvision.edge")


async def nothing_to_close() -> None:
    """For baselines that hold nothing of their own."""


@dataclass(frozen=True, slots=True)
class BaselinePolicy:
    """A baseline's part of a node, beside the routes of `edge.policies.routes`."""

    name: PolicyName
    calls: Callable[..., Call]
    """Makes one request's call; called as `Call` is."""
    close: Callable[[], Awaitable[None]] = nothing_to_close


class PatientCall(Call):
    """A request that waits for whom its route names, however late the answer comes.

    What `on_miss=fail` asks for, the node does afterwards. The edge stands in only for a datacenter that fails or is
    known to be down, flagged as degraded: the systems meant here would answer with an error.
    """

    async def answer(self) -> Answer:
        """See `Call.answer`."""
        self.request = replace(self.request, on_miss=OnMiss.WAIT)
        return await super().answer()

    async def early(self) -> Answer | None:
        """None: nobody but HawkVision answers before the image has come."""
        return None

    @property
    def cannot_meet_target(self) -> bool:
        """Never: to others, an image is an image."""
        return False


class FallbackCall(PatientCall):
    """The same, but where a deadline asks for it, the edge's answer is given just before that (`deadline_fallback`).

    Nothing is learnt from it: the next request waits as long. Requests without a deadline, or that rather wait or fail
    than take less (`on_miss`), go as `PatientCall` sends them.
    """

    @property
    def falls_back(self) -> bool:
        """Whether this request is answered by the edge when the deadline is near."""
        return self.deadline is not None and self.request.on_miss is OnMiss.DEGRADE

    async def answer(self) -> Answer:
        """See `Call.answer`."""
        if not self.falls_back:
            return await super().answer()
        looking = asyncio.ensure_future(self._at_edge())
        try:
            edge, reason = None, Reason.TARGET
            if not self.route.direct:
                edge, reason = await looking, Reason.LOW_CONFIDENCE
                if self.route.threshold == -math.inf or not self._falls_short(edge):
                    return self._at_last(edge)
            escalated = await self.until_deadline(reason)
            if escalated is not None:
                return from_datacenter(self, escalated, reason, edge)
            return self._at_last(await looking, reason)
        finally:
            await ended(looking)

    async def until_deadline(self, reason: Reason) -> Escalated | None:
        """The datacenter's answer; None if there is none just before the deadline, or the link is down.

        Raises:
            CallerGone: if the caller hung up meanwhile.
        """
        slack_ms, uplink = self.slack_ms(), self.node.uplink
        if slack_ms is None or slack_ms <= ANSWER_MARGIN_MS or uplink is None or not uplink.up:
            return None
        try:
            return await self._escalate(reason, slack_ms - ANSWER_MARGIN_MS)
        except RequestError as error:
            log.warning("the datacenter refused an image that the edge can read: %s", error)
            return None


async def ended(looking: asyncio.Future[Looked]) -> None:
    """Give up a look that nobody wants any more, and retrieve what it raised, so that nothing is logged of it."""
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
