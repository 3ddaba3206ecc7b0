"""Commands that pass on to other programs, the doctor and the demonstration."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hawkvision.cli.options import CacheDir


def load_test(context: typer.Context) -> None:
    """Test a deployment from outside; `hawkvision load --help` lists the tests."""
    from loadgen.__main__ import main as loadgen_main

    sys.exit(loadgen_main(context.args, prog="hawkvision load"))


def fpga_command(context: typer.Context) -> None:
    """Put a quantised model on an FPGA: fold, estimate, build; `hawkvision fpga --help` lists the commands."""
    from fpga.cli import app as fpga_app

    fpga_app(context.args, prog_name="hawkvision fpga", standalone_mode=True)


def plan_command(context: typer.Context) -> None:
    """Plan which images an FPGA computes and which the CPU; see `hawkvision plan --help`."""
    from fpga.offload.cli import app as plan_app

    plan_app(context.args, prog_name="hawkvision plan")


def doctor(
    edge: Annotated[Path | None, typer.Option(help="Settings of an edge node that runs here.")] = None,
    dc: Annotated[Path | None, typer.Option(help="Settings of a datacenter tier that runs here.")] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="edge|dc", help="A tier configured by the environment; default: edge, or the tiers with a file."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line and finding.")] = False,
) -> None:
    """Check whether this machine can run a node or a tier, with advice; exit status 1 if there are problems."""
    from dataclasses import asdict

    from hawkvision.doctor.checks import examine_datacenter, examine_edge
    from hawkvision.doctor.findings import Level

    asked = set(tier or ())
    if asked - {"edge", "dc"}:
        raise typer.BadParameter(f"--tier is edge or dc, got {', '.join(sorted(asked - {'edge', 'dc'}))}")
    examinations = []
    if edge is not None or "edge" in asked or not (asked or dc):
        examinations.append(("edge", examine_edge(edge)))
    if dc is not None or "dc" in asked:
        examinations.append(("dc", examine_datacenter(dc)))
    worst = 0
    for name, findings in examinations:
        for finding in findings:
            worst = max(worst, list(Level).index(finding.level))
            if as_json:
                typer.echo(json.dumps({"tier": name, **asdict(finding)}))
                continue
            typer.echo(f"{finding.level.upper():8} {name}: {finding.check}: {finding.found}")
            if finding.advice is not None:
                typer.echo(f"{'':8} → {finding.advice}")
    if worst == list(Level).index(Level.PROBLEM):
        raise typer.Exit(1)


def demo(
    cache_dir: CacheDir = None,
    images: Annotated[Path | None, typer.Option(help="A folder of images; default: scikit-image's.")] = None,
) -> None:
    """Start both tiers on this machine, classify real images at several targets, stop."""
    from hawkvision.cli import demo as demonstration
    from hawkvision.models import manifest

    program = Path(sys.argv[0]).name
    with contextlib.suppress(ValueError):  # the path relative to this folder
        program = str(Path(sys.argv[0]).absolute().relative_to(Path.cwd())) if "/" in sys.argv[0] else program
    raise typer.Exit(demonstration.run(manifest.cache_dir(cache_dir), images, program))
