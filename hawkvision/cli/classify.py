"""The commands that ask an edge node what images show."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Unpack

import typer

from hawkvision.cli import options
from hawkvision.core.errors import ConfigError
from hawkvision.system.unicode_fallback import on_one_line

if TYPE_CHECKING:
    from hawkvision.cli.answer_table import AnswerTable, CsvRows
    from hawkvision.client.batch import Outcome
    from hawkvision.client.request import ClassifyFields


Images = Annotated[list[str], typer.Argument(help="Images, folders of them, or patterns such as 'shots/**/*.jpg'.")]
Draw = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Write the images with boxes into this folder; of one image, into this file.",
        rich_help_panel="Output",
    ),
]


class AskOptions(NamedTuple):
    """The options of the commands that ask, except for the fields of the request."""

    images: list[str]
    url: str
    wait: float
    api_key: str | None
    ca: Path | None
    certificate: Path | None
    certificate_key: Path | None
    datagram: bool
    concurrency: int
    out: Path | None
    as_json: bool
    draw: Path | None = None


def classify(
    images: Images,
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
    given = AskOptions(
        images, url, wait, api_key, ca, certificate, certificate_key, datagram, concurrency, out, as_json
    )
    _ask(
        given, "classify_batch", min_accuracy=min_accuracy, max_accuracy_drop=max_accuracy_drop, quality=quality,
        min_confidence=min_confidence, deadline_ms=deadline_ms, on_miss=on_miss, stream=stream, top_k=top_k, task=task,
    )  # fmt: skip


def detect(
    images: Images,
    min_accuracy: options.MinAccuracy = None,
    max_accuracy_drop: options.MaxAccuracyDrop = None,
    quality: options.Quality = None,
    min_confidence: options.MinConfidence = None,
    deadline_ms: options.DeadlineMs = None,
    on_miss: options.OnMiss = None,
    stream: options.Stream = None,
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
    draw: Draw = None,
) -> None:
    """Find objects in images with an edge node, and draw their boxes."""
    given = AskOptions(
        images, url, wait, api_key, ca, certificate, certificate_key, datagram, concurrency, out, as_json, draw
    )
    _ask(
        given, "detect_batch", min_accuracy=min_accuracy, max_accuracy_drop=max_accuracy_drop, quality=quality,
        min_confidence=min_confidence, deadline_ms=deadline_ms, on_miss=on_miss, stream=stream, task=task,
    )  # fmt: skip


def infer(
    images: Images,
    min_accuracy: options.MinAccuracy = None,
    max_accuracy_drop: options.MaxAccuracyDrop = None,
    quality: options.Quality = None,
    min_confidence: options.MinConfidence = None,
    deadline_ms: options.DeadlineMs = None,
    on_miss: options.OnMiss = None,
    stream: options.Stream = None,
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
    """Ask an edge node about images, with a task of any kind."""
    given = AskOptions(
        images, url, wait, api_key, ca, certificate, certificate_key, datagram, concurrency, out, as_json
    )
    _ask(
        given, "infer_batch", min_accuracy=min_accuracy, max_accuracy_drop=max_accuracy_drop, quality=quality,
        min_confidence=min_confidence, deadline_ms=deadline_ms, on_miss=on_miss, stream=stream, task=task,
    )  # fmt: skip


def _ask(
    given: AskOptions,
    call: Literal["classify_batch", "detect_batch", "infer_batch"],
    **fields: Unpack[ClassifyFields],
) -> None:
    """Ask about all images, and print, write and draw what comes."""
    from hawkvision.cli.answer_table import AnswerTable, csv_rows
    from hawkvision.cli.drawn_answers import drawing, drawing_files
    from hawkvision.client.blocking import Client
    from hawkvision.models.datasets import image_files

    files, table = image_files(expanded(given.images)), AnswerTable()
    drawn = None if given.draw is None else drawing_files(given.draw, files)
    with ExitStack() as stack:
        rows = None if given.out is None else stack.enter_context(csv_rows(given.out, boxes=call != "classify_batch"))
        client = stack.enter_context(
            Client(
                given.url, api_key=given.api_key, transport="datagram" if given.datagram else "http", ca=given.ca,
                certificate=given.certificate, certificate_key=given.certificate_key,
            )
        )  # fmt: skip
        if given.wait:
            client.wait_ready(given.wait)
        outcomes = _with_progress(files, getattr(client, call)(files, concurrency=given.concurrency, **fields))
        failures = report(drawing(outcomes, drawn), table, rows, as_json=given.as_json)
    if not given.as_json and given.out is None and table.rows:
        table.show()
    if given.out is not None:
        typer.echo(f"{len(files) - failures} answers and {failures} errors written to {given.out}")
    if failures:
        raise typer.Exit(1)


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
            typer.echo(f"error: {on_one_line(f'{file}: {_reason(outcome)}')}", err=True)
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
