"""Predictions that an owner made with the own program, read from a file.

CSV: a header and a row per image, with the columns `file`, `label` (or class index) and, if known, `probability`.
JSON lines: an object per image with `file`, and the fields of the task kind's answers, such as `objects`.
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.core.text_files import read_text
from hawkvision.core.types import Prediction
from hawkvision.models.image_sets.folder_classes import class_numbers, expected_classes
from hawkvision.tasks.kind import TaskKind

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "file": ("file", "filename", "path", "image"),
    "label": ("label", "class", "prediction", "predicted", "index"),
    "probability": ("probability", "confidence", "score", "prob"),
}
"""Names of columns that are understood."""
MAX_ROWS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LabelReference:
    """The owner's label of an image, and its probability if it is known."""

    file: str
    index: int
    probability: float | None

    def difference(self, kind: TaskKind[Any], prediction: Prediction) -> float:  # noqa: ARG002
        """How far the served probability of this label is from the owner's; 1 or 0 if only labels are known."""
        if self.probability is None:
            return float(not self.same_label(prediction))
        return abs(_confidences(prediction).get(self.index, 0.0) - self.probability)

    def same_label(self, prediction: Prediction) -> bool:
        """Whether the label that is served as the most probable is the owner's."""
        served = _confidences(prediction)
        return bool(served) and max(served, key=lambda index: served[index]) == self.index

    def described(self, kind: TaskKind[Any]) -> str:
        """The owner's prediction, for people."""
        probability = "" if self.probability is None else f" {self.probability:.3f}"
        return f"{kind.labels[self.index]}{probability}"


@dataclass(frozen=True, slots=True)
class WholeReference:
    """The owner's whole prediction of an image."""

    file: str
    prediction: Prediction

    def difference(self, kind: TaskKind[Any], prediction: Prediction) -> float:
        """The task kind's disagreement of both."""
        return float(kind.disagreement(prediction, self.prediction))

    def described(self, kind: TaskKind[Any]) -> str:  # noqa: ARG002 - it has its labels
        """The owner's prediction, for people."""
        return summary(self.prediction)


Reference = LabelReference | WholeReference


def summary(prediction: Prediction) -> str:
    """A prediction in a few words: its first labels with their probabilities."""
    entries = _entries(prediction.to_json())[:3]
    return ", ".join(f"{each['label']} {float(each['confidence']):.3f}" for each in entries) or "nothing"


def read_reference(path: Path, kind: TaskKind[Any]) -> list[Reference]:
    """All predictions of a file.

    Raises:
        ConfigError: naming the file, the line and what was expected there.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not 1 <= len(lines) <= MAX_ROWS:
        raise ConfigError(f"{path}: expected 1 to {MAX_ROWS} lines, got {len(lines)}")
    if lines[0].lstrip().startswith("{"):
        return [_whole(path, number, line, kind) for number, line in enumerate(lines, 1)]
    if kind.located:
        raise ConfigError(f"{path}: kind {kind.name!r} needs places: expected JSON lines with `file` and `objects`")
    return _rows(path, lines, kind)


def _rows(path: Path, lines: Sequence[str], kind: TaskKind[Any]) -> list[Reference]:
    header, *rows = csv.reader(lines)
    places = {name: _column(header, known) for name, known in COLUMNS.items()}
    missing = [name for name in ("file", "label") if places[name] is None]
    if missing:
        raise ConfigError(f"{path}: expected a header with file, label and probability; found {', '.join(header)}")
    found: list[Reference] = []
    numbers = class_numbers(kind.labels)
    for number, row in enumerate(rows, 2):
        where = f"{path}: line {number}"
        values = {name: row[at].strip() for name, at in places.items() if at is not None and at < len(row)}
        if not values.get("file") or "label" not in values:
            raise ConfigError(f"{where}: expected a file and a label, got {','.join(row)!r}")
        probability = values.get("probability")
        found.append(
            LabelReference(
                values["file"],
                _index(values["label"], numbers, where),
                None if not probability else _probability(probability, where),
            )
        )
    if not found:
        raise ConfigError(f"{path}: expected a row per image below the header")
    return found


def _column(header: Sequence[str], known: Sequence[str]) -> int | None:
    names = [name.strip().lower() for name in header]
    return next((names.index(name) for name in known if name in names), None)


def _index(text: str, numbers: Mapping[str, int], where: str) -> int:
    index = numbers.get(unicodedata.normalize("NFC", text))
    if index is None:
        raise ConfigError(f"{where}: {text!r} is no class; expected {expected_classes(numbers)}")
    return index


def _probability(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"{where}: expected a probability of 0 to 1, got {text!r}")
    return value


def _whole(path: Path, number: int, line: str, kind: TaskKind[Any]) -> WholeReference:
    where = f"{path}: line {number}"
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        file = fields.pop("file", None)
        if not isinstance(file, str):
            raise ConfigError(f"{where}: expected a text `file`, got {file!r}")
        reply = msgspec.json.encode({"confidence": 0.0} | _with_indices(fields, kind.labels))
        return WholeReference(file, kind.decode_reply(reply))
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _with_indices(fields: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """The fields, with an `index` in each entry that has only a `label`."""
    known = {label: index for index, label in enumerate(labels)}
    for entry in _entries(fields):
        if "index" not in entry and entry.get("label") in known:
            entry["index"] = known[entry["label"]]
    return fields


def _confidences(prediction: Prediction) -> dict[int, float]:
    return {each["index"]: float(each["confidence"]) for each in _entries(prediction.to_json())}


def _entries(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The list of labelled things among the fields of an answer."""
    for value in fields.values():
        if isinstance(value, list | tuple) and all(isinstance(each, dict) for each in value):
            return list(value)
    return []
