"""Answers one image: runs the edge stage, asks the datacenter, or both, and answers before the deadline.

    answer ─┬─ cascade ──────► edge stage ─ decide ─┬─ accept ─────────────────────────────► edge answer
            │                                       └─ escalate ─┬─ reply ─────────────────► datacenter answer
            ├─ run_reference ────────────────────────────────────┴─ late, failed, unlikely ► edge answer, degraded
            └─ both tiers at once ─┬─ accept, or reply: the first of them ─────────────────► that answer
                                   └─ neither ─────────────────────────────────────────────► edge answer, degraded

`hawkvision.cascade.decision` decides. This module carries the decision out, with its timers and fallbacks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Coroutine
from typing import Any, Final

from edge.escalation.reply_validation import Escalated
from edge.inference.edge_stage import EdgePrediction
from edge.serving.context import ServingContext
from edge.serving.escalation import circuit_open, escalate, probe_in_background
from edge.serving.outcome import (
    below_target,
    datacenter_answer,
    edge_answer,
    report_reply,
    report_scored,
    score_of,
    with_edge,
)
from edge.serving.request import RoutedImage
from hawkvision.cascade.decision import Accept, Decision, Escalate, Miss, decide
from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed, NotReady, Overloaded, RequestError
from hawkvision.core.types import Answer, OnMiss, Reason
from hawkvision.servers.bodies import CallerGone

log = logging.getLogger("hawkvision.edge")

FAST_EDGE_MS: Final = 5.0
"""An edge stage that takes no longer delays no escalation by enough for both tiers at once."""


def _found(running: asyncio.Future[EdgePrediction] | None) -> EdgePrediction | None:
    """What the edge stage has found; None if it still runs or has failed."""
    return running.result() if running is not None and running.done() and running.exception() is None else None


class RequestHandler:
    """HawkVision's own way to answer an image."""

    def __init__(self, context: ServingContext, image: RoutedImage) -> None:
        self.context = context
        self.image = image
        self.reference = context.best
        """The datacenter stage that is asked, unless an intermediate stage answers."""
        self.begun = False
        """Whether a stage has seen the image, or was asked to."""

    def answer(self) -> Coroutine[Any, Any, Answer]:
        """The answer of the tier that the target's route names.

        Raises:
            CallerGone: if the caller hung up.
            RequestError: if the image is broken.
            ServiceError: if the queue is full, or the deadline is missed and the caller asked for that error.
        """
        return self.run_reference() if self.image.route.direct else self.cascade()

    async def cascade(self) -> Answer:
        """Run the edge stage first, and escalate if it is not sure enough for the target; or both at once."""
        reason = self._edge_unavailable() or (Reason.EDGE_SLOW if self._edge_too_slow() else None)
        if reason is None:
            try:
                edge = await self.run_edge()
            except NotReady:
                reason = self._edge_unavailable()
                if reason is None or self.context.executor.models.state != "failed":
                    raise
        if reason is not None:
            late_wanted = self.image.request.asked.on_miss is OnMiss.WAIT
            return await self._both_tiers(reason, None if late_wanted else self.cutoff)
        decision = self._decide(edge)
        match decision:
            case Accept():
                return self.finish_at_edge(edge)
            case Miss():
                raise self._unanswered(edge)
            case Escalate():
                return await self._escalated(decision, edge)

    async def try_partial_image(self) -> tuple[Answer | None, bool]:
        """The edge's answer to a part of the image, if the target accepts it, and whether the edge stage ran.

        None means to wait for the rest.
        """
        image = self.image
        if image.route.direct or image.route.below_target or image.cost.heavy:
            return None, False
        if self.context.executor.models.state != "ready":  # the datacenter may answer the whole image
            return None, False
        edge = await self.run_edge()
        if self._decide(edge) == Accept() and not below_target(image, edge):
            return self.finish_at_edge(edge), True
        report_scored(self.context, image, edge)
        return None, True

    async def run_reference(self) -> Answer:
        """Ask the reference stage without running the edge stage first."""
        decision = self._decide(None)
        match decision:
            case Accept():
                return self.finish_at_edge(await self.run_edge())
            case Miss():
                raise self.missed()
            case Escalate(reason, None):
                escalated = await self.escalate(reason, None)
                if escalated is None:
                    return self.finish_at_edge(await self.run_edge(), reason)
                return datacenter_answer(self.context, self.image, escalated, reason, None)
            case Escalate(reason, cutoff) if circuit_open(self.context, self.image, cutoff):
                probe_in_background(self.context, self.image, reason, None)
                if self.image.request.asked.on_miss is OnMiss.FAIL:
                    raise self.missed()
                return self.finish_at_edge(await self.run_edge())
            case Escalate(reason, cutoff):
                return await self._both_tiers(reason, cutoff)

    async def run_edge(self) -> EdgePrediction:
        """The edge stage's prediction. A conditional ensemble is truncated where a full one would miss the deadline.

        Raises:
            DeadlineMissed: if it is not there by the deadline, and the caller asked for that error.
            Overloaded: if the queue is full.
            RequestError: if the image is broken.
        """
        image, executor = self.image, self.context.executor
        deadline, on_miss = image.request.deadline, image.request.asked.on_miss
        if deadline is None or on_miss is not OnMiss.FAIL:
            edge = await executor.infer(image, self.cutoff if on_miss is OnMiss.DEGRADE else None)
        else:
            try:
                async with asyncio.timeout(max(0.0, deadline.remaining_s(self.context.clock.now()))):
                    edge = await executor.infer(image)
            except TimeoutError:
                raise self.missed() from None
        self.begun = True
        return edge

    async def escalate(
        self,
        reason: Reason,
        cutoff: Deadline | None,
        edge: EdgePrediction | None = None,
        standby: asyncio.Future[EdgePrediction] | None = None,
    ) -> Escalated | None:
        """The datacenter's reply, which is reported; see `edge.serving.escalation.escalate`.

        It is compared with `edge`, or with what the edge stage that runs meanwhile has found; a reply of some members
        waits for that until the cutoff and becomes the answer of both together. None if the edge's is all that counts.
        """
        self.begun = True
        timed = None if cutoff is None or cutoff.passed(self.context.clock.now()) else cutoff
        escalated = await escalate(self.context, self.image, reason, cutoff, edge, self.reference)
        if timed is not None:  # some members may have replied before it
            self.context.cutoffs.waited(timed, self.context.clock.now())
        if escalated is None:
            return None
        if standby is not None and cutoff is not None and not escalated.reply.complete:  # the edge may be sure yet
            await asyncio.wait({standby}, timeout=max(0.0, cutoff.remaining_s(self.context.clock.now())))
        edge = edge or _found(standby)
        report_reply(self.context, self.image, escalated.reply, edge)
        return escalated if edge is None else with_edge(self.context, self.image, escalated, edge)

    def finish_at_edge(self, edge: EdgePrediction, reason: Reason | None = None) -> Answer:
        """Answer with the edge's prediction: it is sure enough, or nothing better came.

        Args:
            edge: the prediction.
            reason: of the escalation, if the datacenter was asked and gave no usable answer.

        Raises:
            DeadlineMissed: if it is below the target after an escalation, and the caller asked for that error.
        """
        image = self.image
        if self._strict and reason is not None and below_target(image, edge):
            raise self._unanswered(edge)
        return edge_answer(self.context, image, edge, reason)

    @property
    def cannot_meet_target(self) -> bool:
        """Whether too little of the image arrived for the target, and the caller asked for an error in that case."""
        return self.image.route.below_target and self.image.request.received.fraction < 1.0 and self._strict

    @property
    def _strict(self) -> bool:
        """Whether the caller asked for an error in place of a late or degraded answer."""
        return self.image.request.deadline is not None and self.image.request.asked.on_miss is OnMiss.FAIL

    @property
    def cutoff(self) -> Deadline | None:
        """When the datacenter is not waited for any more, so that an answer can leave before the deadline."""
        asked, started = self.image.request.asked, self.image.request.started
        return None if asked.deadline_ms is None else self.context.cutoffs.before(asked.deadline_ms, started)

    def missed(self) -> DeadlineMissed:
        """The error of `on_miss=fail`."""
        return DeadlineMissed(
            f"no answer meeting the target was possible within deadline_ms={self.image.request.asked.deadline_ms:g}"
        )

    async def _escalated(self, decision: Escalate, edge: EdgePrediction) -> Answer:
        """The datacenter's answer, or the edge's if there is none in time."""
        context, image, reason, cutoff = self.context, self.image, decision.reason, decision.cutoff
        if circuit_open(context, image, cutoff):
            probe_in_background(context, image, reason, edge)
            if image.request.asked.on_miss is OnMiss.FAIL and below_target(image, edge):
                raise self._unanswered(edge)
            return self.finish_at_edge(edge)
        try:
            escalated = await self._unless_refused(self.escalate(reason, cutoff, edge))
        except CallerGone:
            report_scored(context, image, edge)
            raise
        if escalated is None:
            return self.finish_at_edge(edge, reason)
        return datacenter_answer(context, image, escalated, reason, edge)

    async def _both_tiers(self, reason: Reason, cutoff: Deadline | None) -> Answer:
        """Ask the datacenter until the cutoff while the edge stage runs: the first answer that meets the target.

        A confident edge cancels the escalation. If the datacenter does not reply, the edge answers.
        """
        image = self.image
        if image.route.direct and image.request.asked.on_miss is OnMiss.FAIL:  # the edge's answer is of no use
            escalated = await self.escalate(reason, cutoff)
            if escalated is None:
                raise self.missed()
            return datacenter_answer(self.context, image, escalated, reason, None)
        running = asyncio.ensure_future(self.run_edge())
        asking = asyncio.ensure_future(self._unless_refused(self.escalate(reason, cutoff, standby=running)))
        try:
            await asyncio.wait((running, asking), return_when=asyncio.FIRST_COMPLETED)
            edge = _found(running)
            if not asking.done() and edge is not None:
                if self._decide(edge) == Accept():
                    self.context.metrics.escalations_cancelled.labels(self.context.task).inc()
                    return self.finish_at_edge(edge, reason)
                reason = Reason.LOW_CONFIDENCE if reason is Reason.EDGE_SLOW else reason
            escalated = await asking
            if escalated is not None:
                return datacenter_answer(self.context, image, escalated, reason, _found(running))
            try:
                edge = await running
            except (NotReady, Overloaded):  # that was so when it was asked
                edge = await self.run_edge()
            return self.finish_at_edge(edge, reason)
        finally:
            running.cancel()
            asking.cancel()
            # Retrieve what they raised, so that nothing is logged as never retrieved.
            await asyncio.gather(running, asking, return_exceptions=True)

    async def _unless_refused(self, asking: Awaitable[Escalated | None]) -> Escalated | None:
        """The reply; None if the datacenter cannot read the image: the edge says whether it can."""
        try:
            return await asking
        except RequestError as error:
            log.warning("the datacenter refused an image: %s", error)
            return None

    def _unanswered(self, edge: EdgePrediction) -> DeadlineMissed:
        """The error of `on_miss=fail` for an image that the edge scored; the score is reported."""
        report_scored(self.context, self.image, edge)
        return self.missed()

    def _decide(self, edge: EdgePrediction | None) -> Decision:
        """What to do with an edge prediction, or with an image that the edge stage did not run on."""
        image, datacenter = self.image, self.context.datacenter
        return decide(
            image.route,
            -math.inf if edge is None or edge.result.truncated else score_of(image, edge),
            cutoff=self.cutoff,
            now=self.context.clock.now(),
            reachable=datacenter is not None and datacenter.up,
            on_miss=image.request.asked.on_miss,
            suspended=image.suspended,
        )

    def _edge_too_slow(self) -> bool:
        """Whether edge first and then the datacenter would probably be late where both at once would not.

        That is so if asking at once makes an answer as routed in time more likely by `min_on_time_probability` at
        least. Never for targets whose images the edge nearly always accepts, nor on a metered link.
        """
        context, image, datacenter = self.context, self.image, self.context.datacenter
        cutoff = self.cutoff
        if datacenter is None or context.uplink_metered or cutoff is None:
            return False
        escalated, least = 1.0 if image.suspended else image.route.escalation, datacenter.min_on_time_probability
        delays_ms = context.executor.pool.recent_ms()
        if escalated < least or not delays_ms or delays_ms[-1] <= FAST_EDGE_MS or not datacenter.up:
            return False
        left_ms, most_ms = cutoff.remaining_ms(context.clock.now()), context.datacenter_timeout_s * 1e3
        within_ms = min(left_ms, most_ms)
        gain = datacenter.gain(within_ms, [min(left_ms - ms, most_ms) for ms in delays_ms])
        return gain > 0.0 and datacenter.admits(within_ms) and escalated * gain >= least

    def _edge_unavailable(self) -> Reason | None:
        """Why the edge cannot answer, in time if there is a deadline, where the datacenter may; else None."""
        image, datacenter, executor, cutoff = self.image, self.context.datacenter, self.context.executor, self.cutoff
        edge_alone = image.route.threshold == -math.inf and not image.suspended
        promised = image.request.promised
        if datacenter is None or edge_alone or (promised is not None and promised <= self.context.clock.now()):
            return None
        if not executor.ready_in_time(image):
            return Reason.EDGE_NOT_READY if datacenter.up else None
        if promised is None or cutoff is None or executor.has_time(image):
            return None
        return Reason.EDGE_BUSY if datacenter.admits(cutoff.remaining_ms(self.context.clock.now())) else None
