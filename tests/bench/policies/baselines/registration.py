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
from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.cascade.policy import Policy
from hawkvision.core.advice import advise
from hawkvision.core.errors import ArtifactError, ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.manifest import Manifest, MeasuredAccuracy, artifact_path, models_dir
from tests.bench.policies.baselines.routes import Registered, Rule, to_best, to_edge

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
    infer_ms: float
    """Of a conditional ensemble, with all of its members."""
    load_ms: float
    """To read, verify, open and warm it."""
    stage: EdgeStage
    """Not in memory until it is needed."""


@dataclass(frozen=True, slots=True)
class Registration:
    """All variants and conditional ensembles that the node can run, and the datacenter's stages."""

    variants: Mapping[str, Profiled]
    edge: str
    """The variant that is loaded at the start."""
    best: str
    remote: Mapping[str, float]
    """Accuracies of the datacenter's stages, of `best` among them."""

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
    """Load each variant, and measure it. Blocks for some tenths of a second per variant.

    Accuracies are the manifest's, which has one for every variant, all measured on the same images. Where it has none,
    as for views of another task, they are the profile's, which has those of the cascade's stages alone.

    Args:
        config: task, backend, memory and the edge's variant: if it is named, only that and its members are registered;
            a variant that exceeds the memory is left out.
        manifest: of the task.
        cache: where the built files lie; what lacks one is left out.
        edge: the variant or conditional ensemble to begin with.
        load: gives one ready to be used.

    Raises:
        ManifestError: if no accuracy of it, or of the reference stage, is registered.
        ArtifactError, BackendError: if it is not built, or one that is cannot be loaded.
    """
    known = {each.name: each.accuracy for each in manifest.variants if each.accuracy is not None}
    known |= {each.name: each.accuracy for each in manifest.ensembles if each.accuracy is not None}
    if not known:
        profile = load_profile_of(manifest, models_dir(config.models_dir, config.task), config.profile)
        known = {each.name: each.accuracy for each in profile.stages}
    datacenters = {each.name for each in manifest.ensembles if each.accept_confidence is None}
    mine = {edge, *(each.name for each in manifest.members(edge))} if config.variant is not None else known.keys()
    registered = {name: accuracy for name, accuracy in known.items() if name in mine - datacenters}
    remote = {name: known[name].value for name in manifest.cascade.dc if name in known}
    if manifest.best not in remote or edge not in registered:
        raise ManifestError(
            f"task {manifest.task!r}: policy 'infaas' needs registered accuracies of {edge} and "
            f"{manifest.best}; the manifest lacks one of them"
        )
    built = [name for name in registered if _is_built(config, manifest, cache, name)]
    if edge not in built:
        lacking = next(each.name for each in manifest.members(edge) if not _has_file(manifest, cache, each.name))
        raise ArtifactError(
            f"{artifact_path(cache, manifest.task, lacking)}: {edge}: the model file is missing; build it with "
            f"`{advise('models build', '--task', manifest.task, lacking, cache_dir=config.cache_dir)}`"
        )
    variants = {name: _profile(name, registered[name], load) for name in built}
    limit = config.model_memory_bytes
    fitting = {name: each for name, each in variants.items() if limit is None or _bytes(each.stage) <= limit}
    return Registration(fitting, edge, manifest.best, remote)


def warm(backend: Backend) -> None:
    """Run a blank image, so that the first caller does not pay for lazy allocation."""
    backend.infer(np.zeros((1, *backend.input_shape), np.uint8))


def _is_built(config: EdgeConfig, manifest: Manifest, cache: Path, name: str) -> bool:
    """Whether its files are there; the no-op backend reads none."""
    if config.backend == "noop":
        # It says the same to all members, so an ensemble would be one model several times.
        return manifest.ensemble(name) is None
    return all(_has_file(manifest, cache, member.name) for member in manifest.members(name))


def _has_file(manifest: Manifest, cache: Path, variant: str) -> bool:
    return artifact_path(cache, manifest.task, variant).is_file()


def _bytes(stage: EdgeStage) -> int:
    uses = [model.use for model in stage.models if model.use is not None]
    return uses[0].shared.bytes_of(use.key for use in uses) if uses else 0


def _profile(name: str, accuracy: MeasuredAccuracy, load: Callable[[str], EdgeStage]) -> Profiled:
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
    return Profiled(accuracy.value, max(LEAST_MS, min(runs_ms)), max(LEAST_MS, min(loads_ms)), stage)
