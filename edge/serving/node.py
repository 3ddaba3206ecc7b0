"""One edge node: answers images for one task, and holds what its requests share.

    server ─► EdgeNode.infer ─ route(target) ─► RequestHandler ─┬─ edge stage, in the worker pool
                                                                   └─ datacenter, over the link

In the background, the node asks which stages the datacenter serves (`edge.monitoring.datacenter_watch`) and audits its
answers (`edge.monitoring.audits`). It knows no protocol: servers give it an `ImageRequest`, and take an `Answer`
or an error.
"""

from __future__ import annotations

import asyncio
from typing import Final

from edge.inference.decoding_limits import DecodingLimits
from edge.inference.edge_stage import EdgeStage, StagePrediction
from edge.inference.resident_models import ResidentStage
from edge.inference.worker_pool import WorkerPool
from edge.monitoring.datacenter_watch import DatacenterWatch
from edge.monitoring.review import AuditReview
from edge.monitoring.streams import Streams
from edge.serving.context import ServingContext
from edge.serving.outcome import report_unanswered
from edge.serving.policy_plugin import BaselinePolicy
from edge.serving.recent_answers import RecentAnswers
from edge.serving.request import ImageRequest, RoutedImage
from edge.serving.request_handler import RequestHandler
from hawkvision.cascade.certification.profile import CERTIFIED_DROPS
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import BadField, DeadlineMissed, HawkVisionError, NotFound, RequestError
from hawkvision.core.types import (
    WHOLE,
    AccuracyStatus,
    Answer,
    MaxAccuracyDrop,
    OnMiss,
    Quality,
    RequestFields,
    Target,
)

LISTED_TARGETS: Final[tuple[Target, ...]] = (*Quality, *map(MaxAccuracyDrop, CERTIFIED_DROPS))
"""The targets of `/v1/targets`; every certificate stands behind one of them."""


class EdgeNode:
    """Answers images for one task. Made and used on one event loop."""

    def __init__(
        self,
        context: ServingContext,
        streams: Streams,
        baseline: BaselinePolicy | None = None,
        reviewer: AuditReview | None = None,
        recent: RecentAnswers | None = None,
    ) -> None:
        """Begin to serve.

        Args:
            context: the node's parts; closed with the node.
            streams: of the callers; closed with the node.
            baseline: decides in place of HawkVision's own policy; closed with the node.
            reviewer: certifies from audits; None if they are not kept.
            recent: remembers the last answers; None keeps no images of them.
        """
        self.context = context
        self.task = context.task
        self.kind = context.kind
        self.best = context.best
        self.clock = context.clock
        self.metrics = metrics = context.metrics
        self.datacenter = context.datacenter
        self.guarantees = context.guarantees
        self.streams = streams
        self.auditor = context.auditor
        self.baseline = baseline
        self.reviewer = reviewer
        self.recent = recent or RecentAnswers(self.clock.now())
        self._handler = RequestHandler if baseline is None else baseline.handler
        self._watch = None
        if self.datacenter is not None:
            self._watch = DatacenterWatch(self.datacenter, self.task, self.clock, context.served.record_list)
        metrics.certificates_valid.labels(self.task).set_function(lambda: float(self.guarantees.certificates_valid))
        self._count = {status: metrics.guarantees.labels(self.task, status.value).inc for status in AccuracyStatus}
        self._count_miss = metrics.deadline_misses.labels(self.task).inc

    @property
    def stage(self) -> EdgeStage:
        """The edge stage."""
        return self.guarantees.stage

    @property
    def policy(self) -> Policy:
        """The routes of this cascade."""
        return self.guarantees.policy

    @property
    def models(self) -> ResidentStage:
        """Those of the edge stage."""
        return self.context.executor.models

    @property
    def pool(self) -> WorkerPool[StagePrediction]:
        """Where images are decoded and inferred."""
        return self.context.executor.pool

    @property
    def limits(self) -> DecodingLimits:
        """The pixels and the memory that images may take."""
        return self.context.executor.limits

    def may_ask_datacenter(self, asked: RequestFields) -> bool:
        """Whether a request may be answered although the edge has no time for it."""
        return self.datacenter is not None and not self.datacenter.overloaded and asked.target is not Quality.FAST

    async def infer(self, request: ImageRequest, *, declined_before: bool = False) -> Answer:
        """Answer one image.

        Args:
            request: what is asked.
            declined_before: whether the edge stage has run on less of the image (`infer_early`).

        Raises:
            CallerGone: if the caller hung up.
            RequestError: the caller's fault (image, target, task).
            ServiceError: shed, shutting down, or the deadline missed with `on_miss=fail`.
        """
        image = self.routed(request, declined_before=declined_before)
        handler = self._handler(self.context, image)
        try:
            if handler.cannot_meet_target:
                raise handler.missed()
            answer = await handler.answer()
            if answer.deadline_met is False and request.asked.on_miss is OnMiss.FAIL:
                raise handler.missed()
        except BaseException as error:
            if isinstance(error, DeadlineMissed):
                self._count_miss()
            refused = isinstance(error, HawkVisionError) and not isinstance(error, DeadlineMissed)
            if handler.begun or not refused:  # what is refused unseen does not depend on the image
                image.watched.answered(as_routed=False)
                if not isinstance(error, RequestError):  # of a broken image there is no evidence
                    report_unanswered(self.context, image)
            raise
        if answer.deadline_met is False:
            self._count_miss()
        self._note(request, answer)
        return answer

    async def infer_early(self, request: ImageRequest) -> tuple[Answer | None, bool]:
        """The edge's answer to a part of an image while the rest is under way, and whether the edge stage ran.

        The answer is None if `infer` would not accept it. Nothing is escalated.

        Raises:
            RequestError, ServiceError: as `infer`.
        """
        answer, ran = await self._handler(self.context, self.routed(request)).try_partial_image()
        if answer is not None:
            self._note(request, answer)
        return answer, ran

    async def close(self) -> None:
        """Stop watching and auditing, finish what is queued, close connections, the backend and the state file."""
        if self._watch is not None:
            await self._watch.close()
        await self.auditor.close()
        await asyncio.to_thread(self.pool.close)
        if self.datacenter is not None:
            await self.datacenter.close()
        await self.models.close()
        if self.baseline is not None:
            await self.baseline.close()
        await self.streams.close()

    def _note(self, request: ImageRequest, answer: Answer) -> None:
        self._count[answer.accuracy.status]()
        self.recent.add(answer, request.started, request.asked.stream, request.caller, request.body)

    def routed(self, request: ImageRequest, *, declined_before: bool = False) -> RoutedImage:
        """The request with its route. What the image's header shows to be unfit is refused here, on the event loop.

        Raises:
            RequestError: for another task, an unreachable target, or an image that is none or too large.
        """
        asked, guarantees = request.asked, self.guarantees
        if asked.task is not None and asked.task != self.task:
            raise NotFound(f"task {asked.task!r} is not served here; this node serves {self.task!r}")
        if asked.kind is not None and asked.kind != self.kind.name:
            raise BadField(f"kind: task {self.task!r} is of kind {self.kind.name!r}, not {asked.kind[:40]!r}")
        route = guarantees.policy.route(asked.target, request.received)
        cost = self.limits.cost(request.body, request.header)
        watched = guarantees.watched(route, asked.stream, request.caller, whole=request.received == WHOLE)
        versions = guarantees.served.versions
        return RoutedImage(request, route, watched, guarantees.stage, versions, cost, declined_before)
