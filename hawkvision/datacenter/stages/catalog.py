"""The stages of one task that a tier serves, from the manifest and the settings. Starts nothing.

An ensemble is not a model: a request for it goes to its members, which are loaded once and shared with the stages of
their own names. Variants that share requests form a group. A group is one deployment and scales by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.escalation_api import ListedStage, StageList, StageMember
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.inference.backend_registry import ON_THE_CPU
from hawkvision.models.fingerprints import stage_fingerprint
from hawkvision.models.manifest import Manifest, Variant, load_manifest, models_dir


@dataclass(frozen=True, slots=True)
class ServedStage:
    """A stage: its members, whether they also evaluate the mirror image, and the temperature of their average."""

    name: str
    members: tuple[str, ...]
    mirrored: bool = False
    temperature: float = 1.0
    fingerprint: str | None = None
    """`Manifest.fingerprint`; None if the settings choose an execution that certificates do not cover."""

    def ran(self, statement: str) -> str | None:
        """The stage's fingerprint in a process with this statement; None if that process lacks a member."""
        return stage_fingerprint(statement, self.members, horizontal_flip=self.mirrored, temperature=self.temperature)


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that share images, directly or through other stages. They run in one process.

    The name is that of the best stage of the group.
    """

    name: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """The stages from cheapest to best, and the variants that they use, each once."""

    task: str
    classes: int
    stages: tuple[ServedStage, ...]
    variants: tuple[Variant, ...]
    has_artifacts: bool

    @property
    def best(self) -> ServedStage:
        """The stage that answers if the caller names none."""
        return self.stages[-1]

    def stage(self, name: str) -> ServedStage | None:
        """The stage of that name, or None."""
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All variants, each in one group; the group of the best stage comes last."""
        parts: list[tuple[str, set[str]]] = []
        for stage in self.stages:
            members = set(stage.members)
            joined = [part for part in parts if part[1] & members]
            parts = [part for part in parts if part not in joined]
            parts.append((stage.name, members.union(*(names for _, names in joined))))
        return tuple(Group(name, tuple(v for v in self.variants if v.name in names)) for name, names in parts)

    def listing(self, statements: Collection[str] = ()) -> StageList:
        """The reply to `GET /v1/stages`; `statements` are those of replicas, newest first."""
        hashes = {v.name: v.sha256 if self.has_artifacts else None for v in self.variants}
        stages = tuple(
            ListedStage(
                stage.name,
                tuple(StageMember(member, hashes[member]) for member in stage.members),
                stage.fingerprint,
                next((ran for statement in statements if (ran := stage.ran(statement))), None),
            )
            for stage in self.stages
        )
        return StageList(self.task, self.best.name, stages)


def load_catalog(config: DatacenterConfig) -> Catalog:
    """The catalog of `config.task`.

    Raises:
        NotFound: if the task has no manifest.
        ConfigError: if `variants` names a stage that the manifest lacks.
    """
    return catalog_of(load_manifest(config.task, models_dir(config.models_dir)), config)


def catalog_of(manifest: Manifest, config: DatacenterConfig) -> Catalog:
    """The stages named by `config.variants`, or by the manifest's `cascade.dc` if that is empty; best last.

    Raises:
        ConfigError: if a name is unknown or repeated, or names an ensemble with `accept_confidence`.
    """
    names = config.variants or manifest.cascade.dc
    if len(set(names)) != len(names):
        raise ConfigError(f"dc.variants: expected each stage once, got {', '.join(names)}")
    certifiable = (
        config.backend in ("auto", "int8", "onnxruntime")
        and config.onnx_providers == ON_THE_CPU
        and config.onnx_precision == "model"
    )
    stages: list[ServedStage] = []
    variants: dict[str, Variant] = {}
    for name in names:
        ensemble = manifest.ensemble(name)
        try:
            members = manifest.members(name)
        except ManifestError as error:
            raise ConfigError(f"dc.variants: {error}") from None
        if ensemble is not None and ensemble.accept_confidence is not None:
            raise ConfigError(f"dc.variants: {name!r} is an ensemble with accept_confidence, which only edge nodes run")
        flip = ensemble is not None and ensemble.horizontal_flip
        temperature = ensemble.temperature if ensemble is not None else 1.0
        fingerprint = manifest.fingerprint(name) if certifiable else None
        stages.append(ServedStage(name, tuple(m.name for m in members), flip, temperature, fingerprint))
        variants |= {m.name: m for m in members}
    return Catalog(manifest.task, manifest.classes, tuple(stages), tuple(variants.values()), config.backend != "noop")
