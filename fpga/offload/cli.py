"""`hawkvision plan`: which images to compute on an FPGA and which on the CPU, with the reasons."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from fpga.compiler.devices import FpgaDevice
from fpga.compiler.devices import device as device_of
from fpga.compiler.folding import Folding, read_folding
from fpga.compiler.folding_search import fastest, slowest_that_keeps_up
from fpga.offload.calibration import load_calibration, measure, save_calibration
from fpga.offload.cost_model import CpuWork, EstimateRange, FpgaProfile, LinkModel, Machine, Workload
from fpga.offload.fpga_profiles import cuts, profile_of_folding, profile_of_report
from fpga.offload.plan_output import show, to_json
from fpga.offload.plan_search import Objective, search
from fpga.offload.queueing import ServiceTime
from fpga.reports.build_report import read
from hawkvision.core.advice import advise
from hawkvision.core.errors import ConfigError
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.ir import IntegerGraph
from hawkvision.models.manifest import artifact_path, cache_dir, load_manifest, models_dir

REPORTS: Final = Path(__file__).parents[1] / "reports"
CORE_W: Final = EstimateRange(3.75, 6.25, 8.75)
"""Watts of a busy core: an estimate, thermal design power of server processors ÷ their cores."""
CLOCK_MHZ: Final = 120.0
"""Clock of designs that are not built; built ones reach about that."""
SPREAD: Final = 0.2
"""Coefficient of variation if only a mean is given."""
MEASURE_S: Final = 0.5

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@dataclass(frozen=True, slots=True)
class _PlanInputs:
    """The first workload's options on the command line; other workloads have None throughout."""

    folding: Path | None = None
    report: Path | None = None
    cpu_ms: float | None = None
    calibration: Path | None = None
    save: Path | None = None


@app.command()
def plan(
    task: Annotated[str, typer.Option(help="The task whose quantised variant is used.")] = "fashion_mnist",
    rate: Annotated[float, typer.Option(min=0.001, max=1e9, help="Images per second.")] = 100.0,
    deadline_ms: Annotated[float, typer.Option(min=0.001, help="Deadline for 99 of 100 images.")] = 20,
    power_w: Annotated[float | None, typer.Option(min=0, help="Limit for FPGA and busy cores; default: none.")] = None,
    variant: Annotated[str | None, typer.Option(help="The variant; default: the task's for FPGAs.")] = None,
    also: Annotated[list[str] | None, typer.Option(help="Another workload: TASK:RATE:DEADLINE_MS[:VARIANT].")] = None,
    device: Annotated[str, typer.Option(help="lfe5u-25f, lfe5u-45f, lfe5u-85f, or none.")] = "lfe5u-45f",
    folding: Annotated[Path | None, typer.Option(help="The first task's folding; default: built or searched.")] = None,
    report: Annotated[Path | None, typer.Option(help="The report of the first task's build.")] = None,
    clock_mhz: Annotated[float | None, typer.Option(min=1, max=1e4, help="Default: the build's, else 120.")] = None,
    cpu_ms: Annotated[float | None, typer.Option(min=1e-6, max=1e6, help="Per image; default: measured now.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="CPU times of the first task, measured earlier.")] = None,
    save: Annotated[Path | None, typer.Option("--save-calibration", help="Keep what is measured now.")] = None,
    cores: Annotated[int | None, typer.Option(min=1, max=1024, help="Number of cores; default: all usable.")] = None,
    core_w: Annotated[float | None, typer.Option(min=0, help="Watts of a busy core; default: 3.75 to 8.75.")] = None,
    board_w: Annotated[float, typer.Option(min=0, help="Watts of the FPGA's board beside the chip.")] = 0.0,
    link_mbit: Annotated[float, typer.Option(min=0.001, help="Mbit/s between host and FPGA.")] = 100.0,
    link_ms: Annotated[float, typer.Option(min=0, help="One-way delay beside the transfer.")] = 0.1,
    host_ms: Annotated[float, typer.Option(min=0, max=1e6, help="CPU time to send an image and read its reply.")] = 0.2,
    places: Annotated[int, typer.Option(min=1, max=200, help="Images on their way to the FPGA at once.")] = 16,
    objective: Annotated[str, typer.Option(help="What to minimise: cpu or energy.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    cache: Annotated[Path | None, typer.Option("--cache-dir", help="Folder of built models.")] = None,
) -> None:
    """Plan which images to compute on an FPGA and which on the CPU, and explain why."""
    if objective not in ("cpu", "energy"):
        raise ConfigError(f"--objective: expected cpu or energy, got {objective!r}")
    goal: Objective = "cpu" if objective == "cpu" else "energy"
    machine = Machine(
        cores=cores or len(os.sched_getaffinity(0)),
        core_w=CORE_W if core_w is None else EstimateRange(core_w, core_w, core_w),
        link=LinkModel(link_mbit * 1e6 / 8, link_ms * 1e-3, CpuWork.always(host_ms * 1e-3)),
        device=None if device == "none" else device_of(device),
        places=places,
        board_w=EstimateRange(board_w, board_w, board_w),
    )
    first = _PlanInputs(folding, report, cpu_ms, calibration, save)
    asked = [((task, rate, deadline_ms, variant), first), *((other, _PlanInputs()) for other in _others(also or ()))]
    workloads = [_workload(*each, inputs, machine, clock_mhz, cache) for each, inputs in asked]
    made = search(workloads, machine, goal, math.inf if power_w is None else power_w)
    if as_json:
        typer.echo(json.dumps(to_json(made, machine)))
    else:
        show(made, machine, Console())
    if not made.feasible:
        raise typer.Exit(1)


def _others(words: Sequence[str]) -> list[tuple[str, float, float, str | None]]:
    """(task, rate, deadline in ms, variant) of each `--also`."""
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


def _workload(
    task: str,
    rate: float,
    deadline_ms: float,
    variant: str | None,
    inputs: _PlanInputs,
    machine: Machine,
    clock_mhz: float | None,
    cache: Path | None,
) -> Workload:
    graph, variant = _graph(task, variant, cache)
    cpu = _cpu(graph, inputs, cache)
    profiles: tuple[FpgaProfile, ...] = ()
    if machine.device is not None:
        known = inputs.report or REPORTS / f"{task}-{variant}-{machine.device.name}.json"
        profiles = _profiles(variant, graph, machine.device, cpu, rate, inputs, known, clock_mhz)
    return Workload(f"{task}/{variant}", rate, deadline_ms / 1e3, cpu, profiles)


def _graph(task: str, variant: str | None, cache: Path | None) -> tuple[IntegerGraph, str]:
    variant = variant or load_manifest(task, models_dir(None, task)).cascade.fpga
    if variant is None:
        raise ConfigError(f"task {task!r} has no variant for FPGAs; name a quantised variant")
    path = artifact_path(cache_dir(cache), task, variant)
    if not path.is_file():
        build = advise("models build", "--task", task, variant, cache_dir=cache)
        raise ConfigError(f"{path}: no such model; build it with `{build}`")
    return graph_of(path), variant


def _cpu(graph: IntegerGraph, inputs: _PlanInputs, cache: Path | None) -> ServiceTime:
    """The service time of one image: given, measured earlier, or measured now with the compiled kernel."""
    if inputs.cpu_ms is not None and (inputs.calibration or inputs.save):
        raise ConfigError("--cpu-ms: it takes the place of a calibration, so give only one of them")
    if inputs.cpu_ms is not None:
        return ServiceTime.spread(inputs.cpu_ms * 1e-3, SPREAD)
    if inputs.calibration is not None:
        return load_calibration(inputs.calibration).one(str(inputs.calibration)).service
    from fpga.backends.reference import ReferenceBackend

    backend = ReferenceBackend(graph, cache=cache)
    try:
        found = measure(backend, "fpga-ref", MEASURE_S)
    finally:
        backend.close()
    if inputs.save is not None:
        save_calibration(found, inputs.save)
    return found.one("measured now").service


def _profiles(
    variant: str,
    graph: IntegerGraph,
    chip: FpgaDevice,
    cpu: ServiceTime,
    rate: float,
    inputs: _PlanInputs,
    known: Path,
    clock_mhz: float | None,
) -> tuple[FpgaProfile, ...]:
    """Designs to choose from: the given one; else the one built before, and the results of `_searched`."""
    clock_hz = (clock_mhz or CLOCK_MHZ) * 1e6
    designs: dict[str, Folding] = {}
    profiles: list[FpgaProfile] = []
    if inputs.folding is not None:
        designs[inputs.folding.name] = read_folding(inputs.folding)
    else:
        if inputs.report is not None or known.is_file():
            report = read(known)
            if inputs.report is not None or report.graph_sha256 == graph.sha256:
                built = profile_of_report(graph, report)
                profiles.append(built if clock_mhz is None else replace(built, clock_hz=clock_hz))
                profiles += cuts(graph, report.folding, profiles[0], cpu)
        if inputs.report is None:
            designs |= _searched(graph, chip, rate, clock_hz)
    for name, design in designs.items():
        whole = profile_of_folding(graph, design, f"{variant} {name}", clock_hz)
        profiles += [whole, *(cuts(graph, design, whole, cpu) if not profiles else ())]
    return tuple(profiles)


def _searched(graph: IntegerGraph, chip: FpgaDevice, rate: float, clock_hz: float) -> dict[str, Folding]:
    """The fastest folding that the device holds, and the smallest that keeps up with the rate, if there is one."""
    best = fastest(graph, chip)
    found = {"fastest": best.folding}
    if clock_hz / best.cycles > rate:
        found["smallest"] = slowest_that_keeps_up(graph, chip, rate, clock_hz / 1e6).folding
    return found
