"""What INFaaS knows of the variants before the first request: accuracy, size, and times measured on this machine.

The paper's profiler measures each variant when it is registered; here that is when the node starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from edge.inference.edge_stage import EdgeStage
from hawkvision.cascade.policy import Policy
from hawkvision.core.advice import advise
from hawkvision.core.errors import ArtifactError, ConfigError, ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.manifest import Manifest, MeasuredAccuracy, artifact_path
from tests.bench.policies.baselines.routes import Registered, Rule, to_best, to_edge
from tests.bench.policies.baselines.settings import BaselineSettings

RESIDENT_MEMORY_MB: Final = 16.0
"""Room for three quantised networks of 5 MB: more models than HawkVision keeps at the edge."""
PROFILE_LOADS: Final = 3
PROFILE_RUNS: Final = 3
"""Loads that a variant is profiled with, and inferences after each. The least of the times counts: other work on the
machine only adds to them, and a variant whose load was found too slow for every deadline would never be tried again."""
LEAST_MS: Final = 1e-3
"""The least profiled time, for measured times are divided by it."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """One variant as it was registered."""

    accuracy: float
    size: int
    """Bytes of its model files, which stand for the memory it takes."""
    infer_ms: float
    """Of a conditional ensemble, with all of its members."""
    load_ms: float
    """To read, verify, open and warm it."""


@dataclass(frozen=True, slots=True)
class Registration:
    """All variants and conditional ensembles that the node can run, and the datacenter's stages."""

    variants: Mapping[str, Profiled]
    edge: str
    """The variant that is loaded at the start."""
    best: str
    remote: Mapping[str, float]
    """Accuracies of the datacenter's stages, of `best` among them."""
    limit: int
    """Bytes that may be resident."""
    load: Callable[[str], EdgeStage]
    """Gives a variant ready to be used; called on a thread."""

    @property
    def best_accuracy(self) -> float:
        """The reference stage's."""
        return self.remote[self.best]

    def accuracies(self, policy: Policy) -> Registered:
        """What targets ask for, in registered accuracies."""
        return Registered(self.variants[self.edge].accuracy, self.best_accuracy, policy.balanced.max_drop)

    def rule(self, policy: Policy) -> Rule:
        """Where targets go while every variant is in time; `/v1/targets` shows that."""
        accuracies = self.accuracies(policy)
        reached = max(each.accuracy for each in self.variants.values())
        missed = accuracies.below_target
        return lambda target: (
            to_best(target, below_target=missed(self.best_accuracy, target))
            if missed(reached, target)
            else to_edge(target)
        )


def register(
    config: EdgeConfig, manifest: Manifest, cache: Path, edge: str, load: Callable[[str], EdgeStage]
) -> Registration:
    """Load each variant that fits, and measure it. Blocks for some tenths of a second per variant.

    Accuracies are the manifest's, which has one for every variant, all measured on the same images. The profile has
    those of the cascade's stages alone.

    Args:
        config: task, backend, memory and the edge's variant: if it is named, only that and its members are registered.
        manifest: of the task.
        cache: where the built files lie; what lacks one is left out.
        edge: the variant or conditional ensemble to begin with.
        load: gives one ready to be used.

    Raises:
        ConfigError: if the variant to begin with does not fit.
        ManifestError: if no accuracy of it, or of the reference stage, is registered.
        ArtifactError, BackendError: if it is not built, or one that is cannot be loaded.
    """
    limit = round((config.feature(BaselineSettings).resident_memory_mb or RESIDENT_MEMORY_MB) * 1e6)
    known = {each.name: each.accuracy for each in manifest.variants if each.accuracy is not None}
    known |= {each.name: each.accuracy for each in manifest.ensembles if each.accuracy is not None}
    datacenters = {each.name for each in manifest.ensembles if each.accept_confidence is None}
    mine = {edge, *(each.name for each in manifest.members(edge))} if config.variant is not None else known.keys()
    registered = {name: accuracy for name, accuracy in known.items() if name in mine - datacenters}
    remote = {name: known[name].value for name in manifest.cascade.dc if name in known}
    if manifest.best not in remote or edge not in registered:
        raise ManifestError(
            f"task {manifest.task!r}: policy 'infaas' needs registered accuracies of {edge} and "
            f"{manifest.best}; the manifest lacks one of them"
        )
    sizes = {name: size for name in registered if (size := _size(config, manifest, cache, name)) is not None}
    if edge not in sizes:
        lacking = next(each.name for each in manifest.members(edge) if _file_size(manifest, cache, each.name) is None)
        raise ArtifactError(
            f"{artifact_path(cache, manifest.task, lacking)}: {edge}: the model file is missing; build it with "
            f"`{advise('models build', '--task', manifest.task, lacking, cache_dir=config.cache_dir)}`"
        )
    if sizes[edge] > limit:
        raise ConfigError(
            f"edge.resident_memory_mb = {limit / 1e6:g} cannot hold {edge}, which has {sizes[edge] / 1e6:.2f} MB"
        )
    variants = {name: _profile(name, registered[name], size, load) for name, size in sizes.items() if size <= limit}
    return Registration(variants, edge, manifest.best, remote, limit, load)


def warm(backend: Backend) -> None:
    """Run a blank image, so that the first caller does not pay for lazy allocation."""
    backend.infer(np.zeros((1, *backend.input_shape), np.uint8))


def _size(config: EdgeConfig, manifest: Manifest, cache: Path, name: str) -> int | None:
    """Bytes of its files; None if one is not built. For the no-op backend, which reads none, the manifest's."""
    if config.backend == "noop":
        # It says the same to all members, so an ensemble would be one model several times.
        return (manifest.variant(name).bytes or 0) if manifest.ensemble(name) is None else None
    sizes = [_file_size(manifest, cache, member.name) for member in manifest.members(name)]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _file_size(manifest: Manifest, cache: Path, variant: str) -> int | None:
    path = artifact_path(cache, manifest.task, variant)
    return path.stat().st_size if path.is_file() else None


def _profile(name: str, accuracy: MeasuredAccuracy, size: int, load: Callable[[str], EdgeStage]) -> Profiled:
    loads_ms: list[float] = []
    runs_ms: list[float] = []
    for _ in range(PROFILE_LOADS):
        started = time.monotonic()
        stage = load(name)
        loads_ms.append((time.monotonic() - started) * 1e3)
        for _ in range(PROFILE_RUNS):
            started = time.monotonic()
            for model in stage.models:
                warm(model.backend)
            runs_ms.append((time.monotonic() - started) * 1e3)
        stage.close()
    return Profiled(accuracy.value, size, max(LEAST_MS, min(runs_ms)), max(LEAST_MS, min(loads_ms)))
