"""Predictions that an owner made with the own program, read from a file.

CSV: a header and a row per image, with the columns `file`, `label` (or class index) and, if known, `probability`.
JSON lines: an object per image with `file`, and the fields of the task kind's answers, such as `objects`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from hawkvision.core.errors import MALFORMED, ConfigError
from hawkvision.core.text_files import read_text
from hawkvision.core.types import Prediction
from hawkvision.tasks.kind import TaskKind

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "file": ("file", "filename", "path", "image"),
    "label": ("label", "class", "prediction", "predicted", "index"),
    "probability": ("probability", "confidence", "score", "prob"),
}
"""Names of columns that are understood."""
MAX_ROWS: Final = 1_000_000
MAX_DIGITS: Final = 9
"""Of an index."""


@dataclass(frozen=True, slots=True)
class LabelReference:
    """The owner's label of an image, and its probability if it is known."""

    file: str
    index: int
    probability: float | None

    def difference(self, kind: TaskKind[Any], prediction: Prediction) -> float:  # noqa: ARG002
        """How far the served probability of this label is from the owner's; 1 or 0 if only labels are known."""
        served = {each["index"]: float(each["confidence"]) for each in _entries(prediction.to_json())}
        if self.probability is None:
            return float(not served or max(served, key=lambda index: served[index]) != self.index)
        return abs(served.get(self.index, 0.0) - self.probability)

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
    # Not `splitlines`, which also splits at characters that JSON and file names may contain, such as U+2028.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not 1 <= len(lines) <= MAX_ROWS:
        raise ConfigError(f"{path}: expected 1 to {MAX_ROWS} lines, got {len(lines)}")
    if lines[0][1].lstrip().startswith("{"):
        return [_whole(path, number, line, kind) for number, line in lines]
    if kind.located:
        raise ConfigError(f"{path}: kind {kind.name!r} needs places: expected JSON lines with `file` and `objects`")
    return _rows(path, text, kind)


def _rows(path: Path, text: str, kind: TaskKind[Any]) -> list[Reference]:
    (_, header), *rows = _cells(path, text)
    places = {name: _column(header, known) for name, known in COLUMNS.items()}
    missing = [name for name in ("file", "label") if places[name] is None]
    if missing:
        raise ConfigError(f"{path}: expected a header with file, label and probability; found {', '.join(header)}")
    found: list[Reference] = []
    for number, row in rows:
        where = f"{path}: line {number}"
        values = {name: row[at].strip() for name, at in places.items() if at is not None and at < len(row)}
        if not values.get("file") or "label" not in values:
            raise ConfigError(f"{where}: expected a file and a label, got {','.join(row)!r}")
        probability = values.get("probability")
        found.append(
            LabelReference(
                values["file"],
                _index(values["label"], kind.labels, where),
                None if not probability else _probability(probability, where),
            )
        )
    if not found:
        raise ConfigError(f"{path}: expected a row per image below the header")
    return found


def _cells(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """The rows that are not blank, with the number of their last line."""
    reader = csv.reader(f"{line}\n" for line in text.split("\n"))
    try:
        return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ConfigError(f"{path}: line {reader.line_num}: {error}") from None


def _column(header: Sequence[str], known: Sequence[str]) -> int | None:
    names = [name.strip().lower() for name in header]
    return next((names.index(name) for name in known if name in names), None)


def _index(text: str, labels: Sequence[str], where: str) -> int:
    if text in labels:
        return labels.index(text)
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and int(text) < len(labels):
        return int(text)
    raise ConfigError(f"{where}: {text!r} is no label of the task and no index below {len(labels)}")


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
    except (*MALFORMED, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _with_indices(fields: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """The fields, with an `index` in each entry that has only a `label`."""
    known = {label: index for index, label in enumerate(labels)}
    for entry in _entries(fields):
        label = entry.get("label")
        if "index" not in entry and isinstance(label, str) and label in known:
            entry["index"] = known[label]
    return fields


def _entries(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The list of labelled things among the fields of an answer."""
    for value in fields.values():
        if isinstance(value, list | tuple) and all(isinstance(each, dict) for each in value):
            return list(value)
    return []
