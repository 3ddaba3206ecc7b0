"""One build from graph to report: emit, synthesise, place and route, prove the netlist, count switching, estimate.

The build's folder keeps what each tool read and wrote.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fpga.compiler.devices import FpgaDevice
from fpga.compiler.ecp5_tools import BITSTREAM, PACKER, PLACER
from fpga.compiler.emit import TOP, emit
from fpga.compiler.folding import Folding, check_folding, cycles_of, format_folding, interval
from fpga.compiler.resource_model import of_graph
from fpga.compiler.synthesis import (
    Attempt,
    RoutingOptions,
    SynthesisResult,
    best_and_median,
    pack,
    place_and_route,
    synthesise,
)
from fpga.compiler.toolchain import Say, version_of
from fpga.reports import energy
from fpga.reports.build_report import BuildReport, NetlistProof, SwitchingCounts
from fpga.simulation.cell_layout import LANES
from fpga.simulation.netlist_simulation import NetlistSimulation, SwitchingActivity, Words
from fpga.simulation.rtl_simulation import Simulation
from hawkvision.core.errors import CompileError
from hawkvision.core.types import Pixels
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph

Logits: TypeAlias = NDArray[np.int32]

IMAGES_PER_LANE: Final = 4
"""Through the netlist, back to back, so that the pipeline is in its steady state during the second."""
SIMULATED_IMAGES: Final = 4
LOCK: Final = ".lock"
"""File in a build's folder that is locked while the build runs."""
UNCONSTRAINED: Final = (
    "No pin file: but for the clock, ports lie wherever the placer put them, and timing to and from them is not "
    "constrained."
)


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """The parameters of a build."""

    graph: IntegerGraph
    task: str
    variant: str
    device: FpgaDevice
    folding: Folding
    images: Pixels
    """(n, height, width, planes): prove the netlist and give its switching; repeated if there are few."""
    images_from: str
    command: str
    folder: Path
    routing: RoutingOptions = field(default_factory=RoutingOptions)


def build(order: BuildOrder, say: Say) -> BuildReport:
    """Run a build; `say` receives a line for each step.

    Raises:
        CompileError: if the folder cannot be written to or is in use, a tool is missing or fails, no seed routes, or
            the netlist's logits differ from the reference (a defect of ours or of a tool).
    """
    check_folding(order.graph, order.folding)
    with _locked(order.folder):
        return _build(order, say)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other builds out of the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise CompileError(f"{folder}: cannot write the design: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompileError(f"{folder}: another build works there; give this one another folder") from None
        yield


def _build(order: BuildOrder, say: Say) -> BuildReport:
    tools = {name: version_of(name, say) for name in ("yosys", PLACER, PACKER)}
    sources = emit(order.graph, order.folding, order.folder)
    (order.folder / "folding.json").write_bytes(format_folding(order.folding))
    (order.folder / BITSTREAM).unlink(missing_ok=True)  # an earlier build's
    made = _synthesise(order, sources, say)
    attempts = _route(order, made, say)
    say("running the netlist")
    logits, activity = run_netlist(order.graph, made.netlist, order.images)
    proof = _compare(order, logits, activity, made)
    if proof.differing:
        raise CompileError(f"netlist: {proof.differing} of {proof.logits} logits differ from the reference")
    best, clock = best_and_median(attempts)
    assert best.placed is not None, "the fastest attempt has a design"
    assert best.result.mhz is not None
    pack(made, best.result.seed, say)  # only a proved netlist gets a bitstream
    simulated, latency = _simulate(order)
    return BuildReport(
        task=order.task,
        variant=order.variant,
        graph_sha256=order.graph.sha256,
        device=order.device.name,
        command=order.command,
        tools=tools,
        folding=order.folding,
        multipliers_in_use=sum(fold.multipliers for fold in order.folding.stages.values()),
        multiplications=order.graph.multiplications,
        available=order.device.resources,
        estimated=of_graph(order.graph, order.folding),
        synthesised=made.resources,
        placed=best.placed,
        target_mhz=order.routing.target_mhz or order.device.target_mhz,
        seeds=tuple(attempt.result for attempt in attempts),
        median_mhz=clock,
        best_mhz=best.result.mhz,
        critical_path=best.critical_path,
        pins=f"Pins: {order.routing.pins.name}." if order.routing.pins else UNCONSTRAINED,
        stage_cycles=dict(cycles_of(order.graph, order.folding)),
        estimated_cycles=interval(order.graph, order.folding),
        simulated_cycles=simulated,
        latency_cycles=latency,
        proof=proof,
        switching=SwitchingCounts(
            inferences=LANES,
            net_toggles=activity.net_toggles,
            branch_toggles=activity.branch_toggles,
            multiplications=activity.multiplications,
            memory_accesses=activity.memory_accesses,
        ),
        energy=energy.estimate(activity, 1, order.device, clock),
        synthesis_cpu_s=made.cpu_s,
    )


def _synthesise(order: BuildOrder, sources: Sequence[Path], say: Say) -> SynthesisResult:
    say(f"synthesising {order.graph.name} for {order.device.name}")
    made = synthesise(sources, TOP, order.folder, say=say)
    needed = made.resources
    say(f"{needed.luts:,} LUT4, {needed.multipliers} multipliers, {made.cpu_s:.0f} CPU s")
    return made


def _route(order: BuildOrder, made: SynthesisResult, say: Say) -> list[Attempt]:
    attempts: list[Attempt] = []
    for attempt in place_and_route(made, order.device, order.routing, say):
        result = attempt.result
        outcome = result.why_not if result.mhz is None else f"{result.mhz:.1f} MHz"
        say(f"seed {result.seed}: {outcome}, {result.cpu_s:.0f} CPU s")
        attempts.append(attempt)
    return attempts


def run_netlist(
    graph: IntegerGraph, netlist: Path, images: Pixels, per_lane: int = IMAGES_PER_LANE
) -> tuple[Logits, SwitchingActivity]:
    """Stream images through 64 copies of the netlist, `per_lane` each; activity is that of one image in steady state.

    The images are repeated cyclically; the logits (64 · per_lane, classes) are in their order.

    Raises:
        CompileError: if the netlist cannot be run, or gives too few logits.
    """
    height, width, planes = graph.input.height, graph.input.width, graph.input.channels
    chosen = images[np.arange(LANES * per_lane) % len(images)]
    beats = chosen.reshape(LANES, per_lane * height * width, planes).astype(np.uint64)
    simulation = NetlistSimulation(netlist, TOP)
    words: Words = np.full(beats.shape[:2], 1 << 8 * planes, np.uint64)
    for plane in range(planes):
        words |= beats[:, :, plane] << np.uint64(8 * plane)
    slow = height * width * planes + sum(stage.multiplications for stage in graph.stages)
    taken, activity = simulation.stream(
        words,
        per_lane * graph.classes,
        inputs=("s_data", "s_mask"),
        outputs=("m_data",),
        handshake=("rst", "s_valid", "s_ready", "m_valid", "m_ready"),
        counted=(graph.classes, 2 * graph.classes),
        limit=per_lane * slow + 10_000,
    )
    missing = np.uint64(64 - len(simulation.nets("m_data")))  # bits of the sign
    signed = (taken << missing).view(np.int64) >> missing.astype(np.int64)
    return signed.astype(np.int32).reshape(-1, graph.classes), activity


def _compare(order: BuildOrder, given: Logits, activity: SwitchingActivity, made: SynthesisResult) -> NetlistProof:
    distinct = min(len(given), len(order.images))
    expected = reference.logits(order.graph, order.images[np.arange(len(given)) % len(order.images)])
    return NetlistProof(
        images=distinct,
        images_from=f"the first of {order.images_from}",
        logits=distinct * order.graph.classes,
        differing=int((given != expected).sum()),
        cycles_per_image=float(activity.cycles),
        cells=dict(made.cells),
    )


def _simulate(order: BuildOrder) -> tuple[int, int]:
    """Cycles from one image to the next, and of one image on an idle device."""
    simulation = Simulation(order.graph, order.folding)
    run = simulation.run(order.images[np.arange(SIMULATED_IMAGES) % len(order.images)])
    return int(run.last_out[-1] - run.last_out[-2]), int(run.last_out[0] - run.first_in[0]) + 1
