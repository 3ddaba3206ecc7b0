"""What a tier serves: the stages of one task, worked out from the manifest and the settings, without starting anything.

The ensemble is no model of its own: a request for it asks its members, which are loaded once, and shared with the
stages of their own names. Variants that are asked together are a group, and are deployed together; groups scale apart.
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
    """How a stage is answered: by these members, over the mirror image too if `mirrored`, then `temperature`."""

    name: str
    members: tuple[str, ...]
    mirrored: bool = False
    temperature: float = 1.0
    fingerprint: str | None = None
    """`Manifest.fingerprint`, where the settings ask for an execution that certificates are about; else None."""

    def ran(self, stated: str) -> str | None:
        """Its fingerprint if a process ran its members that states this; None if that does not have them all."""
        return stage_fingerprint(stated, self.members, horizontal_flip=self.mirrored, temperature=self.temperature)


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that share images, directly or over others: they live in one process. Named after their reference
    stage.
    """

    name: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """The stages from cheapest to best and the variants, each once, that they run on."""

    task: str
    classes: int
    stages: tuple[ServedStage, ...]
    variants: tuple[Variant, ...]
    has_artifacts: bool

    @property
    def best(self) -> ServedStage:
        """The stage that answers when the caller names none."""
        return self.stages[-1]

    def stage(self, name: str) -> ServedStage | None:
        """The stage of that name, or None."""
        return next((r for r in self.stages if r.name == name), None)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All variants, each in one group; the reference stage's group is the last."""
        parts: list[tuple[str, set[str]]] = []
        for stage in self.stages:
            members = set(stage.members)
            joined = [part for part in parts if part[1] & members]
            parts = [part for part in parts if part not in joined]
            parts.append((stage.name, members.union(*(its for _, its in joined))))
        return tuple(Group(name, tuple(v for v in self.variants if v.name in its)) for name, its in parts)

    def listing(self, stated: Collection[str] = ()) -> StageList:
        """The reply to `GET /v1/stages`; `stated` is what replicas have stated, the newest first."""
        hashes = {v.name: v.sha256 if self.has_artifacts else None for v in self.variants}
        stages = tuple(
            ListedStage(
                r.name,
                tuple(StageMember(m, hashes[m]) for m in r.members),
                r.fingerprint,
                next((ran for each in stated if (ran := r.ran(each))), None),
            )
            for r in self.stages
        )
        return StageList(self.task, self.best.name, stages)


def load_catalog(config: DatacenterConfig) -> Catalog:
    """The catalog of `config.task`.

    Raises:
        NotFound: if the task has no manifest.
        ConfigError: if `variants` names something that the manifest does not know.
    """
    return catalog_of(load_manifest(config.task, models_dir(config.models_dir)), config)


def catalog_of(manifest: Manifest, config: DatacenterConfig) -> Catalog:
    """The stages that `config.variants` asks for (empty: the manifest's `cascade.dc`), best last.

    Raises:
        ConfigError: if a name is neither a variant nor a committee, or stands twice, or is an ensemble with
            `accept_confidence`.
    """
    names = config.variants or manifest.cascade.dc
    if len(set(names)) != len(names):
        raise ConfigError(f"dc.variants: every stage once, got {', '.join(names)}")
    usual = config.backend in ("auto", "int8", "onnxruntime") and config.onnx_providers == ON_THE_CPU
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
        fingerprint = manifest.fingerprint(name) if usual else None
        stages.append(ServedStage(name, tuple(m.name for m in members), flip, temperature, fingerprint))
        variants |= {m.name: m for m in members}
    return Catalog(manifest.task, manifest.classes, tuple(stages), tuple(variants.values()), config.backend != "noop")
