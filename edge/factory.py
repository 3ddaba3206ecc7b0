"""Makes the nodes of all tasks from their configuration: models, certificates, policy, workers and the datacenter.

`load_tasks` reads files and belongs on a thread. `open_tasks` makes of them warm nodes on an event loop, which share an
`Environment`. A task that cannot be served takes no other down.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from edge.inference.decoding_limits import DecodingLimits
from edge.inference.edge_stage import EdgeStage, StagePrediction, check_stage
from edge.inference.job_queue import MAX_BATCH
from edge.inference.resident_models import ModelMemory, ResidentStage
from edge.inference.shared_models import settled_bytes
from edge.inference.stage_loader import StageLoader
from edge.inference.warm_up import run_samples, warm_up
from edge.inference.worker_pool import WorkerPool
from edge.monitoring.audits import Auditor
from edge.monitoring.certificate_reload import Certification, load_certification, stage_of
from edge.monitoring.evidence_log import DAY_S, EvidenceLog
from edge.monitoring.review import AuditReview
from edge.monitoring.served_versions import ServedVersions
from edge.monitoring.state_opening import open_evidence, open_state
from edge.monitoring.streams import Streams
from edge.serving.context import EdgeExecutor, ServingContext
from edge.serving.guarantees import Guarantees
from edge.serving.node import EdgeNode
from edge.serving.policy_plugin import LoadedBaseline, find_baseline
from edge.serving.recent_answers import RecentAnswers
from edge.serving.tasks import Entry, ServedTasks, TaskFailure
from hawkvision.cascade.cutoff import Cutoffs
from hawkvision.core.clock import Clock
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.package_settings import HAWKVISION
from hawkvision.imaging.decoding_cost import DecodingScales
from hawkvision.imaging.downscale import Reducer, useful_side
from hawkvision.inference.adaptive_parallelism import divides, usable_cores
from hawkvision.inference.backend_registry import backend_name
from hawkvision.inference.int8.backend import Int8Backend
from hawkvision.models.manifest import InputSpec, cache_dir, load_manifest, models_dir
from hawkvision.system.memory import divided
from hawkvision.tasks.registry import load_kind
from hawkvision.transport.settings import DatagramSettings

if TYPE_CHECKING:
    from edge.escalation.client import DatacenterClient

log = logging.getLogger("hawkvision.edge")

DATACENTER_CONNECTIONS: Final = 32
"""HTTP connections to the datacenter; further escalations wait for a free one."""
DATACENTER_TIMEOUT_S: Final = 10.0
"""Longest wait for the datacenter, for requests without a deadline."""


@dataclass(frozen=True, slots=True)
class NodeComponents:
    """The parts of a node that come from files."""

    models: ResidentStage
    """Those of the edge stage."""
    certification: Certification
    best: str
    """The reference stage."""
    useful_side: int
    """Pixels of an image's shorter side that the most demanding stage uses."""
    reducer: Reducer
    """Makes images as small as the datacenter's models use them."""
    inputs: tuple[InputSpec, ...]
    """Inputs of the models that may run on an image here."""
    baseline: LoadedBaseline | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """What the nodes of all tasks share."""

    metrics: EdgeMetrics
    clock: Clock
    tasks: int = 1
    """Number of nodes that share the memory of this process."""
    datacenter_tls: ssl.SSLContext | None = None
    """For connections to the datacenter; None trusts the system's authorities."""


def load_components(
    config: EdgeConfig, given_up: Future[None] | None = None, memory: ModelMemory | None = None
) -> NodeComponents:
    """Load the edge stage, its policy and its certificates.

    Args:
        config: the node's settings.
        given_up: ends the waiting for a device when it is done.
        memory: for the models of all tasks of this process; None is for this one alone.

    Raises:
        ConfigError: if the models do not fit into memory.
        HawkVisionError: if a manifest, profile, certificate or model file is missing, corrupt or for another model.
    """
    models, cache = models_dir(config.models_dir, config.task), cache_dir(config.cache_dir)
    manifest = load_manifest(config.task, models)
    name = stage_of(config, manifest)
    kind = load_kind(manifest, models)
    memory = memory or ModelMemory(config.model_memory_bytes)
    loader = StageLoader(config, manifest, kind, cache, given_up, memory.shared)
    baseline = None
    if config.policy != HAWKVISION:
        baseline = find_baseline(config.policy)(config, manifest, cache, name, loader.load_warm)
    found = load_certification(config, manifest, None if baseline is None else baseline.make_policy)
    if config.backend != "noop":
        for known in found.profile.stages:
            if known.name in (name, manifest.members(name)[0].name):
                check_stage(known, manifest, f"profile of {config.task!r}")
    began = time.monotonic()
    stage = loader.load(name, found.temperature, found.score)
    load_s = time.monotonic() - began
    intermediate = found.policy.pair.intermediate
    stages = [name, manifest.best] if intermediate is None else [name, manifest.best, intermediate.name]
    inputs = [member.input for each in stages for member in manifest.members(each)]
    shrinks = found.profile.shrinks_images
    reducer = Reducer(manifest.datacenter_inputs, config.max_pixels, whole=kind.located, shrinks=shrinks)
    edge_inputs = None if baseline is None else baseline.inputs
    if edge_inputs is None:
        edge_inputs = tuple(member.input for member in manifest.members(name))
    resident = memory.add(config.task, stage, load_s, pinned=config.task in config.pinned_tasks)
    return NodeComponents(resident, found, manifest.best, useful_side(inputs), reducer, edge_inputs, baseline)


async def open_node(config: EdgeConfig, components: NodeComponents, shared: Environment) -> EdgeNode:
    """A warm node on the running event loop. What was opened is closed if it fails.

    Args:
        config: its settings.
        components: what was loaded for them; closed with the node.
        shared: with the nodes of other tasks.

    Raises:
        HawkVisionError: if the backend cannot run the model.
        ConfigError: if the state file is another node's or of another kind.
    """
    models, policy = components.models, components.certification.policy
    metrics, clock = shared.metrics, shared.clock
    async with AsyncExitStack() as opened:
        opened.push_async_callback(models.close)
        _describe_backends(config, models.stage, metrics)
        state = open_state(config, metrics)  # this loop's thread reads it, so it is opened here
        if state is not None:
            opened.callback(state.close)
        workers = config.workers or usable_cores() + waiting_workers(config)
        scales = DecodingScales(components.inputs, config.max_pixels, config.max_pixels_whole)
        limits = DecodingLimits(config.task, scales, metrics)
        datacenter = _datacenter_client(config, components, shared, limits)
        if datacenter is not None:
            opened.push_async_callback(datacenter.close)
        pool = await _warm_pool(config, models, limits, workers, shared, opened)
        models.serve(metrics, pool.limit)
        parts = divided(config.memory_bytes, config.request_memory_bytes, shared.tasks)
        limits.divide(parts)
        log.info("%s: %d MB for bodies and decoding, by %s", config.task, parts.total // 1_000_000, parts.basis)
        draws = random.Random()  # noqa: S311 - nobody gains by guessing them before an answer is given
        streams = Streams(
            config.task,
            config.max_streams,
            config.audit_share,
            metrics,
            state,
            clock,
            draws,
            policy.claims_in_force,
            policy.source.dates,
        )
        executor = EdgeExecutor(config.task, models, pool, limits, clock, metrics, config.max_pixels)
        baseline = components.baseline
        evidence = None
        if baseline is None and datacenter is not None:  # else there is nothing to certify, or to compare with
            evidence = open_evidence(config, state, metrics)
            opened.push_async_callback(evidence.close)
        context = make_context(config, components, executor, datacenter, streams, clock, metrics, evidence)
        node = EdgeNode(
            context, streams, None if baseline is None else baseline.open(policy, models, metrics),
            make_reviewer(config, context),
            RecentAnswers(clock.now(), config.review_max_bytes, config.review_max_days * DAY_S),
        )  # fmt: skip
        opened.pop_all()  # the node closes them from here on
    return node


def make_context(
    config: EdgeConfig,
    components: NodeComponents,
    executor: EdgeExecutor,
    datacenter: DatacenterClient | None,
    streams: Streams,
    clock: Clock,
    metrics: EdgeMetrics,
    evidence: EvidenceLog | None = None,
) -> ServingContext:
    """What requests share.

    Args:
        config: the node's settings.
        components: what was loaded for them.
        executor: runs the edge stage.
        datacenter: the connection to the datacenter, if there is one.
        streams: of the callers.
        clock: for deadlines and timings.
        metrics: where to count.
        evidence: where audits are kept; closed with the auditor.
    """
    certification, best = components.certification, components.best
    policy, intermediate = certification.policy, certification.policy.pair.intermediate
    url = None if datacenter is None else datacenter.url
    max_age_s = config.certificate_max_age_days * 86_400.0
    served = ServedVersions(url, certification.versions, best, None if intermediate is None else intermediate.name)
    stage = components.models.stage
    guarantees = Guarantees(stage, certification.profile, policy, best, served, streams, max_age_s)
    auditor = Auditor(
        config.task, stage.kind, best, datacenter, metrics, streams.monitor, DATACENTER_TIMEOUT_S,
        partial(served.serves, best), served.certified, stage.name, evidence, guarantees.versions,
    )  # fmt: skip
    return ServingContext(
        task=config.task,
        clock=clock,
        metrics=metrics,
        executor=executor,
        datacenter=datacenter,
        datacenter_timeout_s=DATACENTER_TIMEOUT_S,
        uplink_metered=config.uplink_metered,
        cutoffs=Cutoffs(),
        guarantees=guarantees,
        auditor=auditor,
    )


def make_reviewer(config: EdgeConfig, context: ServingContext) -> AuditReview | None:
    """The review of a node's audits; None if it keeps none."""
    evidence, guarantees = context.auditor.evidence, context.guarantees
    if evidence is None:
        return None
    return AuditReview(
        config.task,
        context.kind,
        evidence,
        guarantees.pair,
        guarantees.versions,
        config.certificates,
        context.clock,
        guarantees.executions,
        guarantees.alarm_raised,
    )


def _describe_backends(config: EdgeConfig, stage: EdgeStage, metrics: EdgeMetrics) -> None:
    metrics.watch(stage.first.backend)
    backends = ",".join(dict.fromkeys(backend_name(config.backend, model.backend) for model in stage.models))
    metrics.describe(config.task, backends)
    log.info("%s, stage %s: backend %s", config.task, stage.name, backends)


def _datacenter_client(
    config: EdgeConfig, components: NodeComponents, shared: Environment, limits: DecodingLimits
) -> DatacenterClient | None:
    if not config.datacenter_url:
        return None
    # Imported here with an HTTP client, which a node without a datacenter needs not.
    from edge.escalation.client import DatacenterClient
    from edge.escalation.image_reducer import ImageReducer
    from edge.escalation.transport import Ingress
    from hawkvision.transport.congestion.registry import controller_class

    key, tls = config.datacenter_api_key, shared.datacenter_tls
    return DatacenterClient(
        Ingress(config.datacenter_url, key, DATACENTER_CONNECTIONS, tls),
        components.models.stage.kind,
        shared.clock,
        transport=config.datacenter_transport,
        min_on_time_probability=config.min_on_time_probability,
        reducer=ImageReducer(components.reducer, limits),
        metrics=shared.metrics.link(config.task),
        congestion=controller_class(config.feature(DatagramSettings).congestion_control),
    )


async def _warm_pool(
    config: EdgeConfig,
    models: ResidentStage,
    limits: DecodingLimits,
    workers: int,
    shared: Environment,
    opened: AsyncExitStack,
) -> WorkerPool[StagePrediction]:
    """The worker pool, each of whose workers has run each model; `opened` closes it.

    What the models take for that counts, and they may have to leave again.
    """
    stage = models.stage
    await asyncio.to_thread(stage.open)
    # Our own kernels run images one by one anyway.
    together = 1 if isinstance(stage.first.backend, Int8Backend) else MAX_BATCH
    pool: WorkerPool[StagePrediction] = WorkerPool(workers, config.max_queue, together, limits.memory)
    opened.push_async_callback(asyncio.to_thread, pool.close)
    for model in stage.models:
        before = settled_bytes()
        await asyncio.gather(*(pool.submit(partial(warm_up, model.backend, together)) for _ in range(workers)))
        if together > 1:  # what a batch takes is kept
            models.grown(model, settled_bytes() - before)
    if divides(config.backend, config.onnx_providers):
        # One worker is enough here: the models are warm on all of them, and decoders are not per thread.
        await pool.submit(partial(run_samples, stage, config.max_pixels, shared.clock))
    await asyncio.to_thread(models.settle)
    return pool


def waiting_workers(config: EdgeConfig) -> int:
    """Workers beside one per core: those that only wait for a device."""
    if config.backend != "fpga-offload":
        return 0
    from fpga.backends.offload import PLACES

    return PLACES


# ------------------------------------------------------------------------------------------- the nodes of all tasks

Loaded = NodeComponents | TaskFailure


def load_tasks(configs: Mapping[str, EdgeConfig], given_up: Future[None] | None = None) -> dict[str, Loaded]:
    """Load the components of each task, pinned ones first; `given_up` ends the waiting for a device.

    Raises:
        HawkVisionError: if no task can be loaded; the error of the first.
    """
    loaded: dict[str, Loaded] = {}
    failed: list[Exception] = []
    memory = ModelMemory(next(iter(configs.values())).model_memory_bytes)
    for task, config in sorted(configs.items(), key=lambda each: each[0] not in each[1].pinned_tasks):
        try:
            loaded[task] = load_components(config, given_up, memory)
        except Exception as error:
            if len(configs) == 1:
                raise
            failed.append(error)
            loaded[task] = _failure(config, error)
    if len(failed) == len(configs):
        raise failed[0]
    return loaded


async def open_tasks(
    configs: Mapping[str, EdgeConfig], loaded: Mapping[str, Loaded], shared: Environment
) -> ServedTasks:
    """The tasks on the running event loop, with warm nodes.

    Raises:
        HawkVisionError: if no task can be opened; the error of the first.
    """
    entries: dict[str, Entry] = {}
    failed: list[Exception] = []
    for task, found in loaded.items():
        if isinstance(found, TaskFailure):
            entries[task] = found
            continue
        try:
            entries[task] = await open_node(configs[task], found, shared)
        except Exception as error:
            if len(configs) == 1:
                raise
            failed.append(error)
            entries[task] = _failure(configs[task], error)
    tasks = ServedTasks([entries[task] for task in configs])
    if not tasks.nodes:
        raise failed[0]
    for node in tasks.nodes:
        node.pool.beside = tuple(other.pool for other in tasks.nodes if other is not node)
    return tasks


async def close_tasks(tasks: ServedTasks) -> None:
    """Close all nodes; a node that fails to close does not keep the others open."""
    ended = await asyncio.gather(*(node.close() for node in tasks.nodes), return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException):
            raise error


def _failure(config: EdgeConfig, error: Exception) -> TaskFailure:
    """The record of a failed task, which is logged."""
    task = config.task
    try:
        kind: str | None = load_manifest(task, models_dir(config.models_dir, task)).kind
    except HawkVisionError:
        kind = None
    if isinstance(error, HawkVisionError):
        log.error("task %s cannot be served: %s", task, error.message)
        return TaskFailure(task, error.message, kind)
    log.error("task %s cannot be served", task, exc_info=error)
    return TaskFailure(task, f"{type(error).__name__} while it was loaded; the log of the node says more", kind)
