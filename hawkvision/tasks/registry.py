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


def kind_names() -> tuple[str, ...]:
    """The names of all kinds that are installed, sorted. Nothing is loaded."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


@cache
def kind_class(name: str) -> type[TaskKind[Any]]:
    """The kind of that name. Other kinds are not loaded, so that one that is broken does not disturb them.

    Raises:
        ManifestError: if it is not installed, installed twice, cannot be loaded or is no kind of that name.
    """
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not found:
        raise ManifestError(f"kind {name!r} is not installed; there are {', '.join(kind_names())}")
    if len(found) > 1:
        raise ManifestError(f"kind {name!r} is installed more than once: {', '.join(sorted(found))}")
    (entry,) = found.values()
    try:
        loaded = entry.load()
    except Exception as error:
        raise ManifestError(f"entry point {name!r} of {GROUP}: {type(error).__name__}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, TaskKind) and loaded.name == name):
        raise ManifestError(f"entry point {name!r} of {GROUP}: {entry.value} is no TaskKind of that name")
    return loaded


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
        ManifestError: as `kind_class`, or for options that the kind refuses.
    """
    return kind_class(name)(labels, options)
