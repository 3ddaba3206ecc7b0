"""Commands that pass on to other programs, the doctor and the demonstration."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from hawkvision.core.command_line import ARGUMENT, Program
from hawkvision.system.files import CacheDir


def _load(words: Sequence[str], prog: str) -> int:
    from loadgen.__main__ import main as loadgen_main

    return loadgen_main(words, prog=prog)


def _fpga(words: Sequence[str], prog: str) -> int:
    from fpga.cli import COMMANDS
    from hawkvision.core.command_line import run

    return run(COMMANDS, words, prog)


LOAD: Final = Program("Test a deployment from outside; `hawkvision load --help` lists the tests.", _load)
FPGA: Final = Program(
    "Put a quantised model on an FPGA: fold, estimate, build; `hawkvision fpga --help` lists the commands.", _fpga
)


def doctor(
    edge: Annotated[Path | None, Meta(description="Settings of an edge node that runs here.")] = None,
    dc: Annotated[Path | None, Meta(description="Settings of a datacenter tier that runs here.")] = None,
    tier: Annotated[
        list[Literal["edge", "dc"]] | None,
        Meta(description="A tier configured by the environment; default: edge, or the tiers with a file."),
    ] = None,
    json_: Annotated[bool, Meta(description="Print one JSON object per line and finding.")] = False,
) -> int:
    """Check whether this machine can run a node or a tier, with advice; exit status 1 if there are problems."""
    from dataclasses import asdict

    from hawkvision.doctor.checks import examine_datacenter, examine_edge
    from hawkvision.doctor.findings import Level

    asked = tier or ()
    examinations = []
    if edge is not None or "edge" in asked or not (asked or dc):
        examinations.append(("edge", examine_edge(edge)))
    if dc is not None or "dc" in asked:
        examinations.append(("dc", examine_datacenter(dc)))
    worst = 0
    for name, findings in examinations:
        for finding in findings:
            worst = max(worst, list(Level).index(finding.level))
            if json_:
                print(json.dumps({"tier": name, **asdict(finding)}))
                continue
            print(f"{finding.level.upper():8} {name}: {finding.check}: {finding.found}")
            if finding.advice is not None:
                print(f"{'':8} → {finding.advice}")
    return int(worst == list(Level).index(Level.PROBLEM))


def demo(
    cache_dir: CacheDir = None,
    images: Annotated[Path | None, Meta(description="A folder of images; default: scikit-image's.")] = None,
) -> int:
    """Start both tiers on this machine, classify real images at several targets, stop."""
    from hawkvision.cli import demo as demonstration
    from hawkvision.models import manifest

    program = Path(sys.argv[0]).name
    with contextlib.suppress(ValueError):  # the path relative to this folder
        program = str(Path(sys.argv[0]).absolute().relative_to(Path.cwd())) if "/" in sys.argv[0] else program
    return demonstration.run(manifest.cache_dir(cache_dir), images, program)


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
