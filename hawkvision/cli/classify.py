"""The command that asks an edge node what images show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def classify(
    pictures: Annotated[list[Path], typer.Argument(help="Pictures, or folders of them.")],
    url: Annotated[str, typer.Option(envvar="HAWKVISION_URL", help="The edge node.")] = "http://127.0.0.1:8080",
    min_accuracy: Annotated[float | None, typer.Option(help="At least this share of answers right.")] = None,
    max_accuracy_drop: Annotated[float | None, typer.Option(help="At most this far below the best rung.")] = None,
    quality: Annotated[str | None, typer.Option(help="fast, balanced or best.")] = None,
    min_confidence: Annotated[float | None, typer.Option(help="Escalate unless this sure of this answer.")] = None,
    deadline_ms: Annotated[float | None, typer.Option(help="From the first byte received.")] = None,
    on_miss: Annotated[str | None, typer.Option(help="degrade, wait or fail.")] = None,
    stream: Annotated[str | None, typer.Option(help="Name of the stream.")] = None,
    top_k: Annotated[int, typer.Option(help="Classes to list.")] = 1,
    task: Annotated[str | None, typer.Option(help="Default: the node's.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="HAWKVISION_API_KEY", help="The node's key.")] = None,
    ca: Annotated[Path | None, typer.Option(envvar="HAWKVISION_CA", help="Who certified the node (PEM).")] = None,
    certificate: Annotated[
        Path | None, typer.Option(envvar="HAWKVISION_CERTIFICATE", help="This caller's certificate and key (PEM).")
    ] = None,
    certificate_key: Annotated[Path | None, typer.Option(help="The key, if it is in another file.")] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Send pictures as datagrams, for links that lose.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Pictures under way at once.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON answer a line.")] = False,
) -> None:
    """Ask an edge node what is on pictures."""
    from rich.console import Console
    from rich.progress import track

    from hawkvision.client import Client, Transport
    from hawkvision.demo import AnswerTable
    from hawkvision.pictures import picture_files

    files = picture_files(pictures)
    table = AnswerTable()
    failures = 0
    way: Transport = "lossy" if lossy else "http"
    with Client(
        url, api_key=api_key, transport=way, ca=ca, certificate=certificate, certificate_key=certificate_key
    ) as client:
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
        on_stderr = Console(stderr=True)
        hidden = len(files) == 1 or not on_stderr.is_terminal
        shown = track(outcomes, "classifying", len(files), console=on_stderr, transient=True, disable=hidden)
        for file, outcome in zip(files, shown, strict=True):
            if isinstance(outcome, Exception):
                failures += 1
                typer.echo(f"error: {file}: {outcome}", err=True)
            elif as_json:
                typer.echo(json.dumps({"picture": str(file), **outcome.to_json()}))
            else:
                table.add(file.name, outcome)
    if not as_json and table.rows:
        table.show()
    if failures:
        raise typer.Exit(1)
