"""The stages of each task that a tier serves, from the manifests and the settings. Starts nothing.

An ensemble is not a model: a request for it goes to its members, which are loaded once and shared with the stages of
their own names. Variants that share requests form a group. A group is one deployment and scales by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hawkvision.core.errors import ConfigError, HawkVisionError, ManifestError
from hawkvision.core.escalation_api import ListedStage, StageList, StageMember
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.inference.backend_registry import ON_THE_CPU
from hawkvision.models.artifacts import load_variant
from hawkvision.models.fingerprints import stage_fingerprint
from hawkvision.models.input_spec import Weights
from hawkvision.models.manifest import Manifest, Variant, cache_dir, load_manifest, models_dir
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import load_kind


@dataclass(frozen=True, slots=True)
class ServedStage:
    """A stage: its members, whether they also evaluate the mirror image, and how their outputs are combined."""

    name: str
    members: tuple[str, ...]
    mirrored: bool = False
    temperature: float = 1.0
    fingerprint: str | None = None
    """`Manifest.fingerprint`; None if the settings choose an execution that certificates do not cover."""
    weights: Weights = ()
    """Of the members; empty where all weigh the same."""
    task_facts: str = ""
    """`Manifest.task_facts`."""

    def ran(self, statement: str) -> str | None:
        """The stage's fingerprint in a process with this statement; None if that process lacks a member."""
        return stage_fingerprint(
            statement,
            self.members,
            horizontal_flip=self.mirrored,
            temperature=self.temperature,
            weights=self.weights,
            task=self.task_facts,
        )

    def weights_of(self, members: Sequence[str]) -> Weights:
        """The weights of some of the members."""
        weights = dict(zip(self.members, self.weights, strict=True)) if self.weights else {}
        return tuple(weights.get(member, 1.0) for member in members)


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that share images, directly or through other stages. They run in one process.

    The name is that of the best stage of the group, after the task and a dot if the tier serves several tasks. No two
    groups of a tier have the same name.
    """

    name: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """The stages from cheapest to best, and the variants that they use, each once."""

    task: str
    kind: TaskKind[Any]
    stages: tuple[ServedStage, ...]
    variants: tuple[Variant, ...]
    has_artifacts: bool
    group_prefix: str = ""

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
        return tuple(
            Group(self.group_prefix + name, tuple(v for v in self.variants if v.name in names)) for name, names in parts
        )

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


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A task that cannot be served, and why."""

    reason: str


def load_catalogs(config: DatacenterConfig) -> dict[str, Catalog | TaskFailure]:
    """The catalogs of `config.tasks`, in that order.

    A task whose manifest is missing or unusable does not take the others down.

    Raises:
        HawkVisionError: if no task can be loaded; the error of the first.
        ConfigError: if `variants` does not fit `tasks`.
    """
    variants_by_task(config)
    catalogs: dict[str, Catalog | TaskFailure] = {}
    failures: list[HawkVisionError] = []
    for task in config.tasks:
        try:
            models = models_dir(config.models_dir, task)
            manifest = load_manifest(task, models)
            catalogs[task] = catalog_of(manifest, load_kind(manifest, models), config)
        except HawkVisionError as error:
            failures.append(error)
            catalogs[task] = TaskFailure(error.message)
    if len(failures) == len(config.tasks):
        raise failures[0]
    return catalogs


def loaded(catalogs: Mapping[str, Catalog | TaskFailure]) -> dict[str, Catalog]:
    """Those of the tasks that can be served."""
    return {task: catalog for task, catalog in catalogs.items() if isinstance(catalog, Catalog)}


def lacking_models(
    config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]
) -> dict[str, HawkVisionError]:
    """The tasks of which this machine lacks a model file, and the error that names it."""
    lacking: dict[str, HawkVisionError] = {}
    for task, catalog in loaded(catalogs).items():
        try:
            for variant in catalog.variants if catalog.has_artifacts else ():
                load_variant(cache_dir(config.cache_dir), task, variant)
        except HawkVisionError as error:
            lacking[task] = error
    return lacking


def check_models(config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]) -> None:
    """Check that this machine has the model files of a task at least.

    Raises:
        ArtifactError: if each task lacks a file; the error of the first.
    """
    lacking = lacking_models(config, catalogs)
    if lacking and len(lacking) == len(loaded(catalogs)):
        raise next(iter(lacking.values()))


def variants_by_task(config: DatacenterConfig) -> dict[str, tuple[str, ...]]:
    """The stages that `config.variants` names for each task.

    Raises:
        ConfigError: if it names another task, or none although there are several.
    """
    named: dict[str, tuple[str, ...]] = {}
    for word in config.variants:
        task, colon, stage = word.rpartition(":")
        if not colon and len(config.tasks) > 1:
            raise ConfigError(f"dc.variants: expected TASK:STAGE, because there are several tasks, got {word!r}")
        task = task if colon else config.tasks[0]
        if task not in config.tasks:
            raise ConfigError(f"dc.variants: {word!r} is of task {task!r}; dc.tasks has {', '.join(config.tasks)}")
        named[task] = (*named.get(task, ()), stage)
    return named


def catalog_of(manifest: Manifest, kind: TaskKind[Any], config: DatacenterConfig) -> Catalog:
    """The stages named by `config.variants`, or by the manifest's `cascade.dc` if that names none; best last.

    Raises:
        ConfigError: if a name is unknown or repeated, or names an ensemble with `accept_confidence`.
    """
    names = variants_by_task(config).get(manifest.task, manifest.cascade.dc)
    if len(set(names)) != len(names):
        raise ConfigError(f"dc.variants: expected each stage once, got {', '.join(names)}")
    certifiable = (
        config.backend in ("auto", "int8", "onnxruntime")
        and config.onnx_providers == ON_THE_CPU
        and config.onnx_precision == "model"
    )
    stages: list[ServedStage] = []
    members_used: dict[str, Variant] = {}
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
        weights = ensemble.weights if ensemble is not None else ()
        names_of_members = tuple(member.name for member in members)
        stages.append(ServedStage(name, names_of_members, flip, temperature, fingerprint, weights, manifest.task_facts))
        members_used |= {m.name: m for m in members}
    return Catalog(
        manifest.task,
        kind,
        tuple(stages),
        tuple(members_used.values()),
        has_artifacts=config.backend != "noop",
        group_prefix=f"{manifest.task}." if len(config.tasks) > 1 else "",
    )
