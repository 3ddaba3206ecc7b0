"""The threads of a replica that decode and infer: as many as Ray reserves cores for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.stages.catalog import Group
from hawkvision.inference.adaptive_parallelism import divides

_DECODING: Final = 2
"""Decoding is at most half of a small variant's work, so two threads decode while others infer."""
WIDE: Final = 2
"""Threads for an image that is alone, unless a setting says otherwise; see `inference.adaptive_parallelism`."""


@dataclass(frozen=True, slots=True)
class ReplicaThreads:
    """How many threads decode and how many infer."""

    decode: int
    """0: those that infer decode as well."""
    infer: int

    @property
    def cores(self) -> int:
        """The cores that they can keep busy."""
        return self.decode + self.infer

    def wide(self, wanted: int) -> int:
        """Threads for an image that is alone: as many as wanted, or as there are."""
        return min(wanted, self.infer)


def replica_threads(group: Group, config: DatacenterConfig) -> ReplicaThreads:
    """The threads of each replica of a group: what `dc.num_cpus` allows, or else what the group can use.

    A group can use a thread per variant, or those of an image that is alone if they are more.
    """
    if config.num_cpus is not None:
        return _within(max(1, int(config.num_cpus)))
    alone = (config.intra_op_threads or WIDE) if divides(config.backend, config.onnx_providers) else 1
    infer = max(len(group.variants), alone)
    return ReplicaThreads(min(_DECODING, infer), infer)


def replica_cpus(group: Group, config: DatacenterConfig) -> float:
    """The cores that Ray reserves for each replica of a group."""
    return float(replica_threads(group, config).cores) if config.num_cpus is None else config.num_cpus


def _within(cores: int) -> ReplicaThreads:
    """At most so many threads: one in three decodes, at most two."""
    decode = min(_DECODING, (cores + 1) // 3)
    return ReplicaThreads(decode, cores - decode)
