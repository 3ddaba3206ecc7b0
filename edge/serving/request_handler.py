"""One request on its way through a node: ask the edge, the datacenter or both, and answer in time.

What is decided, `hawkvision.cascade.policy` decides, at the threshold that the stream's controller asks for. Here it is
carried out, with the waiting, the timers and the falling back that this takes, and controllers hear what came of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from edge.escalation.client import WaitAbandoned
from edge.escalation.reply_validation import Escalated
from edge.inference.edge_stage import Looked
from edge.monitoring.audits import Accepted
from edge.monitoring.streams import StageScore, Watched
from edge.serving.admission import Admitted, Turns
from edge.serving.response import from_datacenter, from_edge
from hawkvision.cascade.decision import ANSWER_MARGIN_MS, Accept, Decision, Escalate, Miss, decide
from hawkvision.cascade.route import Route
from hawkvision.core.errors import DeadlineMissed, EscalationFailed, RequestError
from hawkvision.core.escalation_api import EscalationReply, EscalationRequest, Intermediate
from hawkvision.core.trace import TraceContext
from hawkvision.core.types import Answer, ClassifyRequest, OnMiss, Reason, Received
from hawkvision.imaging.decoding_cost import Cost
from hawkvision.imaging.preprocessing import ImageHeader
from hawkvision.servers.bodies import CallerGone

if TYPE_CHECKING:
    from edge.serving.node import EdgeNode

log = logging.getLogger("hawkvision.edge")


class Call:
    """One request on its way; holds what its steps share."""

    def __init__(
        self,
        node: EdgeNode,
        body: bytes,
        header: ImageHeader,
        cost: Cost,
        request: ClassifyRequest,
        route: Route,
        watched: Watched,
        started: float,
        trace: TraceContext,
        hang_up: Callable[[], Awaitable[object]] | None,
        received: Received,
    ) -> None:
        self.node = node
        self.body = body
        self.header = header
        self.cost = cost
        """Of decoding it here."""
        self.turns: Turns | None = None
        """Of a request that has several images."""
        self.admitted: Admitted | None = None
        """Its part of the work that waits, if it is heavy."""
        self.request = request
        self.route = route
        self.watched = watched
        self.started = started
        self.trace = trace
        self.hang_up = hang_up
        self.received = received
        self.edge_stage = node.stage
        """The edge stage, as certified when the request came."""
        self.versions = node.versions
        """That were in force then."""
        self.asked_stage = node.best
        """Who is asked in the datacenter, unless an intermediate stage looks first."""
        self.deadline = None if request.deadline_ms is None else started + request.deadline_ms * 1e-3

    def answer(self) -> Coroutine[Any, Any, Answer]:
        """The answer, as the node's policy finds it."""
        return self.direct() if self.route.direct else self.cascade()

    async def cascade(self) -> Answer:
        """Ask the edge first."""
        if self._edge_is_too_busy():
            return await self._dc_with_standby(Reason.EDGE_BUSY)
        edge = await self._at_edge()
        match self._decide(edge):
            case Accept():
                return self._at_last(edge)
            case Miss():
                self._saw(edge)
                raise self.missed()
            case Escalate(reason, cutoff_ms) if self._is_in_vain(cutoff_ms):
                self._try_out(reason, edge)
                if self.request.on_miss is OnMiss.FAIL and self._falls_short(edge):
                    self._saw(edge)
                    raise self.missed()
                return self._at_last(edge)
            case Escalate(reason, cutoff_ms):
                try:
                    escalated = await self._escalate(reason, cutoff_ms, edge)
                except RequestError as error:
                    # The edge could read this image, so the caller need not hear that the datacenter could not.
                    log.warning("the datacenter refused an image that the edge can read: %s", error)
                    escalated = None
                except CallerGone:
                    self._saw(edge)
                    raise
                if escalated is None:
                    return self._at_last(edge, reason)
                return from_datacenter(self, escalated, reason, edge)

    async def early(self) -> Answer | None:
        """The edge's answer if nothing better is to be had by waiting; None where more of the image might be."""
        if self.route.direct or self.route.below_target or self.cost.heavy:
            return None
        edge = await self._at_edge()
        if self._decide(edge) == Accept() and not self._falls_short(edge):
            return self._at_last(edge)
        self._saw(edge)
        return None

    async def direct(self) -> Answer:
        """Go straight to the reference stage."""
        match self._decide(None):
            case Accept():
                return self._at_last(await self._at_edge())
            case Miss():
                raise self.missed()
            case Escalate(reason, None):
                escalated = await self._escalate(reason, None)
                if escalated is None:
                    return self._at_last(await self._at_edge(), reason)
                return from_datacenter(self, escalated, reason, None)
            case Escalate(reason, cutoff_ms) if self._is_in_vain(cutoff_ms):
                self._try_out(reason, None)
                if self.request.on_miss is OnMiss.FAIL:
                    raise self.missed()
                return self._at_last(await self._at_edge())
            case Escalate(reason, _):
                return await self._dc_with_standby(reason)

    async def _dc_with_standby(self, reason: Reason) -> Answer:
        """Ask the datacenter until just before the deadline, while the edge works on what it would say."""
        slack = self.slack_ms()
        assert slack is not None, "without a deadline nobody needs to stand by"
        cutoff_ms = slack - ANSWER_MARGIN_MS
        if self.request.on_miss is OnMiss.FAIL:
            escalated = await self._escalate(reason, cutoff_ms)
            if escalated is None:
                raise self.missed()
            return from_datacenter(self, escalated, reason, None)
        standby = asyncio.ensure_future(self._at_edge())
        try:
            escalated = await self._escalate(reason, cutoff_ms)
            if escalated is not None:
                return from_datacenter(self, escalated, reason, None)
            return self._at_last(await standby, reason)
        finally:
            standby.cancel()
            # Retrieve what it raised, so that nothing is logged as never retrieved.
            await asyncio.gather(standby, return_exceptions=True)

    @property
    def cannot_meet_target(self) -> bool:
        """Whether the deadline left too little of the image for the target, and the caller asked to be told."""
        part = self.route.below_target and self.received.fraction < 1.0
        return part and self.deadline is not None and self.request.on_miss is OnMiss.FAIL

    def slack_ms(self) -> float | None:
        """Time left before the deadline."""
        return None if self.deadline is None else (self.deadline - self.node.clock.now()) * 1e3

    def missed(self) -> DeadlineMissed:
        """The error of `on_miss=fail`."""
        return DeadlineMissed(
            f"no answer meeting the target was possible within deadline_ms={self.request.deadline_ms:g}"
        )

    def _score(self, edge: Looked) -> float:
        """How sure the edge is, as the target compares it."""
        return edge.result.confidences[0] if self.route.by_confidence else edge.result.score

    def _falls_short(self, edge: Looked | None) -> bool:
        """Whether an edge answer is below the target; that debt asks for more does not make it so.

        One that was given in haste is, whatever the target: nobody measured what that costs.
        """
        control = self.watched.edge
        if edge is None or edge.result.truncated:
            return True
        return self._score(edge) < (self.route.threshold if control is None else control.control.bar)

    def _decide(self, edge: Looked | None) -> Decision:
        """What becomes of an edge result, or of an image that the edge did not look at."""
        control = self.watched.edge
        decision = decide(
            self.route,
            -math.inf if edge is None or edge.result.truncated else self._score(edge),
            slack_ms=self.slack_ms(),
            reachable=self.node.uplink is not None and self.node.uplink.up,
            on_miss=self.request.on_miss,
            threshold=None if control is None else control.control.threshold,
        )
        if isinstance(decision, Miss) and not self._falls_short(edge):
            return Accept()  # only debt asked for more, and there is no time to repay it here
        return decision

    def _edge_is_too_busy(self) -> bool:
        """Whether the edge would be late and the datacenter would not; one who waits is better off in the queue."""
        slack, uplink = self.slack_ms(), self.node.uplink
        if slack is None or uplink is None or self.request.on_miss is OnMiss.WAIT:
            return False
        if self.node.pool.predicted_wait_ms() < slack:
            return False
        return uplink.admits(slack - ANSWER_MARGIN_MS)

    def _is_in_vain(self, cutoff_ms: float | None) -> bool:
        """Whether a reply is too unlikely to be waited for; who can have the edge's answer no sooner waits anyway."""
        node = self.node
        if (
            node.uplink is None
            or cutoff_ms is None
            or node.uplink.admits(min(cutoff_ms, node.datacenter_timeout_s * 1e3))
        ):
            return False
        return self.request.on_miss is OnMiss.FAIL or node.pool.predicted_wait_ms() < cutoff_ms

    def _try_out(self, reason: Reason, edge: Looked | None) -> None:
        """Nobody waits for this, but whoever comes next wants to know whether it would have paid."""
        node = self.node
        assert node.uplink is not None
        timeout_ms = node.uplink.trial_s * 1e3

        def asked(exact: bool) -> EscalationRequest:
            return self._escalation_request(reason, edge, timeout_ms, exact=exact)

        node.uplink.try_out(self.body, self.header, asked, self.trace.child())

    async def _at_edge(self) -> Looked:
        must_end = None
        if self.deadline is not None and self.request.on_miss is OnMiss.DEGRADE:
            must_end = self.deadline - ANSWER_MARGIN_MS * 1e-3
        looking = self.node.at_edge(self, must_end)
        slack = self.slack_ms()
        if slack is None or self.request.on_miss is not OnMiss.FAIL:
            return await looking
        try:
            async with asyncio.timeout(max(0.0, slack * 1e-3)):
                return await looking
        except TimeoutError:
            raise self.missed() from None

    async def _escalate(self, reason: Reason, cutoff_ms: float | None, edge: Looked | None = None) -> Escalated | None:
        """Ask the datacenter; None if it has not answered by the cutoff or cannot be reached.

        The controllers hear of its answer, compared with `edge` if that is given.

        Raises:
            RequestError: what the datacenter found wrong with the image.
            CallerGone: if the caller hung up meanwhile.
        """
        node, metrics = self.node, self.node.metrics
        if node.uplink is None:
            return None
        begun = node.clock.now()
        until = math.inf if cutoff_ms is None else begun + cutoff_ms * 1e-3
        try:
            body = await node.uplink.as_sent(self.body, self.header, until)
        except EscalationFailed as error:
            metrics.escalation_failures.labels(node.task).inc()
            log.info("escalation failed: %s", error)
            return None
        timeout_s = node.datacenter_timeout_s
        if cutoff_ms is not None:
            left_s = cutoff_ms * 1e-3 - (node.clock.now() - begun)
            timeout_s = min(timeout_s, max(0.001, left_s))
        metrics.escalations.labels(node.task, reason.value).inc()
        # With `wait`, a late answer is still wanted: the datacenter must not drop the image as expired.
        wanted_ms = None if self.request.on_miss is OnMiss.WAIT else self.slack_ms()
        surely = self.request.on_miss is OnMiss.FAIL  # then no other answer will do
        exact = wanted_ms is None or node.uplink.carries_whole(body, timeout_s, surely=surely)
        request = self._escalation_request(reason, edge, wanted_ms, exact=exact)
        # An edge answer that lies ready serves a caller who takes it better than waiting for what hardly ever comes.
        patient = edge is None or cutoff_ms is None or self.request.on_miss is not OnMiss.DEGRADE
        asking = node.uplink.infer(body, request, self.trace.child(), timeout_s, exact=exact, patient=patient)
        try:
            escalated = await self._unless_gone(asking)
        except EscalationFailed as error:
            metrics.escalation_failures.labels(node.task).inc()
            if isinstance(error, WaitAbandoned):
                metrics.escalations_abandoned.labels(node.task).inc()
            log.debug("escalation failed: %s", error)
            return None
        self._learn(escalated.reply, edge)
        return escalated

    def _escalation_request(
        self, reason: Reason, edge: Looked | None, wanted_ms: float | None, *, exact: bool
    ) -> EscalationRequest:
        """What is asked; an intermediate stage only about the caller's own bytes, which its certificate covers."""
        intermediate = self._intermediate(edge) if exact and reason is not Reason.EDGE_BUSY else None
        return EscalationRequest(
            task=self.node.task,
            variant=self.asked_stage
            if intermediate is None or self.route.intermediate is None
            else self.route.intermediate.stage,
            deadline_ms=wanted_ms,
            top_k=self.request.top_k,
            intermediate=intermediate,
            progressive=wanted_ms is not None and self.request.on_miss is OnMiss.DEGRADE,
        )

    def _intermediate(self, edge: Looked | None) -> Intermediate | None:
        """On which terms the intermediate stage may answer; None sends the image to the reference stage.

        The certificate covers the intermediate stage's answers to images that the certified threshold escalates, and to
        no
        others: not to those that a raised threshold or a debt adds, nor to those of a busy edge. While the guarantee is
        void it is not believed, but still looks: its log must show when traffic is as certified again.
        """
        intermediate, control = self.route.intermediate, self.watched.intermediate
        if intermediate is None or not self.node.serves(intermediate.stage):
            return None
        if edge is not None and (edge.result.truncated or self._score(edge) >= self.route.threshold):
            return None
        bar = max(0.0, intermediate.threshold if control is None else control.control.threshold)
        if self.watched.suspended:
            bar = math.inf
        return Intermediate(intermediate.score, bar, self.node.best)

    def _learn(self, reply: EscalationReply, edge: Looked | None) -> None:
        """Tell the controllers what the datacenter said."""
        node, watched = self.node, self.watched
        at_edge, in_intermediate = watched.edge, watched.intermediate
        index = reply.top_k[0].index
        by_best, certified = reply.model == node.best, node.certified(reply, self.received)
        # Part of a stage's answer, or one to less than what the edge looked at, says nothing about the edge's own; nor
        # does another version's.
        comparable = node.serves(node.best) and reply.comparable and certified
        if at_edge is not None and edge is not None:
            known = by_best and comparable and not edge.result.truncated
            at_edge.escalated(self._score(edge), edge.result.indices[0] != index if known else None)
        scores, accepted = self._scores(edge), None
        between = None
        if reply.passed_over is not None and node.passed_over_certified(reply, self.received):
            between = reply.passed_over.score, reply.passed_over.index
            if in_intermediate is not None:
                in_intermediate.escalated(between[0], between[1] != index if comparable else None)
        elif not by_best and certified and reply.score is not None and self.route.intermediate is not None:
            between = reply.score, index
            accepted = None if in_intermediate is None else Accepted(in_intermediate, *between)
        if between is not None and watched.intermediate_claims is not None:
            scores = (*scores, StageScore(watched.intermediate_claims, *between))
        self._consider(scores, index if by_best and comparable else None, accepted)

    def _scores(self, edge: Looked | None) -> tuple[StageScore, ...]:
        """What the edge said, for its log; not if it was truncated, which is another stage that nobody certified."""
        claims = self.watched.edge_claims
        if claims is None or edge is None or edge.result.truncated:
            return ()
        return (StageScore(claims, self._score(edge), edge.result.indices[0]),)

    def _consider(
        self, scores: tuple[StageScore, ...], reference: int | None = None, accepted: Accepted | None = None
    ) -> None:
        if scores:
            node = self.node
            node.auditor.consider(
                self.watched, scores, self.body, self.trace, comparable=node.serves(node.best), reference=reference,
                accepted=accepted, received=self.received,
            )  # fmt: skip

    async def _unless_gone(self, asking: Coroutine[Any, Any, Escalated]) -> Escalated:
        """Await the datacenter, but not for a caller that is gone."""
        if self.hang_up is None:
            return await asking
        answer = asyncio.ensure_future(asking)
        leaving = asyncio.ensure_future(self.hang_up())
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise CallerGone
            return answer.result()
        finally:
            leaving.cancel()
            answer.cancel()
            await asyncio.gather(answer, leaving, return_exceptions=True)

    def _saw(self, edge: Looked) -> None:
        """Nobody gets an answer, but the image was scored: leaving out what is escalated would distort the sample."""
        if self.watched.edge is not None:
            self.watched.edge.escalated(self._score(edge), None)
        self._consider(self._scores(edge))

    def _at_last(self, edge: Looked, reason: Reason | None = None) -> Answer:
        """The edge's answer counts: it is sure enough, or nothing better came (`reason`: of what was asked in vain).

        Raises:
            DeadlineMissed: if it falls short, and the caller asked for an error rather than that.
        """
        score = self._score(edge)
        degraded = self._falls_short(edge)
        if degraded and reason is not None and self.request.on_miss is OnMiss.FAIL and self.deadline is not None:
            self._saw(edge)
            raise self.missed()
        control, accepted = self.watched.edge, None
        if control is not None and degraded:
            control.fell_short(score)
        elif control is not None:
            accepted = Accepted(control, score, edge.result.indices[0])
        self._consider(self._scores(edge), accepted=accepted)
        return from_edge(self, edge, degraded=degraded, reason=reason)
