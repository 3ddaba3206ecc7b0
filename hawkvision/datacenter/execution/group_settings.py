"""What a replica needs to know: what it keeps as long as it lives, and what it may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.core.logs import LogFormat, LogLevel
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.stages.catalog import Catalog, Group
from hawkvision.inference.adaptive_parallelism import divides
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.inference.backends.interface import OnnxPrecision
from hawkvision.models.manifest import Variant
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import task_kind

_DECODING: Final = 2
"""Decoding is at most half of a small variant's work, so two threads decode while others infer."""
WIDE: Final = 2
"""Threads for an image that is alone, unless a setting says otherwise; see `inference.adaptive_parallelism`."""


def replica_threads(group: Group, config: DatacenterConfig) -> tuple[int, int]:
    """How many threads of each replica of a group decode and how many infer.

    As many as `dc.num_cpus` allows, or else as the group can use: one per variant, or those of an image that is alone
    if they are more. Where none decodes, those that infer do.
    """
    if config.num_cpus is not None:
        cores = max(1, int(config.num_cpus))
        decode = min(_DECODING, (cores + 1) // 3)
        return decode, cores - decode
    alone = (config.intra_op_threads or WIDE) if divides(config.backend, config.onnx_providers) else 1
    infer = max(len(group.variants), alone)
    return min(_DECODING, infer), infer


def replica_cpus(group: Group, config: DatacenterConfig) -> float:
    """The cores that Ray reserves for each replica of a group."""
    return float(sum(replica_threads(group, config))) if config.num_cpus is None else config.num_cpus


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What a replica keeps as long as it lives; it travels to it in Ray's deployment record."""

    decoding_threads: int
    inference_threads: int
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
    decode, infer = replica_threads(group, config)
    return ProcessSettings(
        decoding_threads=decode,
        inference_threads=infer,
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
