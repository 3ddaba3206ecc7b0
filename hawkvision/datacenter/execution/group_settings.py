"""What a replica needs to know, and the models that it loads."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.core.logs import LogFormat, LogLevel
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.execution.model import Model
from hawkvision.datacenter.execution.threads import WIDE, ReplicaThreads, replica_threads
from hawkvision.datacenter.stages.catalog import Catalog, Group
from hawkvision.inference.adaptive_parallelism import divides, open_wide, usable_cores
from hawkvision.inference.backend_registry import BackendKind, backend_name, execution_of, open_backend
from hawkvision.inference.backends.interface import Backend, OnnxPrecision
from hawkvision.inference.batch_sizes import prepares_sizes, with_fixed_batches
from hawkvision.models.artifacts import load_variant
from hawkvision.models.fingerprints import BETWEEN, VariantRun
from hawkvision.models.manifest import Variant, cache_dir
from hawkvision.system.files import sha256_of
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import task_kind
from hawkvision.tasks.serving import OutputDecoder

BATCH_ON_CPU: Final = 8
"""Requests in a batch, if neither the settings nor a measurement say so. On a CPU batches hardly save time."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What a replica keeps as long as it lives; it travels to it in Ray's deployment record."""

    threads: ReplicaThreads
    memory_bytes: int | None
    request_memory_bytes: int | None
    replicas: int
    """The most replicas of all groups that may share a machine's memory."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


class GroupSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a replica may change while it runs: Serve's `user_config` of the deployment, as JSON."""

    task: str
    variants: tuple[Variant, ...]
    kind: str
    labels: tuple[str, ...]
    options: dict[str, Any]
    backend: BackendKind
    providers: tuple[str, ...]
    precision: OnnxPrecision
    cache_dir: str | None
    max_batch_size: int
    max_pixels: int
    max_pixels_whole: int
    intra_op_threads: int

    def task_kind(self) -> TaskKind[Any]:
        """The kind of the task.

        Raises:
            ManifestError: if it is not installed here, or refuses the options.
        """
        return task_kind(self.kind, self.labels, self.options)

    def to_user_config(self) -> dict[str, Any]:
        """These settings as Serve takes them."""
        config: dict[str, Any] = msgspec.to_builtins(self)
        return config

    @classmethod
    def from_user_config(cls, user_config: Any) -> GroupSettings:
        """The settings that Serve hands to a replica.

        Raises:
            ConfigError: names what is wrong, and where.
        """
        try:
            settings = msgspec.convert(user_config, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"user_config: {error}") from None
        if not settings.variants:
            raise ConfigError("user_config: expected at least one variant - at `$.variants`")
        return settings


def process_settings(group: Group, catalog: Catalog, config: DatacenterConfig) -> ProcessSettings:
    """What all replicas of a group keep."""
    return ProcessSettings(
        threads=replica_threads(group, config),
        memory_bytes=config.memory_bytes,
        request_memory_bytes=config.request_memory_bytes,
        replicas=config.max_replicas * len(catalog.groups),
        log_level=config.log_level,
        log_format=config.log_format,
    )


def group_settings(group: Group, catalog: Catalog, config: DatacenterConfig) -> GroupSettings:
    """A group's part of the tier's settings."""
    return GroupSettings(
        task=catalog.task,
        variants=group.variants,
        kind=catalog.kind.name,
        labels=catalog.kind.labels,
        options=catalog.kind.options,
        backend=config.backend,
        providers=config.onnx_providers,
        precision=config.onnx_precision,
        cache_dir=None if config.cache_dir is None else str(config.cache_dir),
        max_batch_size=config.max_batch_size,
        max_pixels=config.max_pixels,
        max_pixels_whole=config.max_pixels_whole,
        intra_op_threads=config.intra_op_threads,
    )


def load_model(
    variant: Variant, kind: TaskKind[Any], settings: GroupSettings, threads: ReplicaThreads, inferring: Executor
) -> Model:
    """A variant, loaded and verified; it infers on `inferring`.

    Raises:
        ArtifactError: if the model file is missing or is not the one that the manifest names.
        BackendError: if the backend cannot load it, or it does not return what the task kind expects.
        ManifestError: if its decoder is not installed.
    """
    cache = cache_dir(None if settings.cache_dir is None else Path(settings.cache_dir))
    data = b"" if settings.backend == "noop" else load_variant(cache, settings.task, variant)

    def opened(intra_op: int) -> Backend:
        return open_backend(
            settings.backend, data, variant.input, len(kind.labels), settings.providers, intra_op, settings.precision
        )

    narrow, wide = opened(1), None
    if divides(settings.backend, settings.providers):
        # `known`: replicas load at the same time, so a measurement of threads would include the other replicas.
        wanted = settings.intra_op_threads or min(WIDE, usable_cores())
        wide = open_wide(narrow, opened, threads.wide(wanted), known=True)
    execution = BETWEEN.join(dict.fromkeys(execution_of(settings.backend, each) for each in (narrow, wide) if each))
    batched, most = _for_batches(narrow, settings)
    return Model(
        batched,
        wide,
        OutputDecoder.of(variant, kind),
        inferring,
        max_batch_size=most,
        backend=backend_name(settings.backend, narrow),
        run=VariantRun.of(variant, sha256_of(data) if data else None, execution),
    )


def _for_batches(backend: Backend, settings: GroupSettings) -> tuple[Backend, int]:
    """The backend as batches run on it, and the most requests in a batch."""
    if not prepares_sizes(settings.backend, settings.providers):
        return backend, settings.max_batch_size or BATCH_ON_CPU
    fixed = with_fixed_batches(backend, settings.max_batch_size)
    return fixed, settings.max_batch_size or fixed.sizes[-1]
