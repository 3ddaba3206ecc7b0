"""Finds kinds of tasks by the names that manifests use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from hawkvision.core.errors import ManifestError
from hawkvision.models.manifest import Manifest, load_labels
from hawkvision.tasks.kind import TaskKind

GROUP: Final = "hawkvision.tasks"
"""The group of entry points: `name = "module:KindClass"`."""


@cache
def kinds() -> Mapping[str, type[TaskKind[Any]]]:
    """All kinds that are installed, by name.

    Raises:
        ManifestError: if an entry point cannot be loaded or is no kind of that name.
    """
    found: dict[str, type[TaskKind[Any]]] = {}
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
        except Exception as error:
            raise ManifestError(f"entry point {entry.name!r} of {GROUP}: {type(error).__name__}: {error}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, TaskKind) and loaded.name == entry.name):
            raise ManifestError(f"entry point {entry.name!r} of {GROUP}: {entry.value} is no TaskKind of that name")
        found[entry.name] = loaded
    return found


def load_kind(manifest: Manifest, models: Path) -> TaskKind[Any]:
    """The kind of a manifest's task, with its labels and options.

    Raises:
        ManifestError: as `load_labels` and `task_kind`, naming the task.
    """
    labels = load_labels(manifest, models)
    try:
        return task_kind(manifest.kind, labels, manifest.options)
    except ManifestError as error:
        raise ManifestError(f"task {manifest.task!r}: {error}") from None


def task_kind(name: str, labels: Sequence[str], options: Mapping[str, Any]) -> TaskKind[Any]:
    """The kind of one task.

    Raises:
        ManifestError: for a kind that is not installed, or options that it refuses.
    """
    kind = kinds().get(name)
    if kind is None:
        raise ManifestError(f"kind {name!r} is not installed; there are {', '.join(sorted(kinds()))}")
    return kind(labels, options)
