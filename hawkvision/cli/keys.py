"""`hawkvision keys`: the keys of callers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hawkvision.core.command_line import ARGUMENT

KeysFile = Annotated[Path, Meta(description="The key file.", extra={"variable": "HAWKVISION_EDGE_KEYS_FILE"})]


def keys_add(
    name: Annotated[str, Meta(description="Name of the key's owner, for logs and metrics.", extra=ARGUMENT)],
    file: KeysFile,
    scope: Annotated[list[str], Meta(description="What the key allows; may be repeated.")],
    rate: Annotated[float | None, Meta(description="Requests per second; default: no limit.")] = None,
) -> None:
    """Make a key and print it once; the file stores only its digests."""
    from hawkvision.core.errors import ConfigError
    from hawkvision.servers.keyfile import Scope, add_key

    unknown = sorted(set(scope) - set(Scope))
    if unknown:
        raise ConfigError(f"--scope: expected {', '.join(Scope)}, got {unknown[0]!r}")
    print(add_key(file, name, map(Scope, scope), rate))


def keys_list(file: KeysFile) -> None:
    """Show the keys of a file: names, scopes, rates."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision.servers.keyfile import read_keys

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "scopes", "requests/s", "sha256"):
        table.add_column(title)
    for name, entry in read_keys(file).items():
        rate = "" if entry.rate is None else f"{entry.rate:g}"
        table.add_row(name, " ".join(sorted(entry.scopes)), rate, entry.sha256[:12])
    Console().print(table)


def keys_remove(name: Annotated[str, Meta(description="Name of the key.", extra=ARGUMENT)], file: KeysFile) -> None:
    """Remove a key; servers that use the file refuse it within seconds."""
    from hawkvision.servers.keyfile import remove_key

    remove_key(file, name)
