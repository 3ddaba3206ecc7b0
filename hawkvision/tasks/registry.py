"""Finds kinds of tasks by the names that manifests use, and by the paths of the API that are their typed forms."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hawkvision.core.errors import ManifestError
from hawkvision.models.manifest import Manifest, load_labels
from hawkvision.tasks import plugins
from hawkvision.tasks.classification import ClassificationKind
from hawkvision.tasks.counting import CountingKind
from hawkvision.tasks.detection import DetectionKind
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.multi_label import MultiLabelKind

KINDS: Final[Mapping[str, type[TaskKind[Any]]]] = MappingProxyType(
    {kind.name: kind for kind in (ClassificationKind, CountingKind, DetectionKind, MultiLabelKind)}
)
GROUP: Final = "hawkvision.tasks"
"""The group of entry points for those of other packages: `name = "module:KindClass"`."""

INFER_PATH: Final = "/v1/infer"
"""Takes images for tasks of every kind."""
CLASSIFY_PATH: Final = "/v1/classify"
DETECT_PATH: Final = "/v1/detect"
DEEPSTACK_PATH: Final = "/v1/vision/detection"
"""In DeepStack's form (`edge.servers.deepstack`)."""
DEEPSTACK_CUSTOM: Final = "/v1/vision/custom/"
"""In DeepStack's form, followed by the name of a detection task, or by `list`."""
KIND_OF_FORM: Final[Mapping[str, str]] = MappingProxyType(
    {CLASSIFY_PATH: "classification", DETECT_PATH: "detection", DEEPSTACK_PATH: "detection"}
)
"""The kind of task that each typed form of `INFER_PATH` answers."""


def form_of(kind: str | None) -> str:
    """The path of the API for tasks of a kind: its typed form, or the one for any."""
    typed = (path for path, its_kind in KIND_OF_FORM.items() if its_kind == kind and path != DEEPSTACK_PATH)
    return next(typed, INFER_PATH)


def kind_names() -> tuple[str, ...]:
    """The names of all kinds, sorted. Nothing is loaded."""
    return plugins.names(KINDS, GROUP)


@cache
def kind_class(name: str) -> type[TaskKind[Any]]:
    """The kind of that name.

    Raises:
        ManifestError: if it is not installed, installed twice, cannot be loaded or is no kind of that name.
    """
    loaded: type[TaskKind[Any]] = plugins.load(KINDS, GROUP, name, TaskKind, "kind")  # type: ignore[type-abstract]
    if loaded.name != name:
        raise ManifestError(f"entry point {name!r} of {GROUP}: the kind calls itself {loaded.name!r}")
    return loaded


def installed_kinds() -> dict[str, type[TaskKind[Any]]]:
    """The kinds that are installed and can be loaded, by name."""
    found: dict[str, type[TaskKind[Any]]] = {}
    for name in kind_names():
        with contextlib.suppress(ManifestError):
            found[name] = kind_class(name)
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
        ManifestError: as `kind_class`, or for options that the kind refuses.
    """
    return kind_class(name)(labels, options)
