"""The command that asks an edge node what images show."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from hawkvision.core.errors import ConfigError

if TYPE_CHECKING:
    from hawkvision.cli.answer_table import AnswerTable, CsvRows
    from hawkvision.client.batch import Outcome

ASK: Final = "What to ask"
NODE: Final = "The node"
OUTPUT: Final = "Output"


def classify(
    images: Annotated[list[str], typer.Argument(help="Images, folders of them, or patterns such as 'shots/**/*.jpg'.")],
    min_accuracy: Annotated[
        float | None, typer.Option(min=0, max=1, help="At least this share of answers right.", rich_help_panel=ASK)
    ] = None,
    max_accuracy_drop: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="At most this much less accurate than the reference stage.", rich_help_panel=ASK
        ),
    ] = None,
    quality: Annotated[
        Literal["fast", "balanced", "best"] | None,
        typer.Option(help="A target for callers who choose no number; default: balanced.", rich_help_panel=ASK),
    ] = None,
    min_confidence: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Escalate unless this answer is this surely right.", rich_help_panel=ASK),
    ] = None,
    deadline_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Milliseconds from the first byte received; default: none.", rich_help_panel=ASK),
    ] = None,
    on_miss: Annotated[
        Literal["degrade", "wait", "fail"] | None,
        typer.Option(
            help="When the deadline would pass: answer below target, wait, or fail; default: degrade.",
            rich_help_panel=ASK,
        ),
    ] = None,
    stream: Annotated[str | None, typer.Option(help="Name of the stream.", rich_help_panel=ASK)] = None,
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Classes to list in JSON.", rich_help_panel=ASK)] = 1,
    task: Annotated[str | None, typer.Option(help="The task; default: the node's.", rich_help_panel=ASK)] = None,
    url: Annotated[
        str, typer.Option(envvar="HAWKVISION_URL", help="Address of the edge node.", rich_help_panel=NODE)
    ] = "http://127.0.0.1:8080",
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            max=3600,
            metavar="SECONDS",
            help="Wait up to this long for a node that is starting; 0 does not wait.",
            rich_help_panel=NODE,
        ),
    ] = 0.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="HAWKVISION_API_KEY", help="The node's key.", rich_help_panel=NODE)
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            envvar="HAWKVISION_CA", help="PEM file of the node's certificate authority.", rich_help_panel=NODE
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            envvar="HAWKVISION_CERTIFICATE", help="This caller's certificate and key (PEM).", rich_help_panel=NODE
        ),
    ] = None,
    certificate_key: Annotated[
        Path | None, typer.Option(help="The certificate's key, if it is in another file.", rich_help_panel=NODE)
    ] = None,
    datagram: Annotated[
        bool,
        typer.Option("--datagram", help="Send images as datagrams, for links with packet loss.", rich_help_panel=NODE),
    ] = False,
    concurrency: Annotated[
        int, typer.Option(min=1, max=256, help="Images in flight at once.", rich_help_panel=NODE)
    ] = 4,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a CSV file with one row per image.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON answer per line.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Classify images with an edge node."""
    from rich.console import Console
    from rich.progress import track

    from hawkvision.cli.answer_table import AnswerTable, csv_rows
    from hawkvision.client.asynchronous import Transport
    from hawkvision.client.blocking import Client
    from hawkvision.models.datasets import image_files

    files = image_files(expanded(images))
    on_stderr = Console(stderr=True)
    transport: Transport = "datagram" if datagram else "http"
    table = AnswerTable()
    with ExitStack() as stack:
        rows = None
        if out is not None:
            try:
                rows = stack.enter_context(csv_rows(out))
            except OSError as error:
                raise ConfigError(f"--out: {out}: cannot write: {error.strerror}") from None
        client = stack.enter_context(
            Client(
                url,
                api_key=api_key,
                transport=transport,
                ca=ca,
                certificate=certificate,
                certificate_key=certificate_key,
            )
        )
        if wait:
            client.wait_ready(wait)
        outcomes = client.classify_batch(
            files,
            concurrency=concurrency,
            min_accuracy=min_accuracy,
            max_accuracy_drop=max_accuracy_drop,
            quality=quality,
            min_confidence=min_confidence,
            deadline_ms=deadline_ms,
            on_miss=on_miss,
            stream=stream,
            top_k=top_k,
            task=task,
        )
        hidden = len(files) == 1 or not on_stderr.is_terminal
        shown = track(outcomes, "classifying", len(files), console=on_stderr, transient=True, disable=hidden)
        failures = report(zip(files, shown, strict=True), table, rows, as_json=as_json)
    if not as_json and out is None and table.rows:
        table.show()
    if out is not None:
        typer.echo(f"{len(files) - failures} answers and {failures} errors written to {out}")
    if failures:
        raise typer.Exit(1)


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
