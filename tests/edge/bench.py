"""One node in this process, on a backend that works only when told to, and what drives it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from edge.escalation.client import DatacenterClient
from edge.escalation.image_reducer import ImageReducer
from edge.escalation.transport import Ingress
from edge.factory import NodeComponents, make_context
from edge.inference.decoding_limits import DecodingLimits
from edge.inference.edge_stage import ConditionalEnsemble, EdgeStage, LoadedModel, StagePrediction
from edge.inference.resident_models import ModelMemory
from edge.inference.shared_models import ModelUse
from edge.inference.worker_pool import WorkerPool
from edge.monitoring.certificate_reload import Certification, MakePolicy
from edge.monitoring.evidence_log import EvidenceLog
from edge.monitoring.state_store import StateFile
from edge.monitoring.streams import Streams
from edge.serving.context import EdgeExecutor
from edge.serving.node import EdgeNode
from edge.serving.policy_plugin import LoadedBaseline
from edge.serving.request import ImageRequest
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.cascade.policy import Policy
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.trace_context import start_trace
from hawkvision.core.types import LOGITS, WHOLE, Answer, Pixels, Quality, Received, RequestFields, Tensors
from hawkvision.imaging.decoding_cost import DecodingScales
from hawkvision.imaging.downscale import Reducer
from hawkvision.inference.backends.interface import Backend, Outputs
from hawkvision.models.fingerprints import CertifiedVersions
from hawkvision.models.manifest import InputSpec
from hawkvision.network.response_time import ResponseTimes
from hawkvision.system.memory import divided
from hawkvision.tasks.kind import TaskKind
from tests.edge.peer import Peer
from tests.hawkvision.cascade.synthetic import SHA, make_profile, make_received_profile
from tests.hawkvision.tasks.classes import TEN
from tests.images import encoded
from tests.waiting import until

T = TypeVar("T")
EDGE_CLASS = 3
"""What the edge stage of a bench answers."""
AGREES = [(EDGE_CLASS, 0.99)]
SPEC = InputSpec(height=16, width=16, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
SURE, UNSURE = 20.0, 0.0


class GatedBackend:
    """Ten classes, of which class 3 wins by `lead`, or these tensors of an image. Each inference waits for `gate`."""

    def __init__(self, lead: float, tensors: Tensors | None = None) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.lead = lead
        self.tensors = tensors
        self.begun = self.inferred = 0

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return (16, 16, 3)

    @property
    def outputs(self) -> Outputs:
        if self.tensors is not None:
            return {name: tensor.shape[1:] for name, tensor in self.tensors.items()}
        return {LOGITS: (10,)}

    def infer(self, batch: Pixels) -> Tensors:
        self.begun += 1
        assert self.gate.wait(30)
        self.inferred += 1
        if self.tensors is not None:
            return {name: np.repeat(tensor, len(batch), axis=0) for name, tensor in self.tensors.items()}
        logits = np.zeros((len(batch), 10), np.float32)
        logits[:, 3] = self.lead
        return {LOGITS: logits}

    def close(self) -> None:
        self.gate.set()


class Bench:
    """A node and what drives it."""

    def __init__(self, node: EdgeNode, backend: GatedBackend, clock: MonotonicClock) -> None:
        self.node = node
        self.backend = backend
        self.clock = clock

    def request(
        self,
        hang_up: Callable[[], Awaitable[object]] | None = None,
        body: bytes | None = None,
        received: Received = WHOLE,
        caller: str = "127.0.0.1",
        **fields: Any,
    ) -> ImageRequest:
        asked = RequestFields(**fields)
        return ImageRequest(body or encoded(), asked, self.clock.now(), start_trace(), caller, received, hang_up)

    async def ask(
        self,
        hang_up: Callable[[], Awaitable[object]] | None = None,
        body: bytes | None = None,
        received: Received = WHOLE,
        caller: str = "127.0.0.1",
        **fields: Any,
    ) -> Answer:
        answer = await self.node.infer(self.request(hang_up, body, received, caller, **fields))
        assert answer.escalated == (answer.reason is not None)
        assert answer.degraded == (answer.degraded_reason is not None)
        return answer

    def counted(self, name: str, **labels: str) -> float:
        """A metric's value, 0 before it was first counted."""
        return (
            self.node.metrics.registry.get_sample_value(f"hawkvision_{name}", {"task": self.node.task, **labels}) or 0.0
        )

    async def occupy(self, images: int) -> list[asyncio.Task[Answer]]:
        """Close the gate and queue images with deadlines, at a pace of 200 ms an image."""
        begun = self.backend.begun
        self.backend.gate.clear()
        self.node.pool._queue.admission.interval_s = 0.2
        tasks = [asyncio.create_task(self.ask(target=Quality.FAST, deadline_ms=1e6)) for _ in range(images)]
        await until(lambda: self.backend.begun > begun)  # the worker holds its share, the rest is in line
        return tasks


@asynccontextmanager
async def bench(
    peer: Peer | None,
    lead: float = UNSURE,
    connections: int = 8,
    *,
    intermediate: bool = False,
    audit_share: float = 0.02,
    max_streams: int = 64,
    state_file: Path | None = None,
    transport: Literal["tcp", "datagram"] = "tcp",
    conditions: bool = False,
    config: EdgeConfig | None = None,
    baseline: LoadedBaseline | None = None,
    wide: Backend | None = None,
    use: ModelUse | None = None,
    memory: ModelMemory | None = None,
    pinned: bool = False,
    reducer: Reducer | None = None,
    others: ConditionalEnsemble | None = None,
    max_pixels: int = 1_000_000,
    task: str = "digits",
    kind: TaskKind[Any] = TEN,
    tensors: Tensors | None = None,
    evidence: Callable[[], EvidenceLog] | None = None,
    site: SiteCertificates | None = None,
    wall: Callable[[], float] = time.time,
) -> AsyncIterator[Bench]:
    """The node, under its own policy or a baseline's.

    With `others` its edge stage is a conditional ensemble, which the profile does not mention. Of another `kind` its
    backend gives `tensors`, (1, ...) each.
    """
    clock, metrics = MonotonicClock(), EdgeMetrics()
    backend: Any = GatedBackend(lead, tensors) if use is None else use.begin().backend
    profile = make_received_profile() if conditions else make_profile(intermediate=intermediate)
    settings = msgspec.structs.replace(
        config or EdgeConfig(), task=task, max_pixels=max_pixels, audit_share=audit_share
    )
    make_policy: MakePolicy = Policy if baseline is None else baseline.make_policy
    policy = make_policy(profile, "small", "large", alone=peer is None, site=site)
    score = policy.pair.score if kind is TEN else kind.scores[0]
    loaded = LoadedModel("small", backend, SPEC, wide, use=use)
    stage = EdgeStage("small", loaded, 1.0, score, kind, others, fingerprint=f"{SHA}/int8")
    models = (memory or ModelMemory()).add(task, stage, pinned=pinned)
    limits = DecodingLimits(task, DecodingScales([SPEC], max_pixels, max_pixels), metrics)
    limits.divide(divided(256 * 1024 * 1024, None))
    pool: WorkerPool[StagePrediction] = WorkerPool(1, 64, memory=limits.memory)
    datacenter = None if peer is None else DatacenterClient(
        Ingress(peer.url, connections=connections), kind, clock,
        transport=transport, reducer=ImageReducer(reducer, limits), metrics=metrics.link(task),
    )  # fmt: skip
    file = StateFile(state_file) if state_file else None
    versions = CertifiedVersions({"small": SHA, "medium": SHA, "large": SHA})
    certification = Certification(profile, policy, versions, stage.temperature, policy.pair.score)
    streams = Streams(
        task, max_streams, audit_share, metrics, file, clock, random.Random(1), policy.claims_in_force,
        policy.source.dates, wall,
    )  # fmt: skip
    models.serve(metrics, pool.limit)
    components = NodeComponents(models, certification, "large", 16, Reducer((SPEC,), max_pixels), (SPEC,), baseline)
    executor = EdgeExecutor(task, models, pool, limits, clock, metrics, max_pixels)
    kept = None if evidence is None else evidence()
    context = make_context(settings, components, executor, datacenter, streams, clock, metrics, kept)
    node = EdgeNode(context, streams, None if baseline is None else baseline.open(policy, models, metrics))
    try:
        yield Bench(node, backend, clock)
    finally:
        backend.gate.set()
        await node.close()


def misses(times: ResponseTimes, waited_ms: float, now: float, number: int = 3) -> None:
    """So many escalations, two seconds apart and the last of them at `now`, got no reply in time."""
    for each in range(number):
        at = now - 2.0 * (number - 1 - each)
        times.given_up(times.sent(at - waited_ms * 1e-3), waited_ms, at)


def hardly_ever_later_than(times: ResponseTimes, early_ms: float, now: float) -> None:
    """One of the last escalations in four came after `early_ms`, and the others not within a minute."""
    for sent in range(-16, 0):
        for _ in range(3):
            times.given_up(times.sent(now + sent), 60_000.0, now)
        times.answered(times.sent(now + sent), early_ms, now)


def run(scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(scenario())


async def known(node: EdgeNode) -> None:
    """Until the node knows what the datacenter runs."""
    await until(lambda: node.context.served.listed)


async def many(it: Bench, requests: int, **fields: Any) -> list[Answer]:
    """Asked four at a time, so that there is room for audits."""
    answers: list[Answer] = []
    while len(answers) < requests:
        answers += await asyncio.gather(*(it.ask(**fields) for _ in range(4)))
    return answers


def audits(it: Bench, *outcomes: str) -> float:
    return sum(it.counted("audits_total", outcome=outcome) for outcome in outcomes)


def outcomes(it: Bench) -> int:
    """Audited outcomes in all logs."""
    return sum(log.audits for stream in it.node.streams.monitor.all() for log in stream.state.logs.values())
