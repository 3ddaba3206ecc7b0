"""Commands for the keys of callers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

keys_app = typer.Typer(no_args_is_help=True, help="Keys of callers: a file that servers take with --keys-file.")

KeysFile = Annotated[Path, typer.Option("--file", envvar="HAWKVISION_EDGE_KEYS_FILE", help="The file of keys.")]


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="Whose key it is, for logs and metrics.")],
    file: KeysFile,
    scope: Annotated[
        list[str],
        typer.Option(metavar="infer|observe|operate", help="What the key allows; may be given several times."),
    ],
    rate: Annotated[float | None, typer.Option(help="Requests a second; default: any number.")] = None,
) -> None:
    """Make a key and print it, this once; the file keeps only what it can be recognised by."""
    from hawkvision.core.errors import ConfigError
    from hawkvision.servers.keyfile import Scope, add_key

    unknown = sorted(set(scope) - set(Scope))
    if unknown:
        raise ConfigError(f"--scope: expected {', '.join(Scope)}, got {unknown[0]!r}")
    typer.echo(add_key(file, name, map(Scope, scope), rate))


@keys_app.command("list")
def keys_list(file: KeysFile) -> None:
    """Show the keys of a file: names, scopes, rates."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision.servers.keyfile import read_keys

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "scopes", "requests/s", "sha256"):
        table.add_column(title)
    for entry in read_keys(file):
        rate = "" if entry.rate is None else f"{entry.rate:g}"
        table.add_row(entry.name, " ".join(sorted(entry.scopes)), rate, entry.digest.hex()[:12])
    Console().print(table)


@keys_app.command("remove")
def keys_remove(name: Annotated[str, typer.Argument(help="Of the key to forget.")], file: KeysFile) -> None:
    """Forget a key: servers that read the file refuse it within seconds."""
    from hawkvision.servers.keyfile import remove_key

    remove_key(file, name)
