"""Predictions that an owner made with the own program, read from a file.

CSV: a header and a row per image, with the columns `file`, `label` (or class index) and, if known, `probability`; or
`file` and a column of probabilities for each label. Commas, semicolons or tabs separate columns.
JSON lines: an object per image with `file`, and either `label` and `probability`, or the fields of the task kind's
answers, such as `objects`.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from hawkvision.core.errors import MALFORMED, ConfigError
from hawkvision.core.text_files import read_text
from hawkvision.core.types import Prediction
from hawkvision.models.image_sets.folder_classes import class_numbers
from hawkvision.tasks.kind import TaskKind

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "file": ("file", "filename", "filepath", "path", "image", "imagepath"),
    "label": ("label", "class", "prediction", "predicted", "predictedlabel", "index", "classname"),
    "probability": ("probability", "confidence", "score", "prob"),
}
"""Names of columns that are understood, without spaces, hyphens and underscores."""
SEPARATORS: Final = (",", ";", "\t")
SHOWN: Final = 200
"""Characters of a file that an error repeats."""
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
    # Not `splitlines`, which also splits at characters that JSON and file names may contain, such as U+2028.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not 1 <= len(lines) <= MAX_ROWS:
        raise ConfigError(f"{path}: expected 1 to {MAX_ROWS} lines, got {len(lines)}")
    if lines[0][1].lstrip().startswith("{"):
        return [_whole(path, number, line, kind) for number, line in lines]
    if lines[0][1].lstrip().startswith("["):
        raise ConfigError(f"{path}: expected a JSON object for each image on a line of its own, found an array")
    if kind.located:
        raise ConfigError(f"{path}: kind {kind.name!r} needs places: expected JSON lines with `file` and `objects`")
    return _rows(path, text, kind)


def _rows(path: Path, text: str, kind: TaskKind[Any]) -> list[Reference]:
    separator = max(SEPARATORS, key=text.lstrip("\n").partition("\n")[0].count)
    (_, header), *rows = _cells(path, text, separator)
    places = {name: _column(header, known) for name, known in COLUMNS.items()}
    each_label = [header.index(label) for label in kind.labels if label in header]
    if places["file"] is None or (places["label"] is None and len(each_label) < len(kind.labels)):
        found = ", ".join(header)[:SHOWN]
        raise ConfigError(f"{path}: expected a header with file, label and probability; found {found}")
    numbers = class_numbers(kind.labels)
    references: list[Reference] = []
    for number, row in rows:
        where = f"{path}: line {number}"
        values = {name: row[at].strip() for name, at in places.items() if at is not None and at < len(row)}
        if places["label"] is None and len(row) == len(header):
            shares = [_probability(row[at].strip(), where) for at in each_label]
            best = max(range(len(shares)), key=lambda index: shares[index])
            values |= {"label": kind.labels[best], "probability": str(shares[best])}
        if not values.get("file") or "label" not in values:
            raise ConfigError(f"{where}: expected a file and a label, got {separator.join(row)[:SHOWN]!r}")
        references.append(_reference(values["file"], values["label"], values.get("probability"), numbers, where))
    if not references:
        raise ConfigError(f"{path}: expected a row per image below the header")
    return references


def _reference(
    file: str, label: str, probability: str | None, numbers: Mapping[str, int], where: str
) -> LabelReference:
    return LabelReference(
        file, _index(label, numbers, where), None if not probability else _probability(probability, where)
    )


def _cells(path: Path, text: str, separator: str) -> list[tuple[int, list[str]]]:
    """The rows that are not blank, with the number of their last line."""
    reader = csv.reader((f"{line}\n" for line in text.split("\n")), delimiter=separator)
    try:
        return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ConfigError(f"{path}: line {reader.line_num}: {error}") from None


def _column(header: Sequence[str], known: Sequence[str]) -> int | None:
    names = [re.sub(r"[\s_-]", "", name).lower() for name in header]
    return next((names.index(name) for name in known if name in names), None)


def _index(text: str, numbers: Mapping[str, int], where: str) -> int:
    index = numbers.get(unicodedata.normalize("NFC", text), numbers.get(text.removesuffix(".0")))
    if index is None:
        indices = f" and no index below {max(numbers.values()) + 1}" if "0" in numbers else ""
        raise ConfigError(f"{where}: {text[:SHOWN]!r} is no label of the task{indices}")
    return index


def _probability(text: str, where: str) -> float:
    number, per_cent, _ = text.partition("%")
    try:
        value = float(number) / (100 if per_cent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"{where}: expected a probability of 0 to 1, got {text!r}")
    return value


def _whole(path: Path, number: int, line: str, kind: TaskKind[Any]) -> Reference:
    where = f"{path}: line {number}"
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        file = fields.pop("file", None)
        if not isinstance(file, str):
            raise ConfigError(f"{where}: expected a text `file`, got {file!r}")
        if not kind.located and isinstance(fields.get("label"), str | int):
            share = fields.get("probability", fields.get("confidence"))
            share = None if share is None else str(share)
            return _reference(file, str(fields["label"]), share, class_numbers(kind.labels), where)
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


def _confidences(prediction: Prediction) -> dict[int, float]:
    return {each["index"]: float(each["confidence"]) for each in _entries(prediction.to_json())}


def _entries(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The list of labelled things among the fields of an answer."""
    for value in fields.values():
        if isinstance(value, list | tuple) and all(isinstance(each, dict) for each in value):
            return list(value)
    return []
