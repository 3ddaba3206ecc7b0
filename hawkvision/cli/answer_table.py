"""Answers of any kind as a table for a terminal, and as rows of a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hawkvision.core.errors import ConfigError
from hawkvision.core.types import Answer, target_fields
from hawkvision.system.terminal import on_one_line

WIDE: Final = 120
"""Terminal width from which on the model has its own column."""
LEAST_WIDTHS: Final = {"image": 10, "guarantee": 9, "model": 8, "target": 8, "label": 10, "answer": 10}
"""Columns that are shortened on narrow terminals, in this order, and their shortest widths."""
MOST_ROWS: Final = 200
"""Rows shown on a terminal; other outputs get all rows."""
BOX_COLUMNS: Final = ("x1", "y1", "x2", "y2")
"""Of an object: fractions of the width and height of the upright image."""
CSV_COLUMNS: Final = (
    "image",
    "label",
    "index",
    "confidence",
    "tier",
    "model",
    "degraded",
    "status",
    "status_reason",
    "basis",
    "max_drop",
    "watched_max_drop",
    "deadline_met",
    "total_ms",
    "error",
)


class AnswerTable:
    """Answers as rows of a table."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Answer]] = []

    def add(self, name: str, answer: Answer) -> None:
        """Add a row with the image's name."""
        self.rows.append((on_one_line(name), answer))

    def show(self, console: Console | None = None) -> None:
        """Print the table, within the width of a terminal, where columns with a single value are left out."""
        console = console or Console()
        shown = self.rows[:MOST_ROWS] if console.is_terminal else self.rows
        targets = {_target(answer) for _, answer in self.rows}
        hidden = set() if console.width >= WIDE else {"model"} | ({"target"} if len(targets) == 1 else set())
        rows = [_cells(name, answer) for name, answer in shown]
        titles = [title for title in rows[0] if title not in hidden] if rows else []
        widths = {title: max(cell_len(row[title]) for row in [*rows, {title: title}]) for title in titles}
        excess = sum(widths.values()) + 2 * (len(widths) - 1) - console.width
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for title, least in LEAST_WIDTHS.items():
            if title in widths and excess > 0:
                taken = min(excess, max(0, widths[title] - least))
                widths[title], excess = widths[title] - taken, excess - taken
        for title in titles:
            right = title in ("confidence", "ms")
            justify: Literal["left", "right"] = "right" if right else "left"
            table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis", width=widths[title])
        for row in rows:
            # As text, because names and labels may contain Rich markup.
            table.add_row(*(Text(row[title]) for title in titles))
        console.print(table)
        if len(shown) < len(self.rows):
            console.print(f"… and {len(self.rows) - len(shown)} more; `--out answers.csv` keeps all")


class CsvRows:
    """Writes each outcome at once as a row, so that an interrupted run keeps its rows."""

    def __init__(self, path: Path, writer: csv.DictWriter[str]) -> None:
        self._path = path
        self._writer = writer
        self._write([dict(zip(writer.fieldnames, writer.fieldnames, strict=True))])

    def _write(self, rows: Iterable[Mapping[str, object]]) -> None:
        try:
            self._writer.writerows(rows)
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def answer(self, image: Path, answer: Answer) -> None:
        """Write a row for an answer, or one for each of its objects."""
        guaranteed = answer.accuracy
        self._write(
            {
                "image": image,
                **found,
                "tier": answer.tier.value,
                "model": answer.model,
                "degraded": str(answer.degraded).lower(),
                "status": guaranteed.status.value,
                "status_reason": "" if guaranteed.status_reason is None else guaranteed.status_reason.value,
                "basis": "" if guaranteed.basis is None else guaranteed.basis.value,
                "max_drop": guaranteed.max_drop,
                "watched_max_drop": guaranteed.watched_max_drop,
                "deadline_met": "" if answer.deadline_met is None else str(answer.deadline_met).lower(),
                "total_ms": round(answer.timing_ms.total, 3),
            }
            for found in _found(answer)
        )

    def failure(self, image: Path, error: Exception) -> None:
        """Write a row for an image without an answer."""
        self._write([{"image": image, "error": " ".join(str(error).split())}])


@contextmanager
def csv_rows(path: Path, *, boxes: bool = False) -> Iterator[CsvRows]:
    """A CSV file (RFC 4180, UTF-8) with the columns `CSV_COLUMNS`, and with `boxes` also `BOX_COLUMNS`.

    Bytes of a file's name that are no UTF-8 are written as `\\udc..`.

    Raises:
        ConfigError: if it cannot be written, now or later.
    """
    try:
        file = path.open("w", newline="", encoding="utf-8", errors="backslashreplace", buffering=1)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        yield CsvRows(path, csv.DictWriter(file, (*CSV_COLUMNS, *BOX_COLUMNS) if boxes else CSV_COLUMNS))
    finally:
        with suppress(OSError):  # each row was written at once, or its failure was raised
            file.close()


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out: {path}: cannot write: {error.strerror}")


def _confidence(answer: Answer) -> float:
    """The probability that an answer is right, or how right it is expected to be; NaN if its kind states neither."""
    return float(getattr(answer.prediction, "confidence", math.nan))


def _found(answer: Answer) -> list[dict[str, object]]:
    """The rows of an answer: one per object, or one of the whole."""
    objects = answer.prediction.to_json().get("objects")
    if objects is None:
        index = getattr(answer.prediction, "index", "")
        return [{"label": answer.prediction.summary(), "index": index, "confidence": round(_confidence(answer), 6)}]
    return [
        {"label": each["label"], "index": each["index"], "confidence": each["confidence"]}
        | dict(zip(BOX_COLUMNS, each["box"], strict=True))
        for each in objects
    ] or [{}]


def _target(answer: Answer) -> str:
    return "=".join(str(part) for part in next(iter(target_fields(answer.accuracy.target).items())))


def _at_most(bound: float) -> str:
    """A bound in percent, rounded up so that it stays true."""
    return f"≤ {math.ceil(round(bound * 1e3, 6)) / 10:g}%"


def _cells(name: str, answer: Answer) -> dict[str, str]:
    """A row as a mapping of column titles to values."""
    guarantee = answer.accuracy.status.value
    if answer.accuracy.max_drop is not None:
        guarantee += f", drop {_at_most(answer.accuracy.max_drop)}"
    if answer.accuracy.max_disagreement is not None:
        guarantee += f", disagreement {_at_most(answer.accuracy.max_disagreement)}"
    if answer.degraded:
        guarantee += ", degraded"
    return {
        "image": name,
        "target": _target(answer),
        "label" if hasattr(answer.prediction, "label") else "answer": answer.prediction.summary(),
        "confidence": f"{_confidence(answer):.1%}",
        "tier": answer.tier.value,
        "model": answer.model,
        "ms": f"{answer.timing_ms.total:.1f}",
        "guarantee": guarantee,
    }
