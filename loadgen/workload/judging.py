"""How right a prediction is: 1 − the loss of its kind of task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from hawkvision.core.types import Prediction
from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.models.manifest import load_labels, load_manifest
from hawkvision.tasks.kind import TaskKind, Truth
from hawkvision.tasks.registry import CLASSIFY_PATH, DEEPSTACK_PATH, INFER_PATH, KIND_OF_FORM, task_kind

Label: TypeAlias = tuple[list[int], list[list[float]] | None]
"""The label of an image on its way to another process: classes, and boxes if there are some (`Annotation`)."""


class KindSpec(msgspec.Struct, frozen=True):
    """A task's kind on its way to another process."""

    name: str
    labels: list[str]
    options: dict[str, Any] = {}

    def open(self) -> TaskKind[Any]:
        """The kind itself.

        Raises:
            ManifestError: if it is not installed here, or refuses the options.
        """
        return task_kind(self.name, self.labels, self.options)

    def form(self) -> str:
        """The path of the API for tasks of this kind: its typed form, or the one for any."""
        forms = (path for path, kind in KIND_OF_FORM.items() if kind == self.name and path != DEEPSTACK_PATH)
        return next(forms, INFER_PATH)


def kind_of_task(task: str, models: Path) -> KindSpec | None:
    """The kind that a task's manifest names; None if there is no manifest here.

    Raises:
        ManifestError: if the manifest is broken.
    """
    if not (models / task / "manifest.toml").is_file():
        return None
    manifest = load_manifest(task, models)
    return KindSpec(manifest.kind, list(load_labels(manifest, models)), dict(manifest.options))


def path_of(kind: KindSpec | None) -> str:
    """Where images go: to the kind's typed form, or if the task is not known here to that of classifications."""
    return CLASSIFY_PATH if kind is None else kind.form()


def written(annotations: Iterable[Annotation]) -> list[Label]:
    """Labels on their way to another process."""
    return [(each.classes.tolist(), None if each.boxes is None else each.boxes.tolist()) for each in annotations]


def truths(kind: TaskKind[Any], labels: Sequence[Label]) -> list[Truth]:
    """Labels as the loss of the kind takes them.

    Raises:
        ConfigError: if the kind cannot be judged by labels of this form.
    """
    return kind.truths(
        Annotation(
            np.array(classes, np.int64),
            None if boxes is None else np.array(boxes, np.float32).reshape(-1, 4),
        )
        for classes, boxes in labels
    )


def rightness(
    kind: TaskKind[Any] | None, prediction: Prediction | None, index: int | None, truth: Truth
) -> float | bool | None:
    """1 − the loss of an answer, true or false where that is 1 or 0; None if it cannot be judged.

    A server that answers with nothing but the index of a class is judged by that.
    """
    if kind is not None and prediction is not None:
        right = 1.0 - kind.loss(prediction, truth)
        return bool(right) if right in (0.0, 1.0) else right
    if index is None or not isinstance(truth, int | np.integer):
        return None
    return bool(index == truth)


def read_prediction(kind: TaskKind[Any] | None, body: bytes) -> Prediction | None:
    """The prediction in the JSON of an answer; None if it has none of this kind."""
    if kind is None:
        return None
    try:
        found: Prediction = msgspec.json.decode(body, type=kind.prediction)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found
