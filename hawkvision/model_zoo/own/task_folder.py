"""The folder of a user's own task: manifest, labels and model files, and the built models in the cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from hawkvision.core.errors import ArtifactError, ConfigError
from hawkvision.core.text_files import read_text
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.own.tiers import TierName, entered, only_stage
from hawkvision.model_zoo.own.work import multiplications
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import (
    MANIFEST,
    Manifest,
    Name,
    Variant,
    artifact_path,
    load_manifest,
    own_models_dir,
    shipped_models_dir,
)
from hawkvision.system.files import sha256_of, write_atomic

LABELS: Final = "labels.txt"
DEFAULT_KIND: Final[str] = next(each.default for each in msgspec.structs.fields(Manifest) if each.name == "kind")
HEADER: Final = "Written by `hawkvision models add` and `quantize`, which keep what you change here, except comments."


def folder_for(task: str, override: Path | None) -> Path:
    """The folder of manifests that gets the task.

    Raises:
        ConfigError: if the name is no task's, or that of a task that comes with HawkVision.
    """
    try:
        msgspec.convert(task, Name)
    except msgspec.ValidationError:
        raise ConfigError(
            f"--task: expected a name of lower-case letters, digits, '_', '.' and '-', got {task!r}"
        ) from None
    if override is not None:
        return override
    own = own_models_dir()
    if own is None:
        raise ConfigError("there is no folder for your models: this user has no home; give --models-dir")
    if (shipped_models_dir() / task / MANIFEST).is_file():
        raise ConfigError(f"--task: {task!r} comes with HawkVision; choose another name, or give --models-dir")
    return own


def existing(task: str, models: Path) -> Manifest | None:
    """The task's manifest, if there is one."""
    return load_manifest(task, models) if (models / task / MANIFEST).is_file() else None


def stage_name(wanted: str | None, path: Path) -> str:
    """The name of a stage: the one that is wanted, or the file's.

    Raises:
        ConfigError: if it is no name.
    """
    name = wanted or re.sub(r"[^a-z0-9_.-]+", "_", path.stem.lower()).strip("_.-")[:64]
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ConfigError(
            f"--name: expected lower-case letters, digits, '_', '.' and '-', at most 64, got {name!r}"
        ) from None


def read_labels(path: Path) -> tuple[str, ...]:
    """Labels in index order: a file with one a line, or a folder of class folders, whose sorted names they are.

    Raises:
        ConfigError: if there are none, or one is given twice.
    """
    if path.is_dir():
        labels = tuple(sorted(each.name for each in path.iterdir() if each.is_dir()))
    else:
        try:
            labels = tuple(line.strip() for line in read_text(path).splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--labels: {path}: cannot read: {error}") from None
    while labels and not labels[-1]:
        labels = labels[:-1]
    if not labels:
        raise ConfigError(f"--labels: {path}: expected a file with one label a line, or a folder of class folders")
    for index, label in enumerate(labels):
        if not label or label in labels[:index] or not _is_line(label):
            what = "empty" if not label else f"{label!r}, which line {labels.index(label) + 1} is too"
            if not _is_line(label) and label:
                what = f"{label!r}, which is no line of text in UTF-8"
            raise ConfigError(f"--labels: {path}: line {index + 1} is {what}; expected another label on each line")
    return labels


def _is_line(label: str) -> bool:
    """Whether a label can be written as one line: names of folders may hold line ends, or be in another encoding."""
    try:
        return label.encode().decode().splitlines() == [label]
    except UnicodeEncodeError:
        return False


def new_manifest(task: str, kind: str, options: dict[str, Any], labels: tuple[str, ...], variant: Variant) -> Manifest:
    """The manifest of a task with one stage."""
    return Manifest(
        format=1,
        task=task,
        kind=kind,
        options=options,
        labels=LABELS,
        labels_sha256=sha256_of(label_text(labels)),
        classes=len(labels),
        cascade=only_stage(variant.name),
        variants=(variant,),
    )


def label_text(labels: tuple[str, ...]) -> bytes:
    """The label file."""
    return ("\n".join(labels) + "\n").encode()


def store(
    manifest: Manifest | None, fresh: Manifest, weights: bytes, built: bytes, tier: TierName | None, models: Path,
    cache: Path, *, of: str | None = None,
) -> Manifest:  # fmt: skip
    """Write a stage's files and enter it in the manifest, which is written last.

    Args:
        manifest: what the task has; None for a new task.
        fresh: a manifest whose only variant is the stage.
        weights: the stage's file beside the manifest.
        built: the model that runs.
        tier: see `entered`.
        models: the folder of manifests.
        cache: the folder of built models.
        of: the stage that this one is a cheaper form of, and so no reference for.

    Returns: the manifest as written.

    Raises:
        ArtifactError: if something cannot be written.
    """
    (variant,) = fresh.variants
    path = models / fresh.task / str(variant.source)
    write_atomic(path, weights)
    write_atomic(artifact_path(cache, fresh.task, variant.name), built)
    if manifest is None:
        changed = fresh
    else:
        costs = costs_of(manifest, cache)
        costs[variant.name] = multiplications(built)
        if of is not None:
            costs[variant.name] = min(costs[variant.name], costs.get(of, np.inf)) - 0.5
        changed = entered(manifest, variant, tier, costs)
    write_atomic(models / fresh.task / MANIFEST, format_manifest(changed, HEADER).encode())
    return changed


def costs_of(manifest: Manifest, cache: Path) -> dict[str, float]:
    """Multiplications of each single variant of the cascade that is built."""
    costs: dict[str, float] = {}
    for stage in dict.fromkeys((*manifest.cascade.edge, *manifest.cascade.dc)):
        if manifest.ensemble(stage) is None:
            try:
                costs[stage] = multiplications(load_variant(cache, manifest.task, manifest.variant(stage)))
            except ArtifactError:
                continue
    return costs
