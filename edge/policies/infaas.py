"""INFaaS on an edge node: the cheapest variant whose registered accuracy and latency do, loaded on demand.

After Romero, Li, Yadwadkar and Kozyrakis, "INFaaS: Automated Model-less Inference Serving", USENIX ATC 2021, and its
published source (`queryfe_server.cc`, the search by accuracy and latency). The node is one worker, for every variant
whose file is built here; the datacenter is another, for the stages of its cascade. `edge/POLICIES.md` says what is left
out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from edge.inference.edge_stage import EdgeResult, Look, Looked, Stage
from edge.inference.worker_pool import WorkerPool
from edge.policies.baseline import FallbackCall, ended
from edge.policies.registration import Registration
from edge.policies.residency import Residency
from edge.policies.routes import DIGITS, Registered
from edge.serving.request_handler import Call
from edge.serving.response import from_datacenter, from_edge
from hawkvision.cascade.decision import ANSWER_MARGIN_MS
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import Answer, OnMiss, Reason

if TYPE_CHECKING:
    from edge.serving.node import EdgeNode

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

    Accuracy comes before latency, as in the source. Among those that meet both, variants that would have to be loaded
    give way to those on the same worker that are resident; if none is, the one that is loaded and done soonest stands
    for them. Then the fastest is the cheapest. If none is in time, the one that is done soonest; if none is accurate
    enough, the most accurate.

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
        first: Stage,
        waiting_limit: int,
        metrics: EdgeMetrics,
    ) -> None:
        """Start with one variant resident.

        Args:
            task: for metrics.
            registration: what is known of the variants.
            accuracies: what targets ask for.
            first: the variant that is loaded already.
            waiting_limit: requests that may wait for models to be loaded.
            metrics: where to count.
        """
        self.accuracies = accuracies
        self._registration = registration
        self._task = task
        self._metrics = metrics
        # One pace for all variants, as multiples of what was profiled: what slows one slows the others. With a smoothed
        # time for each, those in use looked slow while the machine was busy and those never used did not, so that
        # one after the other was loaded.
        self._pace, self._load_pace, self._decode_ms = 1.0, 1.0, 0.0
        sizes = {name: each.size for name, each in registration.variants.items()}
        self.residency = Residency(registration.load, sizes, registration.limit, first, waiting_limit, self._loaded)

    def options(self, queue_ms: float) -> list[Option]:
        """The node's own, with the wait for a worker thread and for loads."""
        variants = self._registration.variants
        coming = self.residency.coming
        loaded = frozenset(self.residency.loaded)
        loading_ms = self._load_pace * sum(variants[name].load_ms for name in coming)
        found: list[Option] = []
        for name, each in variants.items():
            wait_ms = queue_ms
            if name not in loaded:
                wait_ms += loading_ms + (0.0 if name in coming else self._load_pace * each.load_ms)
            serve_ms = self._decode_ms + self._pace * each.infer_ms
            found.append(Option(name, each.accuracy, serve_ms, wait_ms, resident=name in loaded))
        return found

    def elsewhere(self, node: EdgeNode) -> list[Option]:
        """The datacenter's stages, if it can be reached: the best, and what else it is known to run as registered."""
        uplink = node.uplink
        predicted_ms = None if uplink is None else uplink.bound_ms()
        if uplink is None or predicted_ms is None:
            return []
        found: list[Option] = []
        for name, accuracy in self._registration.remote.items():
            if name == node.best or node.serves(name):
                mean_ms = uplink.mean_ms(name)
                found.append(Option(name, accuracy, mean_ms, max(0.0, predicted_ms - mean_ms), local=False))
        return found

    def accuracy(self, name: str) -> float:
        """As registered, of one of the node's own variants."""
        return self._registration.variants[name].accuracy

    async def look(self, name: str, call: Call) -> Looked:
        """What a variant says of a request's image, loaded first if need be; that wait counts as the queue's.

        Raises:
            Overloaded: if the queue, or the line for loads, is full.
            RequestError: if the image is broken.
        """
        node = call.node
        pool: WorkerPool[EdgeResult] = node.pool
        asked = node.clock.now()
        async with self.residency.held(name) as stage:
            waited_ms = (node.clock.now() - asked) * 1e3
            look = Look(
                stage, call.body, call.header, call.request.top_k, node.max_pixels, node.clock, alone=pool.alone,
                rates=node.admission.rates, cost=call.cost,
            )  # fmt: skip
            # Images that wait for the same variant share a run of it, as the node's own policy's do.
            result, queue_ms = await node.queued(call, look, stage)
        if stage.others is None or result.again:  # else it is not the work that was profiled
            infer_ms = self._registration.variants[name].infer_ms
            self._pace += GAIN * (result.infer_ms / infer_ms - self._pace)
        self._decode_ms += GAIN * (result.decode_ms - self._decode_ms)
        self._metrics.queue_duration.labels(self._task).observe((waited_ms + queue_ms) * 1e-3)
        self._metrics.inference_duration.labels(self._task, name).observe(result.infer_ms * 1e-3)
        return Looked(result, waited_ms + queue_ms, name)

    async def close(self) -> None:
        """Unload everything."""
        await self.residency.close()

    def _loaded(self, name: str, load_ms: float) -> None:
        self._load_pace += GAIN * (load_ms / self._registration.variants[name].load_ms - self._load_pace)
        self._metrics.model_loads.labels(self._task, name).inc()


class InfaasCall(FallbackCall):
    """One request, answered by the variant that is chosen when it comes."""

    def __init__(self, worker: Worker, with_fallback: bool, *request: Any) -> None:
        super().__init__(*request)
        self._worker = worker
        self._with_fallback = with_fallback

    @property
    def falls_back(self) -> bool:
        """See `FallbackCall`."""
        return self._with_fallback and super().falls_back

    async def answer(self) -> Answer:
        """See `Call.answer`. Where the datacenter fails, the node's best choice answers in its place."""
        chosen = self._choose(self._worker.elsewhere(self.node))
        if chosen.local:
            return await self._answered_by(chosen.name)
        reason, self.asked_stage = Reason.TARGET, chosen.name
        if self.falls_back:
            return await self._with_standby(reason)
        self.request = replace(self.request, on_miss=OnMiss.WAIT)
        escalated = await self._escalate(reason, None)
        if escalated is not None:
            return from_datacenter(self, escalated, reason, None)
        return await self._answered_by(self._choose([]).name, reason)

    async def _with_standby(self, reason: Reason) -> Answer:
        """The datacenter's answer, or just before the deadline that of the node's best choice, made meanwhile."""
        name = self._choose([]).name
        looking = asyncio.ensure_future(self._worker.look(name, self))
        try:
            escalated = await self.until_deadline(reason)
            if escalated is not None:
                return from_datacenter(self, escalated, reason, None)
            return self._said(name, await looking, reason)
        finally:
            await ended(looking)

    async def _answered_by(self, name: str, reason: Reason | None = None) -> Answer:
        self.request = replace(self.request, on_miss=OnMiss.WAIT)
        return self._said(name, await self._worker.look(name, self), reason)

    def _said(self, name: str, edge: Looked, reason: Reason | None) -> Answer:
        accuracies = self._worker.accuracies
        short = accuracies.missed_by(self._worker.accuracy(name), self.request.target)
        return from_edge(self, edge, degraded=short, reason=reason)

    def _choose(self, elsewhere: list[Option]) -> Option:
        slack_ms = self.slack_ms()
        return choose(
            self._worker.options(self.node.pool.predicted_wait_ms()) + elsewhere,
            self._worker.accuracies.required(self.request.target),
            None if slack_ms is None else slack_ms - ANSWER_MARGIN_MS,
        )
