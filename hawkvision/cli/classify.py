"""The commands that ask an edge node what images show."""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from hawkvision.cli.options import AskOptions
from hawkvision.core.errors import ConfigError
from hawkvision.system.terminal import on_one_line

if TYPE_CHECKING:
    from hawkvision.cli.answer_table import AnswerTable, CsvRows
    from hawkvision.client.batch import Outcome
    from hawkvision.client.request import ClassifyFields


def classify(given: AskOptions) -> int:
    """Classify images with an edge node."""
    return _ask(given, "classify_batch", top_k=1)


def detect(given: AskOptions) -> int:
    """Find objects in images with an edge node."""
    return _ask(given, "detect_batch")


def infer(given: AskOptions) -> int:
    """Ask an edge node about images, with a task of any kind."""
    return _ask(given, "infer_batch")


def _ask(
    given: AskOptions,
    call: Literal["classify_batch", "detect_batch", "infer_batch"],
    **more: Unpack[ClassifyFields],
) -> int:
    """Ask about all images, and print or write what comes."""
    from hawkvision.cli.answer_table import AnswerTable, csv_rows
    from hawkvision.client.blocking import Client
    from hawkvision.models.datasets import image_files

    files, table = image_files(expanded(given.images)), AnswerTable()
    with ExitStack() as stack:
        rows = None if given.out is None else stack.enter_context(csv_rows(given.out, boxes=call != "classify_batch"))
        client = stack.enter_context(
            Client(
                given.url, api_key=given.api_key, transport="datagram" if given.datagram else "http", ca=given.ca,
                certificate=given.certificate,
            )
        )  # fmt: skip
        if given.wait:
            client.wait_ready(given.wait)
        asked = getattr(client, call)(
            files, concurrency=given.concurrency, min_accuracy=given.min_accuracy,
            max_accuracy_drop=given.max_accuracy_drop, quality=given.quality, deadline_ms=given.deadline_ms,
            on_miss=given.on_miss, stream=given.stream, task=given.task, **more,
        )  # fmt: skip
        failures = report(_with_progress(files, asked), table, rows, as_json=given.json)
    if not given.json and given.out is None and table.rows:
        table.show()
    if given.out is not None:
        print(f"{len(files) - failures} answers and {failures} errors written to {given.out}")
    return int(failures > 0)


def _with_progress(files: Sequence[Path], outcomes: Iterable[Outcome]) -> Iterable[tuple[Path, Outcome]]:
    """Each file and its outcome, with a progress bar on a terminal if there are several."""
    from rich.console import Console
    from rich.progress import track

    on_stderr = Console(stderr=True)
    hidden = len(files) == 1 or not on_stderr.is_terminal
    shown = track(outcomes, "asking", len(files), console=on_stderr, transient=True, disable=hidden)
    return zip(files, shown, strict=True)


def report(outcomes: Iterable[tuple[Path, Outcome]], table: AnswerTable, rows: CsvRows | None, *, as_json: bool) -> int:
    """Print or write each outcome, or add it to the table. Returns the number of errors."""
    failures = 0
    for file, outcome in outcomes:
        if isinstance(outcome, Exception):
            failures += 1
            print(f"error: {on_one_line(f'{file}: {_reason(outcome)}')}", file=sys.stderr)
            if rows is not None:
                rows.failure(file, outcome)
            continue
        if rows is not None:
            rows.answer(file, outcome)
        if as_json:
            print(json.dumps({"image": str(file), **outcome.to_json()}))
        elif rows is None:
            table.add(file.name, outcome)
    return failures


def _reason(error: Exception) -> str:
    """Why there is no answer, for a line that names the file."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def expanded(words: Sequence[str]) -> list[Path]:
    """The paths, with each pattern replaced by the files that match it, sorted by name.

    A word that names an existing file is no pattern.

    Raises:
        ConfigError: if a pattern matches no file, or a word is empty.
    """
    paths: list[Path] = []
    for word in words:
        if not word:  # a variable that is not set, and `Path("")` is the working folder
            raise ConfigError("images: expected files, folders or patterns, got an empty word")
        if Path(word).exists() or not glob.has_magic(word):
            paths.append(Path(word))
            continue
        found = sorted(glob.glob(word, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns
        if not found:
            raise ConfigError(f"{word}: no file matches this pattern")
        paths += map(Path, found)
    return paths
