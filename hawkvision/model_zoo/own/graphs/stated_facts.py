"""What exporters write beside a graph: the labels, the kind of task and the size of the input.

Ultralytics writes `names`, `task` and `imgsz` into the file's metadata. Hugging Face's Optimum puts `config.json`
beside the file.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx

from hawkvision.core.errors import ConfigError

CONFIG: Final = "config.json"
MAX_BYTES: Final = 10_000_000
"""The longest text that is read."""
_KINDS: Final[Mapping[str, str]] = {
    "classify": "classification",
    "ForImageClassification": "classification",
    "detect": "detection",
    "ForObjectDetection": "detection",
}
_REFUSED: Final[Mapping[str, str]] = {
    "segment": "segmentation",
    "Segmentation": "segmentation",
    "pose": "poses",
    "obb": "rotated boxes",
    "DepthEstimation": "depths",
}
"""Words at the end of a task or an architecture that no kind answers."""


@dataclass(frozen=True, slots=True)
class StatedFacts:
    """What is stated; None is not."""

    where: str
    labels: tuple[str, ...] | None = None
    """In the order of the model's outputs."""
    kind: str | None = None
    size: tuple[int, int] | None = None
    """Height and width."""
    refused: str | None = None
    """What the model is for, if no kind of task answers it."""

    def __str__(self) -> str:
        labels = None if self.labels is None else f"{len(self.labels)} labels from {self.labels[0]!r}"
        size = None if self.size is None else "size {}x{}".format(*self.size)
        found = [each for each in (labels, self.kind and f"kind {self.kind}", size) if each]
        return f"{', '.join(found)} ({self.where})" if found else ""


def stated_facts(model: onnx.ModelProto, path: Path) -> StatedFacts:
    """What the metadata of a file says, or `config.json` beside it."""
    written = {each.key: each.value for each in model.metadata_props if len(each.value) <= MAX_BYTES}
    if "names" in written:
        kind, refused = _task(written.get("task", ""))
        return StatedFacts(
            f"metadata of {path}", _labels(_literal(written["names"])), kind, _size(_literal(written.get("imgsz", ""))),
            refused,
        )  # fmt: skip
    config = _config(path.parent / CONFIG)
    kind, refused = _task(str(next(iter(_listed(config.get("architectures"))), "")))
    if kind == "classification" and config.get("problem_type") == "multi_label_classification":
        kind = "multi_label"
    labels = _labels(config.get("id2label"))
    return StatedFacts(str(path.parent / CONFIG), labels, kind, _size(config.get("image_size")), refused)


def refuse_others(stated: StatedFacts) -> None:
    """Raises: ConfigError for a model whose task no kind answers."""
    if stated.refused is not None:
        raise ConfigError(
            f"{stated.where} says that the model gives {stated.refused}; expected labels or boxes of objects"
        )


def _task(text: str) -> tuple[str | None, str | None]:
    """The kind of a task or an architecture, and what it gives if that is no kind; None where nothing is known."""
    kind = next((kind for word, kind in _KINDS.items() if text.endswith(word)), None)
    return kind, next((what for word, what in _REFUSED.items() if text.endswith(word)), None)


def _labels(names: Any) -> tuple[str, ...] | None:
    """Labels of a list, or of a table by index. Placeholders (`LABEL_0`) are none."""
    if isinstance(names, dict):
        table = {str(index): name for index, name in names.items()}
        names = [table.get(str(index)) for index in range(len(table))]
    labels = tuple(str(each).strip() for each in _listed(names) if each is not None)
    if not labels or len(set(labels)) != len(_listed(names)) or labels[0] == "LABEL_0":
        return None
    return labels if all(each.isprintable() and each for each in labels) else None


def _size(sides: Any) -> tuple[int, int] | None:
    found = [sides, sides] if isinstance(sides, int) else _listed(sides)
    return (found[0], found[1]) if len(found) == 2 and all(type(each) is int for each in found) else None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _literal(text: str) -> Any:
    """A value as Python or JSON writes it; None for other text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
