"""INFaaS on an edge node: the cheapest variant that is accurate and fast enough answers, and is loaded on demand.

After Romero, Li, Yadwadkar and Kozyrakis, "INFaaS: Automated Model-less Inference Serving", USENIX ATC 2021, and its
published source (`queryfe_server.cc`, the search by accuracy and latency). The node is one worker, for every variant
whose file is built here. The datacenter is another, for the stages of its cascade. `tests/bench/policies/README.md`
says what is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from edge.escalation.client import DatacenterClient
from edge.inference.edge_stage import EdgePrediction
from edge.inference.resident_models import ResidentStage
from edge.serving.context import ServingContext
from edge.serving.outcome import datacenter_answer, edge_answer
from edge.serving.request import RoutedImage
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import Answer, Reason
from tests.bench.policies.baselines.handlers import BaselineHandler, cancelled, waiting
from tests.bench.policies.baselines.registration import Registration
from tests.bench.policies.baselines.routes import DIGITS, Registered

GAIN: Final = 0.1
"""Weight of the newest image, or load, in what is smoothed."""


@dataclass(frozen=True, slots=True)
class Option:
    """One variant, where it would run, and how long that would take just now."""

    name: str
    accuracy: float
    """As registered."""
    latency_ms: float
    """Without any waiting; of the datacenter, the smoothed round trip."""
    wait_ms: float = 0.0
    """Before it could begin: loads and the queue; of the datacenter, what it may take beyond the smoothed time."""
    resident: bool = True
    local: bool = True

    @property
    def total_ms(self) -> float:
        """From now to the answer."""
        return self.latency_ms + self.wait_ms


def choose(options: Iterable[Option], required: float, slack_ms: float | None) -> Option:
    """The variant that answers, of at least one.

    Accuracy comes before latency, as in the source. Of the variants that meet both, those that must be loaded are left
    out if a resident one remains on the node; otherwise only the one that would be done soonest stays. Of the rest, the
    fastest is the cheapest, and answers. If none is in time, the one that is done soonest answers; if none is accurate
    enough, the most accurate one.

    Args:
        options: what there is to choose from.
        required: registered accuracy, 0..1.
        slack_ms: time left; None without a deadline.
    """
    known = list(options)
    accurate = [each for each in known if round(each.accuracy, DIGITS) >= required]
    if not accurate:
        return max(known, key=lambda each: (each.accuracy, -each.total_ms))
    in_time = [each for each in accurate if slack_ms is None or each.total_ms <= slack_ms]
    if not in_time:
        return min(accurate, key=lambda each: each.total_ms)
    usable = [each for each in in_time if each.resident or not each.local]
    to_load = [each for each in in_time if each.local and not each.resident]
    if to_load and not any(each.local for each in usable):
        usable.append(min(to_load, key=lambda each: each.total_ms))
    return min(usable, key=lambda each: each.latency_ms)


class Worker:
    """The node's own variants: which are resident, and how long each takes. Made and used on one event loop."""

    def __init__(
        self,
        task: str,
        registration: Registration,
        accuracies: Registered,
        edge: ResidentStage,
        waiting_limit: int,
        metrics: EdgeMetrics,
    ) -> None:
        """Start with the edge stage resident, if it is.

        Args:
            task: for metrics.
            registration: what is known of the variants.
            accuracies: what targets ask for.
            edge: the models of the edge stage; those of all other variants share their memory.
            waiting_limit: requests that may wait for a variant to be loaded.
            metrics: where to count.
        """
        self.accuracies = accuracies
        self._registration = registration
        self._task = task
        self._metrics = metrics
        # Measured times as multiples of the profiled ones, for all variants together: what slows one down slows the
        # others down. Separate estimates would make variants that are in use look slower than those that are not.
        self._pace, self._load_pace, self._decode_ms = 1.0, 1.0, 0.0
        self._resident = {
            name: edge if name == registration.edge else edge.beside(each.stage)
            for name, each in registration.variants.items()
        }
        for each in self._resident.values():
            each.serve(metrics, waiting_limit)

    def options(self, queue_ms: float) -> list[Option]:
        """The node's own, with the wait for a worker thread and for loads."""
        variants = self._registration.variants
        coming = [name for name, each in self._resident.items() if each.state == "loading"]
        loading_ms = self._load_pace * sum(variants[name].load_ms for name in coming)
        found: list[Option] = []
        for name, each in variants.items():
            wait_ms = queue_ms
            resident = self._resident[name].state == "ready"
            if not resident:
                wait_ms += loading_ms + (0.0 if name in coming else self._load_pace * each.load_ms)
            serve_ms = self._decode_ms + self._pace * each.infer_ms
            found.append(Option(name, each.accuracy, serve_ms, wait_ms, resident=resident))
        return found

    def remote_options(self, context: ServingContext) -> list[Option]:
        """The datacenter's, if it can be reached: the reference stage, and stages that it runs as registered."""
        datacenter: DatacenterClient | None = context.datacenter
        predicted_ms = None if datacenter is None else datacenter.bound_ms()
        if datacenter is None or predicted_ms is None:
            return []
        found: list[Option] = []
        for name, accuracy in self._registration.remote.items():
            if name == context.best or context.served.serves(name):
                mean_ms = datacenter.mean_ms(name)
                found.append(Option(name, accuracy, mean_ms, max(0.0, predicted_ms - mean_ms), local=False))
        return found

    def accuracy(self, name: str) -> float:
        """As registered, of one of the node's own variants."""
        return self._registration.variants[name].accuracy

    async def infer(self, name: str, context: ServingContext, image: RoutedImage) -> EdgePrediction:
        """A variant's prediction; the wait for its load counts as time in the queue.

        Raises:
            NotReady: if the line for its load is full.
            Overloaded: if the queue is full.
            RequestError: if the image is broken.
        """
        executor, asked = context.executor, context.clock.now()
        models = self._resident[name]
        stage, profiled = models.stage, self._registration.variants[name]
        if models.state != "ready":
            await models.present()
            self._load_pace += GAIN * (models.load_s * 1e3 / profiled.load_ms - self._load_pace)
        with models:
            waited_ms = (context.clock.now() - asked) * 1e3
            # Images that wait for the same variant share a run of it, as under the node's own policy.
            result, queue_ms = await executor.queued(image, executor.job(image, stage), stage)
        if stage.others is None or result.full_ensemble:  # else it is not the work that was profiled
            self._pace += GAIN * (result.infer_ms / profiled.infer_ms - self._pace)
        self._decode_ms += GAIN * (result.decode_ms - self._decode_ms)
        self._metrics.queue_duration.labels(self._task).observe((waited_ms + queue_ms) * 1e-3)
        self._metrics.inference_duration.labels(self._task, name).observe(result.infer_ms * 1e-3)
        return EdgePrediction(result, waited_ms + queue_ms, name)

    async def close(self) -> None:
        """Unload everything."""
        await asyncio.gather(*(each.close() for each in self._resident.values()))


class InfaasHandler(BaselineHandler):
    """Chooses a variant when the request comes, which answers it."""

    def __init__(self, worker: Worker, context: ServingContext, image: RoutedImage) -> None:
        super().__init__(context, image)
        self._worker = worker

    async def answer(self) -> Answer:
        """See `RequestHandler.answer`. If the datacenter fails, the node's best choice answers in its place."""
        chosen = self._choose(self._worker.remote_options(self.context))
        if chosen.local:
            return await self._answered_by(chosen.name)
        reason, self.reference = Reason.TARGET, chosen.name
        if self.falls_back:
            return await self._with_standby(reason)
        self.image = waiting(self.image)
        escalated = await self.escalate(reason, None)
        if escalated is not None:
            return datacenter_answer(self.context, self.image, escalated, reason, None)
        return await self._answered_by(self._choose([]).name, reason)

    async def _with_standby(self, reason: Reason) -> Answer:
        """The datacenter's answer, or just before the deadline that of the node's best choice, which runs meanwhile."""
        name = self._choose([]).name
        running = asyncio.ensure_future(self._worker.infer(name, self.context, self.image))
        try:
            escalated = await self.until_deadline(reason)
            if escalated is not None:
                return datacenter_answer(self.context, self.image, escalated, reason, None)
            return self._edge_answer(name, await running, reason)
        finally:
            await cancelled(running)

    async def _answered_by(self, name: str, reason: Reason | None = None) -> Answer:
        self.image = waiting(self.image)
        return self._edge_answer(name, await self._worker.infer(name, self.context, self.image), reason)

    def _edge_answer(self, name: str, edge: EdgePrediction, reason: Reason | None) -> Answer:
        accuracies = self._worker.accuracies
        below = accuracies.below_target(self._worker.accuracy(name), self.image.request.asked.target)
        return edge_answer(self.context, self.image, edge, reason, below=below)

    def _choose(self, remote: list[Option]) -> Option:
        cutoff, context, pool = self.cutoff, self.context, self.context.executor.pool
        return choose(
            self._worker.options(pool.waiting * pool.service_ms / pool.threads) + remote,
            self._worker.accuracies.required(self.image.request.asked.target),
            None if cutoff is None else cutoff.remaining_ms(context.clock.now()),
        )
