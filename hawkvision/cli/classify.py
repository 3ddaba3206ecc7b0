"""The command that asks an edge node what images show."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hawkvision.cli import options
from hawkvision.core.errors import ConfigError

if TYPE_CHECKING:
    from hawkvision.cli.answer_table import AnswerTable, CsvRows
    from hawkvision.client.batch import Outcome


def classify(
    images: Annotated[list[str], typer.Argument(help="Images, folders of them, or patterns such as 'shots/**/*.jpg'.")],
    min_accuracy: options.MinAccuracy = None,
    max_accuracy_drop: options.MaxAccuracyDrop = None,
    quality: options.Quality = None,
    min_confidence: options.MinConfidence = None,
    deadline_ms: options.DeadlineMs = None,
    on_miss: options.OnMiss = None,
    stream: options.Stream = None,
    top_k: options.TopK = 1,
    task: options.AskedTask = None,
    url: options.NodeUrl = "http://127.0.0.1:8080",
    wait: options.WaitSeconds = 0.0,
    api_key: options.ApiKey = None,
    ca: options.Ca = None,
    certificate: options.Certificate = None,
    certificate_key: options.CertificateKey = None,
    datagram: options.Datagram = False,
    concurrency: options.Concurrency = 4,
    out: options.CsvFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Classify images with an edge node."""
    from hawkvision.cli.answer_table import AnswerTable, csv_rows
    from hawkvision.client.blocking import Client
    from hawkvision.models.datasets import image_files

    files, table = image_files(expanded(images)), AnswerTable()
    with ExitStack() as stack:
        rows = None if out is None else stack.enter_context(csv_rows(out))
        client = stack.enter_context(
            Client(
                url, api_key=api_key, transport="datagram" if datagram else "http", ca=ca, certificate=certificate,
                certificate_key=certificate_key,
            )
        )  # fmt: skip
        if wait:
            client.wait_ready(wait)
        outcomes = client.classify_batch(
            files, concurrency=concurrency, min_accuracy=min_accuracy, max_accuracy_drop=max_accuracy_drop,
            quality=quality, min_confidence=min_confidence, deadline_ms=deadline_ms, on_miss=on_miss, stream=stream,
            top_k=top_k, task=task,
        )  # fmt: skip
        failures = report(_with_progress(files, outcomes), table, rows, as_json=as_json)
    if not as_json and out is None and table.rows:
        table.show()
    if out is not None:
        typer.echo(f"{len(files) - failures} answers and {failures} errors written to {out}")
    if failures:
        raise typer.Exit(1)


def _with_progress(files: Sequence[Path], outcomes: Iterable[Outcome]) -> Iterable[tuple[Path, Outcome]]:
    """Each file and its outcome, with a progress bar on a terminal if there are several."""
    from rich.console import Console
    from rich.progress import track

    on_stderr = Console(stderr=True)
    hidden = len(files) == 1 or not on_stderr.is_terminal
    shown = track(outcomes, "classifying", len(files), console=on_stderr, transient=True, disable=hidden)
    return zip(files, shown, strict=True)


def report(outcomes: Iterable[tuple[Path, Outcome]], table: AnswerTable, rows: CsvRows | None, *, as_json: bool) -> int:
    """Print or write each outcome, or add it to the table. Returns the number of errors."""
    failures = 0
    for file, outcome in outcomes:
        if isinstance(outcome, Exception):
            failures += 1
            typer.echo(f"error: {file}: {outcome}", err=True)
            if rows is not None:
                rows.failure(file, outcome)
            continue
        if rows is not None:
            rows.answer(file, outcome)
        if as_json:
            typer.echo(json.dumps({"image": str(file), **outcome.to_json()}))
        elif rows is None:
            table.add(file.name, outcome)
    return failures


def expanded(words: Sequence[str]) -> list[Path]:
    """The paths, with each pattern replaced by the files that match it, sorted by name.

    A word that names an existing file is no pattern.

    Raises:
        ConfigError: if a pattern matches no file.
    """
    paths: list[Path] = []
    for word in words:
        if Path(word).exists() or not glob.has_magic(word):
            paths.append(Path(word))
            continue
        found = sorted(glob.glob(word, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns
        if not found:
            raise ConfigError(f"{word}: no file matches this pattern")
        paths += map(Path, found)
    return paths
