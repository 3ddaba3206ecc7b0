"""One build from graph to report: emit, synthesise, place and route, prove the netlist, count its switching, estimate.

Everything is done in one folder, which holds afterwards what each tool read and wrote.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from fpga.compiler.device_families import BITSTREAM, FAMILIES
from fpga.compiler.devices import Device
from fpga.compiler.emit import emit
from fpga.compiler.folding import Folding, check_folding, cycles_of, format_folding, interval
from fpga.compiler.resource_model import of_graph
from fpga.compiler.synthesis import (
    ROUTE_CPU_S,
    Attempt,
    Routed,
    Synthesised,
    median_mhz,
    pack,
    place_and_route,
    routed,
    synthesise,
)
from fpga.compiler.toolchain import Say, find
from fpga.reports import energy as power
from fpga.reports.build_report import TITLES, Proof, Report, Seed, Switching
from fpga.simulation.cells_ecp5 import LANES
from fpga.simulation.netlist_simulation import Netlist, Streamed, Words
from fpga.simulation.rtl_simulation import Simulation
from hawkvision.errors import CompileError
from hawkvision.integer import reference
from hawkvision.integer.ir import Graph
from hawkvision.types import Pixels

PICTURES_A_LANE: Final = 4
"""Through the netlist, one behind the other, so that the pipeline is in its steady state during the second."""
SIMULATED_PICTURES: Final = 4
LOCK: Final = ".lock"
"""In a build's folder: held while it works, by whatever ends it let go."""
UNCONSTRAINED: Final = (
    "No pin file: but for the clock, ports lie wherever the placer put them, and timing to and from them is not "
    "constrained."
)


@dataclass(frozen=True, slots=True)
class Order:
    """What to build and how."""

    graph: Graph
    task: str
    variant: str
    device: Device
    folding: Folding
    pictures: Pixels
    """(n, height, width, planes): what the netlist is proved on, and whose switching is counted; repeated if few."""
    pictures_from: str
    command: str
    folder: Path
    seeds: int = 5
    target_mhz: float | None = None
    """What the placer strives for; None: what is usual for the device."""
    route_cpu_s: int = ROUTE_CPU_S
    """What one seed may take."""
    pins: Path | None = None


def build(order: Order, say: Say) -> Report:
    """Do it all; `say` hears of each step.

    Raises:
        CompileError: if the folder cannot be written to, or another build works in it; if a tool is missing or fails,
            no seed leads to a design, or the netlist gives other logits than the reference, which would be a defect of
            ours or of a tool.
    """
    check_folding(order.graph, order.folding)
    with _alone(order.folder):
        return _build(order, say)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two builds in one folder would place and pack one another's netlists."""
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


def _build(order: Order, say: Say) -> Report:
    graph, folder, family = order.graph, order.folder, FAMILIES[order.device.family]
    tools = {name: find(name, say).version for name in ("yosys", family.placer, family.packer)}
    emitted = emit(graph, order.folding, folder)
    (folder / "folding.json").write_bytes(format_folding(order.folding))
    (folder / BITSTREAM).unlink(missing_ok=True)  # an earlier build's
    say(f"synthesising {graph.name} for {order.device.name}")
    narrow = {"LOGIT_BITS": emitted.logit_bits} if family.few_pins else {}
    made = synthesise(emitted.sources, emitted.top, folder, family=order.device.family, parameters=narrow, say=say)
    needed, logic = made.resources, TITLES[order.device.family]["luts"]
    say(f"{needed.luts:,} {logic}, {needed.multipliers} multipliers, {made.cpu_s:.0f} CPU s")
    attempts = _route(order, made, say)
    best, clock = routed(attempts)[0], median_mhz(attempts)
    say("running the netlist")
    streamed = run_netlist(graph, made.netlist, emitted.top, order.pictures)
    proof, switching = _compare(order, streamed, made), _switching(streamed)
    if proof.differing:
        raise CompileError(f"netlist: {proof.differing} of {proof.logits} logits differ from the reference")
    pack(made, order.device, best, say)  # so there is a bitstream only of what was proved
    simulated, latency = _simulate(order)
    cycles = cycles_of(graph, order.folding)
    return Report(
        task=order.task,
        variant=order.variant,
        graph_sha256=graph.sha256,
        device=order.device.name,
        command=order.command,
        tools=tools,
        folding=order.folding,
        multipliers_in_use=sum(fold.multipliers for fold in order.folding.stages.values()),
        multiplications=graph.multiplications,
        available=order.device.resources,
        estimated=of_graph(graph, order.folding, order.device.family),
        synthesised=made.resources,
        placed=best.resources,
        target_mhz=order.target_mhz or order.device.target_mhz,
        seeds=tuple(_seed(attempt) for attempt in attempts),
        median_mhz=clock,
        best_mhz=best.fmax_mhz,
        critical_path=best.critical_path,
        pins=f"Pins: {order.pins.name}." if order.pins else UNCONSTRAINED,
        stage_cycles=dict(cycles),
        estimated_cycles=interval(graph, order.folding),
        simulated_cycles=simulated,
        latency_cycles=latency,
        proof=proof,
        switching=switching,
        energy=power.estimate(streamed.activity, 1, order.device, clock),
        synthesis_cpu_s=made.cpu_s,
    )


def _route(order: Order, made: Synthesised, say: Say) -> list[Attempt]:
    attempts: list[Attempt] = []
    seeds = range(1, order.seeds + 1)
    for attempt in place_and_route(
        made,
        order.device,
        seeds,
        target_mhz=order.target_mhz,
        cpu_limit_s=order.route_cpu_s,
        pins=order.pins,
        say=say,
    ):
        outcome = f"{attempt.fmax_mhz:.1f} MHz" if isinstance(attempt, Routed) else attempt.why
        say(f"seed {attempt.seed}: {outcome}, {attempt.cpu_s:.0f} CPU s")
        attempts.append(attempt)
    return attempts


def run_netlist(graph: Graph, netlist: Path, top: str, pictures: Pixels, per_lane: int = PICTURES_A_LANE) -> Streamed:
    """Pictures through 64 copies of the netlist, `per_lane` each; activity is that of one picture in the steady state.

    `Streamed.words` holds, per lane, the logits of its pictures as 32-bit words; lane l has the pictures
    l·per_lane … of the cyclically repeated ones. Where the netlist gives fewer bits they are extended by their sign.

    Raises:
        CompileError: if the netlist cannot be run, or gives too few logits.
    """
    height, width, planes = graph.input.height, graph.input.width, graph.input.channels
    chosen = pictures[np.arange(LANES * per_lane) % len(pictures)]
    beats = chosen.reshape(LANES, per_lane * height * width, planes).astype(np.uint64)
    made = Netlist(netlist, top)
    words: Words = np.full(beats.shape[:2], 1 << 8 * planes, np.uint64)
    for plane in range(planes):
        words |= beats[:, :, plane] << np.uint64(8 * plane)
    slow = height * width * planes + sum(stage.multiplications for stage in graph.stages)
    streamed = made.stream(
        words,
        per_lane * graph.classes,
        inputs=("s_data", "s_mask"),
        outputs=("m_data",),
        handshake=("rst", "s_valid", "s_ready", "m_valid", "m_ready"),
        counted=(graph.classes, 2 * graph.classes),
        limit=per_lane * slow + 10_000,
    )
    missing = np.uint64(64 - len(made.nets("m_data")))
    extended = (streamed.words << missing).view(np.int64) >> missing.astype(np.int64)
    return replace(streamed, words=extended.astype(np.uint32).astype(np.uint64))


def logits_of(streamed: Streamed, classes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """(pictures, classes), in the order in which `run_netlist` chose pictures."""
    words = streamed.words.astype(np.uint32).view(np.int32)
    return words.reshape(-1, classes)


def _compare(order: Order, streamed: Streamed, made: Synthesised) -> Proof:
    given = logits_of(streamed, order.graph.classes)
    distinct = min(len(given), len(order.pictures))
    expected = reference.logits(order.graph, order.pictures[np.arange(len(given)) % len(order.pictures)])
    return Proof(
        pictures=distinct,
        pictures_from=f"the first of {order.pictures_from}",
        logits=distinct * order.graph.classes,
        differing=int((given != expected).sum()),
        cycles_per_picture=float(streamed.activity.cycles),
        cells=dict(made.cells),
    )


def _switching(streamed: Streamed) -> Switching:
    activity = streamed.activity
    return Switching(
        inferences=LANES,
        net_toggles=activity.net_toggles,
        branch_toggles=activity.branch_toggles,
        multiplications=activity.multiplications,
        memory_accesses=activity.memory_accesses,
    )


def _seed(attempt: Attempt) -> Seed:
    if isinstance(attempt, Routed):
        return Seed(seed=attempt.seed, mhz=attempt.fmax_mhz, cpu_s=attempt.cpu_s)
    return Seed(seed=attempt.seed, mhz=None, why_not=attempt.why, cpu_s=attempt.cpu_s)


def _simulate(order: Order) -> tuple[int, int]:
    """Cycles from picture to picture, and of a picture on an idle device."""
    simulation = Simulation(order.graph, order.folding)
    pictures = order.pictures[np.arange(SIMULATED_PICTURES) % len(order.pictures)]
    run = simulation.run(pictures)
    return int(run.last_out[-1] - run.last_out[-2]), int(run.last_out[0] - run.first_in[0]) + 1
