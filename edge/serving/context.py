"""What the requests of a node share: its parts, and the execution of the edge stage in the worker pool."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge.inference.decoding_limits import DecodingLimits
from edge.inference.edge_stage import EdgePrediction, EdgeStage, InferenceJob, StagePrediction
from edge.inference.resident_models import ResidentStage
from edge.inference.worker_pool import WorkerPool
from edge.monitoring.audits import Auditor
from edge.monitoring.served_versions import ServedVersions
from edge.serving.guarantees import Guarantees
from edge.serving.request import RoutedImage
from hawkvision.cascade.cutoff import Cutoffs
from hawkvision.core.clock import Clock, Deadline
from hawkvision.core.errors import Overloaded
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.tasks.kind import TaskKind

if TYPE_CHECKING:
    from edge.escalation.client import DatacenterClient


class EdgeExecutor:
    """The worker pool, and the limits of what it decodes. Used on one event loop."""

    def __init__(
        self,
        task: str,
        models: ResidentStage,
        pool: WorkerPool[StagePrediction],
        limits: DecodingLimits,
        clock: Clock,
        metrics: EdgeMetrics,
        max_pixels: int,
    ) -> None:
        """Prepare.

        Args:
            task: for metrics.
            models: those of the edge stage.
            pool: where images are decoded and inferred.
            limits: of the images that are decoded.
            clock: for deadlines and timings.
            metrics: where to count.
            max_pixels: the largest image that is decoded.
        """
        self.models = models
        self.pool = pool
        self.limits = limits
        self._clock = clock
        self._max_pixels = max_pixels
        metrics.queue_length.labels(task).set_function(lambda: pool.waiting)
        metrics.queue_limit.labels(task).set(pool.limit)
        self._observe_queue = metrics.queue_duration.labels(task).observe
        self._observe_infer = metrics.inference_duration.labels(task, models.stage.name).observe
        self._count_ensemble_run = metrics.ensemble_runs.labels(task).inc

    async def infer(self, image: RoutedImage, must_end: Deadline | None = None) -> EdgePrediction:
        """The edge stage's prediction. Images may share a run of the model.

        The other members of a conditional ensemble are skipped if they would end after `must_end`.

        Raises:
            NotReady: as `ResidentStage.present`.
            Overloaded: if the queue is full, or the image would be late and its caller does not wait for it.
            RequestError: if the image is broken.
        """
        stage, models = image.stage, self.models
        if models.state != "ready":
            await models.present(image.request.promised)
        with models:
            result, queue_ms = await self.queued(image, self.job(image, stage, must_end), stage)
        self._observe_queue(queue_ms * 1e-3)
        self._observe_infer(result.infer_ms * 1e-3)
        if result.full_ensemble:
            self._count_ensemble_run()
        return EdgePrediction(result, queue_ms, stage.first.name if image.route.first_only else stage.name)

    async def score(self, image: RoutedImage, stage: EdgeStage) -> StagePrediction:
        """The whole stage's prediction as evidence, whatever the image's route and deadline; no request's duration.

        Raises:
            NotReady, Overloaded, RequestError: as `infer`.
        """
        request = image.request
        await self.models.present()
        job = InferenceJob(
            stage, request.body, request.header, request.asked.top_k, self._max_pixels, self._clock,
            alone=self.pool.alone,
        )  # fmt: skip
        with self.models:
            result, _ = await self.pool.submit(job, None, stage.infer_batch, image.cost)
        return result

    def ready_in_time(self, image: RoutedImage) -> bool:
        """Whether the models are in memory by the deadline; asks for them."""
        deadline = image.request.deadline
        return self.models.in_time(None if deadline is None else deadline.remaining_s(self._clock.now()))

    def has_time(self, image: RoutedImage) -> bool:
        """Whether the models are in memory in time, and the pool would take the image now."""
        if not self.ready_in_time(image):
            return False
        try:
            self.pool.check(image.request.caller, image.request.promised, heavy=image.cost.heavy)
        except Overloaded:
            return False
        return True

    def job(self, image: RoutedImage, stage: EdgeStage, must_end: Deadline | None = None) -> InferenceJob:
        """What the pool runs for one image on a stage."""
        request, route = image.request, image.route
        return InferenceJob(
            stage, request.body, request.header, request.asked.top_k, self._max_pixels, self._clock, route.temperature,
            self.pool.alone, route.first_only, None if must_end is None else must_end.at,
        )  # fmt: skip

    def queued(
        self, image: RoutedImage, job: InferenceJob, stage: EdgeStage
    ) -> asyncio.Future[tuple[StagePrediction, float]]:
        """The job's result and its milliseconds in the queue.

        Raises:
            Overloaded, RequestError: as `infer`.
        """
        request = image.request
        return self.pool.submit(job, request.promised, stage.infer_batch, image.cost, request.caller, request.place)


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The parts of a node that a request needs. Made and used on one event loop."""

    task: str
    clock: Clock
    metrics: EdgeMetrics
    executor: EdgeExecutor
    """Runs the edge stage."""
    datacenter: DatacenterClient | None
    """The datacenter; None for a node that answers alone."""
    datacenter_timeout_s: float
    """Longest wait for the datacenter, with or without a deadline."""
    uplink_metered: bool
    """Whether nothing may be sent before it is known to be needed."""
    cutoffs: Cutoffs
    """How long before a deadline the wait for the datacenter ends."""
    guarantees: Guarantees
    """The certificates in force."""
    auditor: Auditor

    @property
    def kind(self) -> TaskKind[Any]:
        """The kind of the task."""
        return self.guarantees.stage.kind

    @property
    def best(self) -> str:
        """The reference stage, which is asked on escalation."""
        return self.guarantees.best

    @property
    def served(self) -> ServedVersions:
        """What the datacenter runs."""
        return self.guarantees.served
