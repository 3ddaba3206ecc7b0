"""A node from its configuration: models, certificates, policy, workers and the way to the datacenter, put together.

`load_parts` reads files and belongs on a thread; `open_node` makes of it what runs on an event loop, and warms it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import ssl
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from edge.escalation.client import Uplink
from edge.inference.edge_stage import EdgeResult, Look, Model, Others, Stage, check_stage
from edge.inference.warm_up import look_at_samples
from edge.inference.worker_pool import MAX_TOGETHER, WorkerPool
from edge.monitoring.audits import Auditor
from edge.monitoring.certification import Certification, load_certification, stage_of
from edge.monitoring.state_store import StateError, StateFile
from edge.monitoring.streams import DEFAULT_STREAM, ROWS_PER_STREAM, Streams
from edge.policies.registration import Registration, register
from edge.policies.selection import open_baseline, rule_of
from edge.serving.admission import Admission
from edge.serving.node import EdgeNode
from hawkvision.cascade.scores import Ranking, most_probable
from hawkvision.core.clock import Clock, MonotonicClock
from hawkvision.core.errors import ConfigError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig, default_state_file
from hawkvision.core.types import Score
from hawkvision.imaging.decoding_cost import DecodingRates, DecodingScales
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.preprocessing import least_side
from hawkvision.inference.adaptive_parallelism import divides, open_wide, usable_cores
from hawkvision.inference.backend_registry import backend_name, execution_of, open_backend
from hawkvision.inference.backends.interface import Backend
from hawkvision.inference.int8 import ranking
from hawkvision.inference.int8.backend import Int8Backend
from hawkvision.inference.large_pages import take_large_pages
from hawkvision.models.artifacts import load_variant
from hawkvision.models.fingerprints import BETWEEN, VariantRun, stage_fingerprint, statement
from hawkvision.models.manifest import InputSpec, Manifest, Variant, cache_dir, load_labels, load_manifest, models_dir
from hawkvision.system.memory import divided, give_back_at_once
from hawkvision.transport.congestion.registry import controller_class
from hawkvision.transport.settings import DatagramSettings

log = logging.getLogger("hawkvision.edge")

BRIEF_PIXELS: Final = 2**20
"""Of this size a JPEG takes 5 ms to decode, a WebP 16, a PNG 18 (one photograph, a Xeon)."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a node is made of, as far as it comes from files."""

    stage: Stage
    certification: Certification
    labels: tuple[str, ...]
    best: str
    useful_side: int
    """Pixels of an image's shorter side of which the most demanding of these stages makes use."""
    reducer: Reducer
    """Makes images as small as the datacenter looks at them."""
    inputs: tuple[InputSpec, ...]
    """Of the models that look at one image here."""
    registration: Registration | None = None
    """What `infaas` knows of all variants."""


def load_parts(config: EdgeConfig, given_up: Future[None] | None = None) -> Loaded:
    """Load the edge stage, its policy and what its certificates are about; `given_up` ends the waiting for a device.

    Raises:
        HawkVisionError: if a manifest, profile, certificate or model file is missing, corrupt or for another model.
    """
    models, cache = models_dir(config.models_dir), cache_dir(config.cache_dir)
    manifest = load_manifest(config.task, models)
    name = stage_of(config, manifest)
    first = manifest.members(name)[0].name
    registration = None
    if config.policy == "infaas":
        registration = register(config, manifest, cache, name, partial(_load_warm, config, manifest, cache))
    found = load_certification(config, manifest, rule_of(config, registration))
    if config.backend != "noop":
        for known in found.profile.stages:
            if known.name in (name, first):
                check_stage(known, manifest, f"profile of {config.task!r}")
    stage = _load_stage(config, manifest, cache, name, found.temperature, found.score, given_up)
    intermediate = found.policy.pair.intermediate
    asked = [manifest.best] if intermediate is None else [manifest.best, intermediate.name]
    inputs = [member.input for each in (name, *asked) for member in manifest.members(each)]
    useful_side = max(math.ceil(max(each.height, each.width) / each.crop_fraction) for each in inputs)
    reducer = Reducer(manifest.datacenter_inputs, config.max_pixels)
    looking = tuple(member.input for member in manifest.members(name))
    if registration is not None:
        looking = (max((each.input for each in manifest.variants), key=least_side),)
    labels = load_labels(manifest, models)
    return Loaded(stage, found, labels, manifest.best, useful_side, reducer, looking, registration)


def _load_stage(
    config: EdgeConfig,
    manifest: Manifest,
    cache: Path,
    name: str,
    temperature: float,
    score: Score,
    given_up: Future[None] | None,
    *,
    known: bool = False,
) -> Stage:
    """The edge stage with all its models; `temperature` and `score` are the profile's. `known`: see `open_wide`."""
    models: list[Model] = []
    for variant in manifest.members(name):
        backend = _open(config, manifest, cache, variant, given_up)
        models.append(
            Model(
                variant.name, backend, variant.input, _open_wide(config, manifest, cache, variant, backend, known=known)
            )
        )
    others, ensemble = None, manifest.ensemble(name)
    if ensemble is not None:
        assert ensemble.accept_confidence is not None, "no other ensemble is taken for an edge stage"
        temperatures = tuple(variant.temperature for variant in manifest.members(name))
        others = Others(tuple(models[1:]), temperatures, ensemble.temperature, ensemble.accept_confidence)
    runs = [
        VariantRun(variant.name, None if config.backend == "noop" else variant.sha256, variant.input,
                   variant.temperature, _executions(config, model))
        for variant, model in zip(manifest.members(name), models, strict=True)
    ]  # fmt: skip
    stated, members = statement(runs), tuple(run.name for run in runs)
    return Stage(
        name,
        models[0],
        temperature,
        score,
        others,
        _ranking(models[0].backend),
        stage_fingerprint(
            stated,
            members,
            temperature=1.0 if ensemble is None else ensemble.temperature,
            accept_confidence=None if ensemble is None else ensemble.accept_confidence,
        ),
        stage_fingerprint(stated, members[:1]),
    )


def _executions(config: EdgeConfig, model: Model) -> str:
    """What runs a loaded model; `load_variant` has verified that its bytes have the manifest's hash."""
    both = [model.backend] if model.wide is None else [model.backend, model.wide]
    return BETWEEN.join(dict.fromkeys(execution_of(config.backend, each) for each in both))


def _ranking(backend: Backend) -> Ranking:
    """What finds a model's most probable classes: its kernels' library, where it has one."""
    return ranking.most_probable if isinstance(backend, Int8Backend) else most_probable


def _open(
    config: EdgeConfig,
    manifest: Manifest,
    cache: Path,
    variant: Variant,
    given_up: Future[None] | None = None,
    threads: int = 1,
) -> Backend:
    """A variant's backend, of verified bytes; `threads` work on one image.

    Raises:
        ArtifactError, BackendError: if there is none.
        CompileError: if it is for FPGAs, and the variant or the build is not.
    """
    kind = config.backend
    if kind == "fpga-ref" or kind == "fpga-sim" or kind == "fpga-device" or kind == "fpga-offload":
        from fpga.node_backend import open_node_backend
        from fpga.settings import FpgaSettings

        model, settings = load_variant(cache, config.task, variant), config.feature(FpgaSettings)
        return open_node_backend(kind, model, settings, cache, usable_cores(), MonotonicClock(), given_up)
    return open_backend(
        kind,
        b"" if kind == "noop" else load_variant(cache, config.task, variant),
        variant.input,
        manifest.classes,
        providers=config.onnx_providers,
        threads=threads,
    )


def _open_wide(
    config: EdgeConfig, manifest: Manifest, cache: Path, variant: Variant, narrow: Backend, *, known: bool = False
) -> Backend | None:
    if not divides(config.backend, config.onnx_providers):
        return None
    wanted = config.intra_op_threads
    return open_wide(
        narrow, lambda threads: _open(config, manifest, cache, variant, threads=threads), wanted, known=known
    )


def _load_warm(config: EdgeConfig, manifest: Manifest, cache: Path, name: str) -> Stage:
    """A variant or conditional ensemble as the manifest has it, ready for its first image."""
    temperature = 1.0 if manifest.ensemble(name) is not None else manifest.variant(name).temperature
    stage = _load_stage(config, manifest, cache, name, temperature, Score.TOP1, None, known=True)
    for model in stage.models:
        for each in (model.backend, model.wide):
            if each is not None:
                warm_up(each)
    return stage


async def open_node(
    config: EdgeConfig, loaded: Loaded, metrics: EdgeMetrics, clock: Clock, dc_tls: ssl.SSLContext | None = None
) -> EdgeNode:
    """A node, warm. `dc_tls` is for connections to the datacenter; None trusts whom the system trusts.

    Raises:
        HawkVisionError: if the backend cannot run the model.
        ConfigError: if the state file is another node's or of another kind.
    """
    stage, best = loaded.stage, loaded.best
    give_back_at_once()
    metrics.watch(stage.first.backend)
    backends = ",".join(dict.fromkeys(backend_name(config.backend, model.backend) for model in stage.models))
    metrics.describe(config.task, backends)
    log.info("%s, stage %s: backend %s", config.task, stage.name, backends)
    # Read by this thread's loop, so opened by it.
    limit = config.max_streams
    state = _open_state(config, metrics)
    workers = config.workers or usable_cores() + waiting_workers(config)
    rates = await asyncio.to_thread(DecodingRates)
    scales = DecodingScales(loaded.inputs, rates, config.max_pixels, config.max_pixels_whole)
    admission = Admission(scales, rates, metrics, workers, config.decode_limit_s)
    congestion = controller_class(config.feature(DatagramSettings).congestion_control)
    uplink = (
        Uplink(
            config.datacenter_url,
            config.datacenter_api_key,
            config.datacenter_connections,
            len(loaded.labels),
            clock,
            transport=config.datacenter_transport,
            min_on_time_probability=config.min_on_time_probability,
            reducer=loaded.reducer,
            metrics=metrics,
            admission=admission,
            tls=dc_tls,
            congestion=congestion,
        )
        if config.datacenter_url
        else None
    )
    # Our own kernels run images one by one anyway.
    together = 1 if isinstance(stage.first.backend, Int8Backend) else MAX_TOGETHER
    pool: WorkerPool[EdgeResult] = WorkerPool(
        workers, config.max_queue, on_loop(config, uplink), most_together=together, memory=admission.memory
    )
    for model in stage.models:
        await asyncio.gather(*(pool.submit(partial(warm_up, model.backend, together)) for _ in range(workers)))
    if divides(config.backend, config.onnx_providers):
        looking = partial(look_at_samples, stage, config.max_pixels, clock)
        await pool.submit(
            partial(_looked, looking)
        )  # by one worker: models are warm on all, and decoders know no threads
        await asyncio.to_thread(take_large_pages)
    parts = divided(config.memory_bytes, config.request_memory_bytes)
    admission.divide(parts)
    log.info("memory for bodies and decoding: %d MB, by %s", parts.total // 1_000_000, parts.basis)
    return EdgeNode(
        task=config.task,
        labels=loaded.labels,
        stage=stage,
        best=best,
        policy=loaded.certification.policy,
        versions=loaded.certification.versions,
        source=loaded.certification.source,
        pool=pool,
        uplink=uplink,
        clock=clock,
        metrics=metrics,
        max_pixels=config.max_pixels,
        admission=admission,
        datacenter_timeout_s=config.datacenter_timeout_s,
        streams=Streams(config.task, limit, config.audit_share, metrics, state, loaded.certification.policy.profiles),
        auditor=Auditor(
            config.task,
            best,
            uplink,
            metrics,
            random.Random(),  # noqa: S311
            config.datacenter_timeout_s,
            config.audit_share,
        ),
        baseline=open_baseline(config, loaded.registration, loaded.certification.policy, stage, metrics),
    )


def _open_state(config: EdgeConfig, metrics: EdgeMetrics) -> StateFile | None:
    """The state file; None if none is wanted, or it is worn out: a node that forgets serves, one that ends does not.

    Raises:
        ConfigError: if it is another node's or of another kind.
    """
    path = config.state_file
    if path is None:
        path = _made_state_file(config)
        if path is None:
            return None
    kept, failures = metrics.state_kept.labels(config.task), metrics.state_failures.labels(config.task, "open")
    kept.set(0)
    try:
        state = StateFile(path, ROWS_PER_STREAM * config.max_streams, DEFAULT_STREAM)
    except (StateError, ConfigError) as error:
        if config.state_file is not None and isinstance(error, ConfigError):
            raise
        failures.inc()
        log.error(
            "serving without what was known of streams, and forgetting what is learnt at the next stop: %s", error
        )
        return None
    if state.unwritable is None:
        kept.set(1)
    else:
        failures.inc()
        log.error("state_file %s: read, but nothing more is kept there: %s", path, state.unwritable)
    return state


def _made_state_file(config: EdgeConfig) -> Path | None:
    """Where states are kept that nobody named a file for; its folder is made. None, which is said, if there is none."""
    try:
        path = default_state_file(config)
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return path
    except (OSError, RuntimeError) as error:  # no home, or none that can be written
        log.error("no state_file, and none can be made: what is learnt of streams ends with this node: %s", error)
        return None
    log.info("no state_file: what is learnt of streams ends with this node")
    return None


def on_loop(config: EdgeConfig, uplink: Uplink | None) -> Callable[[Callable[[], EdgeResult]], bool] | None:
    """Whether the event loop may look at an image itself; None where it may at none: with datagrams, or a device.

    It may where nothing else wants it on time: no datagrams, no escalation under way, and no image that takes long to
    decode.
    """
    computes = config.backend == "noop" or divides(config.backend, config.onnx_providers)
    if config.feature(DatagramSettings).port is not None or not computes:
        return None

    def may(job: Callable[[], EdgeResult]) -> bool:
        return isinstance(job, Look) and job.header.pixels <= BRIEF_PIXELS and (uplink is None or uplink.quiet)

    return may


def waiting_workers(config: EdgeConfig) -> int:
    """Threads beside one a core: those that only wait for a device."""
    if config.backend != "fpga-offload":
        return 0
    from fpga.offload.factory import PLACES

    return PLACES


def _looked(looking: Callable[[], None]) -> EdgeResult:
    looking()
    return EdgeResult((0,), (1.0,), 1.0, 0.0, 0.0)


def warm_up(backend: Backend, together: int = 1) -> EdgeResult:
    """Run blank images, up to so many at once, so that the first callers do not pay for lazy allocation."""
    for size in (1, *range(1, together + 1)):
        backend.infer(np.zeros((size, *backend.input_shape), np.uint8))
    return EdgeResult((0,), (1.0,), 1.0, 0.0, 0.0)
