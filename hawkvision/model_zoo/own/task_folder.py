"""The folder of a user's own task: manifest, labels and model files, and the built models in the cache."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from hawkvision.core.errors import ArtifactError, ConfigError
from hawkvision.core.text_files import read_text
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.own.graphs.work import multiplications
from hawkvision.model_zoo.own.tiers import TierName, entered, only_stage
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
            "--task: expected a name of lower-case letters, digits, '_', '.' and '-', at most 64, that begins with a "
            f"letter or digit, got {task!r}"
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
            "--name: expected lower-case letters, digits, '_', '.' and '-', at most 64, that begin with a letter or "
            f"digit, got {name!r}{'' if wanted else f' from the name of {path}'}"
        ) from None


def read_labels(path: Path) -> tuple[str, ...]:
    """Labels in index order: a file with one a line, or a folder of class folders, whose sorted names they are.

    Raises:
        ConfigError: if there are none, or one is given twice or cannot be shown.
    """
    if path.is_dir():
        found = sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    else:
        found = [line.strip() for line in _label_text(path).split("\n")]
    labels = [unicodedata.normalize("NFC", each) for each in found]
    while labels and not labels[-1]:
        labels.pop()
    if not labels:
        raise ConfigError(f"--labels: {path}: expected a file with one label a line, or a folder of class folders")
    first: dict[str, int] = {}
    for line, label in enumerate(labels, 1):
        what = "" if label.isprintable() else f"{label!r}, which is no line of text in UTF-8 that can be shown"
        what = what if label else "empty"
        what = f"{label!r}, which line {first[label]} is too" if label in first and label else what
        if what:
            raise ConfigError(f"--labels: {path}: line {line} is {what}; expected another label on each line")
        first[label] = line
    return tuple(labels)


def _label_text(path: Path) -> str:
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"--labels: {path}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--labels: {path}: expected text in UTF-8, one label a line: {error}") from None
    if text.lstrip()[:1] in ("[", "{"):
        raise ConfigError(f"--labels: {path}: expected one label a line, found JSON")
    return text


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
    cache: Path, *, of: str | None = None, labels: tuple[str, ...] | None = None,
) -> Manifest:  # fmt: skip
    """Write a stage's files and enter it in the manifest, which is written last; all of it or nothing.

    Args:
        manifest: what the task has; None for a new task.
        fresh: a manifest whose only variant is the stage.
        weights: the stage's file beside the manifest.
        built: the model that runs.
        tier: see `entered`.
        models: the folder of manifests.
        cache: the folder of built models.
        of: the stage that this one is a cheaper form of, and so no reference for.
        labels: of a new task; None for a task that has its labels.

    Returns: the manifest as written.

    Raises:
        ArtifactError: if something cannot be written.
    """
    (variant,) = fresh.variants
    changed = fresh
    if manifest is not None:
        costs = costs_of(manifest, cache)
        costs[variant.name] = multiplications(built)
        if of is not None:
            costs[variant.name] = min(costs[variant.name], costs.get(of, np.inf)) - 0.5
        changed = entered(manifest, variant, tier, costs)
    folder = models / fresh.task
    files = {
        **({} if labels is None else {folder / fresh.labels: label_text(labels)}),
        folder / str(variant.source): weights,
        artifact_path(cache, fresh.task, variant.name): built,
        folder / MANIFEST: format_manifest(changed, HEADER).encode(),
    }
    _write_together(files)
    return changed


def _write_together(files: Mapping[Path, bytes]) -> None:
    """Write all files, in their order. What was there before comes back if one cannot be written, or by Ctrl-C.

    Raises:
        ArtifactError: as `write_atomic`.
    """
    before = {path: path.read_bytes() if path.is_file() else None for path in files}
    try:
        for path, content in files.items():
            write_atomic(path, content)
    except BaseException:
        for path, old in before.items():
            with suppress(ArtifactError, OSError):  # the first error says why
                if old is None:
                    path.unlink(missing_ok=True)
                elif path.read_bytes() != old:
                    write_atomic(path, old)
        raise


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
