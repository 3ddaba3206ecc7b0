"""`hawkvision plan`: where a task's images should be computed, what comes of it, and why."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from fpga.compiler.devices import FpgaDevice
from fpga.compiler.devices import device as device_of
from fpga.compiler.folding import Folding, parse_folding
from fpga.compiler.folding_search import fastest, slowest_that_keeps_up
from fpga.offload.calibration import load_calibration, measure, save_calibration
from fpga.offload.cost_model import CpuWork, EstimateRange, FpgaProfile, LinkModel, Machine, Workload
from fpga.offload.fpga_profiles import cuts, way_of_folding, way_of_report
from fpga.offload.plan_search import Objective, OffloadPlan, search
from fpga.offload.queueing import ServiceTime
from fpga.reports import build_report as reports
from hawkvision.errors import CompileError, ConfigError
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.ir import IntegerGraph
from hawkvision.manifest import artifact_path, cache_dir, load_manifest, models_dir

REPORTS: Final = Path(__file__).parents[1] / "reports"
CORE_W: Final = EstimateRange(3.75, 6.25, 8.75)
"""Watts of a busy core: an estimate, thermal design power of server processors ÷ their cores."""
CLOCK_MHZ: Final = 120.0
"""Of designs that were not built; those that were reach about that."""
SPREAD: Final = 0.2
"""Coefficient of variation assumed where only a mean is given."""
MEASURE_S: Final = 0.5

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def plan(
    task: Annotated[str, typer.Option(help="The task whose quantised rung is meant.")] = "fashion_mnist",
    rate: Annotated[float, typer.Option(min=0.001, max=1e9, help="Images per second.")] = 100.0,
    deadline_ms: Annotated[float, typer.Option(min=0.001, help="99 of 100 images are to be answered by then.")] = 20,
    power_w: Annotated[float | None, typer.Option(min=0, help="Of FPGA and busy cores; default: no limit.")] = None,
    variant: Annotated[str | None, typer.Option(help="Default: the ladder's for FPGAs.")] = None,
    also: Annotated[list[str] | None, typer.Option(help="TASK:RATE:DEADLINE_MS[:VARIANT], another workload.")] = None,
    device: Annotated[str, typer.Option(help="lfe5u-25f, lfe5u-45f, lfe5u-85f, or none.")] = "lfe5u-45f",
    folding: Annotated[Path | None, typer.Option(help="Of the first task; default: its build, or by search.")] = None,
    report: Annotated[Path | None, typer.Option(help="A build's report, of the first task.")] = None,
    clock_mhz: Annotated[float | None, typer.Option(min=1, max=1e4, help="Default: the build's, else 120.")] = None,
    cpu_ms: Annotated[float | None, typer.Option(min=1e-6, max=1e6, help="Per image; default: measured now.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="CPU times of the first task, measured earlier.")] = None,
    save: Annotated[Path | None, typer.Option("--save-calibration", help="Keep what is measured now.")] = None,
    cores: Annotated[int | None, typer.Option(min=1, max=1024, help="Default: all usable ones.")] = None,
    core_w: Annotated[float | None, typer.Option(min=0, help="Watts of a busy core; default: 3.75 to 8.75.")] = None,
    board_w: Annotated[float, typer.Option(min=0, help="What the FPGA's board draws beside the chip.")] = 0.0,
    link_mbit: Annotated[float, typer.Option(min=0.001, help="Between host and FPGA.")] = 100.0,
    link_ms: Annotated[float, typer.Option(min=0, help="One way, beside the transfer.")] = 0.1,
    host_ms: Annotated[
        float, typer.Option(min=0, max=1e6, help="CPU time to send an image and take its answer.")
    ] = 0.2,
    places: Annotated[int, typer.Option(min=1, max=200, help="Images on their way to the FPGA at once.")] = 16,
    objective: Annotated[str, typer.Option(help="What is to be small: cpu or energy.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    cache: Annotated[Path | None, typer.Option("--cache-dir", help="Where built models lie.")] = None,
) -> None:
    """Say which images to compute on an FPGA and which on the CPU, what comes of it, and why."""
    if objective not in ("cpu", "energy"):
        raise ConfigError(f"--objective: expected cpu or energy, got {objective!r}")
    goal: Objective = "cpu" if objective == "cpu" else "energy"
    chip = None if device == "none" else device_of(device)
    machine = Machine(
        cores=cores or len(os.sched_getaffinity(0)),
        core_w=CORE_W if core_w is None else EstimateRange(core_w, core_w, core_w),
        link=LinkModel(link_mbit * 1e6 / 8, link_ms * 1e-3, CpuWork.always(host_ms * 1e-3)),
        device=chip,
        places=places,
        board_w=EstimateRange(board_w, board_w, board_w),
    )
    workloads = []
    for number, (name, per_s, late_ms, rung) in enumerate([(task, rate, deadline_ms, variant), *_others(also or ())]):
        graph, rung = _graph(name, rung, cache)
        first = number == 0
        cpu = _cpu(graph, cpu_ms if first else None, calibration if first else None, save if first else None, cache)
        ways: tuple[FpgaProfile, ...] = ()
        if chip is not None:
            given = (folding, report) if first else (None, None)
            ways = _ways(name, rung, graph, chip, cpu, per_s, *given, clock_mhz)
        workloads.append(Workload(f"{name}/{rung}", per_s, late_ms / 1e3, cpu, ways))
    made = search(workloads, machine, goal, math.inf if power_w is None else power_w)
    if as_json:
        typer.echo(json.dumps(to_json(made, machine)))
    else:
        show(made, machine, Console())
    if not made.feasible:
        raise typer.Exit(1)


def _others(words: Any) -> list[tuple[str, float, float, str | None]]:
    found = []
    for word in words:
        parts = word.split(":")
        try:
            task, rate, deadline_ms = parts[0], float(parts[1]), float(parts[2])
        except (IndexError, ValueError):
            raise ConfigError(f"--also: expected TASK:RATE:DEADLINE_MS[:VARIANT], got {word!r}") from None
        if not (0 < rate < math.inf and deadline_ms > 0 and len(parts) <= 4):
            raise ConfigError(f"--also: expected a rate and a deadline above 0, got {word!r}")
        found.append((task, rate, deadline_ms, parts[3] if len(parts) == 4 else None))
    return found


def _graph(task: str, variant: str | None, cache: Path | None) -> tuple[IntegerGraph, str]:
    rung = variant or load_manifest(task, models_dir()).ladder.fpga
    if rung is None:
        raise ConfigError(f"the ladder of {task!r} has no rung for FPGAs; name a quantised variant")
    path = artifact_path(cache_dir(cache), task, rung)
    if not path.is_file():
        raise ConfigError(f"{path}: no such model; build it: hawkvision models build {rung} --task {task}")
    return graph_of(path), rung


def _cpu(
    graph: IntegerGraph, given_ms: float | None, calibration: Path | None, save: Path | None, cache: Path | None
) -> ServiceTime:
    """Of one image: given, measured earlier, or measured now with the compiled kernel."""
    if given_ms is not None and (calibration or save):
        raise ConfigError("--cpu-ms: it takes the place of a calibration, so give only one of them")
    if given_ms is not None:
        return ServiceTime.spread(given_ms * 1e-3, SPREAD)
    if calibration is not None:
        return load_calibration(calibration).one(str(calibration)).service
    from fpga.backends.reference import ReferenceBackend

    backend = ReferenceBackend(graph, cache=cache)
    try:
        found = measure(backend, "fpga-ref", MEASURE_S)
    finally:
        backend.close()
    if save is not None:
        save_calibration(found, save)
    return found.one("measured now").service


def _ways(
    task: str,
    variant: str,
    graph: IntegerGraph,
    chip: FpgaDevice,
    cpu: ServiceTime,
    rate: float,
    folding: Path | None,
    report: Path | None,
    clock_mhz: float | None,
) -> tuple[FpgaProfile, ...]:
    """Designs that could be loaded: the one given, else the one built before and two by search.

    Those two are the fastest that the device holds and the smallest that keeps up.
    """
    clock_hz = (clock_mhz or CLOCK_MHZ) * 1e6
    designs: dict[str, Folding] = {}
    ways = []
    if folding is not None:
        designs[folding.name] = parse_folding(_read(folding), str(folding))
    else:
        known = report or REPORTS / f"{task}-{variant}-{chip.name}.json"
        if report is not None or known.is_file():
            read = reports.read(known)
            if report is not None or read.graph_sha256 == graph.sha256:
                built = way_of_report(graph, read)
                ways.append(built if clock_mhz is None else replace(built, clock_hz=clock_hz))
                ways += cuts(graph, read.folding, ways[0], cpu)
        if report is None:
            best = fastest(graph, chip)
            designs["fastest"] = best.folding
            if clock_hz / best.cycles > rate:
                designs["smallest"] = slowest_that_keeps_up(graph, chip, rate, clock_hz / 1e6).folding
    for name, design in designs.items():
        whole = way_of_folding(graph, design, f"{variant} {name}", clock_hz)
        ways += [whole, *(cuts(graph, design, whole, cpu) if not ways else ())]
    return tuple(ways)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CompileError(f"{path}: {error.strerror}") from None


def to_json(made: OffloadPlan, machine: Machine) -> dict[str, Any]:
    """A plan for programs; what is infinite is null."""
    return {
        "feasible": made.feasible,
        "objective": made.objective,
        "cost": _finite(made.cost),
        "cost_bound": _finite(made.bound),
        "exhaustive": made.exhaustive,
        "placements_looked_at": made.looked_at,
        "cpu_seconds_per_second": made.forecast.cpu_load,
        "cores": machine.cores,
        "estimated_watts": _range(made.forecast.watts),
        "workloads": [
            {
                "name": workload.name,
                "rate_hz": workload.rate_hz,
                "deadline_ms": workload.deadline_s * 1e3,
                "cpu_ms": workload.cpu.mean_s * 1e3,
                "design": None if choice.way is None else choice.way.name,
                "share": choice.share,
                "fpga_share": found.fpga_share,
                "fpga_utilisation": found.fpga_load,
                "p50_ms": _finite(found.p50_s * 1e3),
                "p99_ms": _finite(found.p99_s * 1e3),
            }
            for workload, choice, found in zip(made.workloads, made.choices, made.forecast.workloads, strict=True)
        ],
        "rejected": [{"workload": r.workload, "choice": r.choice, "reason": r.reason} for r in made.rejected],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _range(of: EstimateRange) -> dict[str, float]:
    return {"low": of.low, "mid": of.mid, "high": of.high}


def show(made: OffloadPlan, machine: Machine, console: Console) -> None:
    """A plan for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("workload", "goes to", "on FPGA", "FPGA busy", "P50 ms", "P99 ms", "deadline ms"):
        table.add_column(title)
    for workload, choice, found in zip(made.workloads, made.choices, made.forecast.workloads, strict=True):
        table.add_row(
            f"{workload.name} {workload.rate_hz:g}/s",
            str(choice),
            f"{found.fpga_share:.1%}",
            f"{found.fpga_load:.1%}",
            f"{found.p50_s * 1e3:.2f}",
            f"{found.p99_s * 1e3:.2f}",
            f"{workload.deadline_s * 1e3:g}",
        )
    console.print(table)
    power, load = made.forecast.watts, made.forecast.cpu_load
    console.print(
        f"CPU: {load:.3f} of {machine.cores} cores busy ({load / machine.cores:.1%}). "
        f"Power: {power.mid:.2f} W, from {power.low:.2f} to {power.high:.2f}: an estimate."
    )
    known = {f"{way.name}: {way.source}" for w in made.workloads for way in w.ways if way.runnable}
    console.print("; ".join(sorted({*known, *(f"{w.name} on a core: {_times(w.cpu)}" for w in made.workloads)})))
    unit = "CPU-seconds a second" if made.objective == "cpu" else "W (estimate)"
    if made.feasible:
        exact = "none is better" if made.exhaustive else f"none can go below {made.bound:.4g}"
        console.print(f"Cheapest of {made.looked_at} placements within the bounds: {made.cost:.4g} {unit}; {exact}.")
    else:
        console.print("[bold]No placement keeps all bounds[/bold]; this one comes nearest to the deadlines.")
    if made.rejected:
        why = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("not chosen", "", "why"):
            why.add_column(title)
        for each in made.rejected:
            why.add_row(each.workload, each.choice, each.reason)
        console.print(why)


def _times(service: ServiceTime) -> str:
    return f"{service.mean_s * 1e3:.3g} ms ± {service.variation:.0%}"
