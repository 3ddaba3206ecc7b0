"""The FPGA in the performance model, from what the compiler knows: reports of builds, or foldings not yet built."""

from __future__ import annotations

from typing import Final

from fpga.compiler.folding import Folding, check_folding, cycles_of, input_cycles, interval, row_cycles
from fpga.compiler.resource_model import of_frame, of_graph, of_stage
from fpga.offload.cost_model import EstimateRange, FpgaProfile
from fpga.offload.queueing import ServiceTime
from fpga.reports.build_report import BuildReport, check_graph
from hawkvision.integer.ir import IntegerGraph

BYTES_PER_LOGIT: Final = 4
FRAMING_BYTES: Final = 64
"""About what goes around an image's pixels, and around its logits."""

UNBUILT_PJ: Final = EstimateRange(8.0, 18.0, 33.0)
"""Picojoules per multiply-accumulate, beside the static draw, of designs without a report of their own: an estimate,
from the simulated switching of one design of the 4-bit Fashion-MNIST network on an LFE5U-45F."""


def transfer_bytes(graph: IntegerGraph) -> tuple[int, int]:
    """Bytes of an image to the device, and of its logits back."""
    return graph.input.elements + FRAMING_BYTES, graph.classes * BYTES_PER_LOGIT + FRAMING_BYTES


def way_of_report(graph: IntegerGraph, report: BuildReport) -> FpgaProfile:
    """A design that was built: its own cycles, median clock, resources and estimated energy.

    Raises:
        CompileError: if the report is about another graph.
    """
    check_graph(report, graph, "report")
    bytes_in, bytes_out = transfer_bytes(graph)
    corners = (report.energy.low, report.energy.mid, report.energy.high)
    return FpgaProfile(
        name=f"{report.variant} as built",
        interval_cycles=report.simulated_cycles,
        latency_cycles=report.latency_cycles,
        clock_hz=report.median_mhz * 1e6,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        resources=report.placed,
        joules=EstimateRange(*((each.nets_uj + each.multipliers_uj + each.memories_uj) * 1e-6 for each in corners)),
        clock_w=EstimateRange(*(each.clock_uj * 1e-6 * report.rate for each in corners)),
        source=f"report of its build on {report.device}",
    )


def way_of_folding(graph: IntegerGraph, folding: Folding, name: str, clock_hz: float) -> FpgaProfile:
    """A design that was not built: cycles by the performance model, resources and energy estimated.

    Raises:
        CompileError: if the graph cannot be folded like this.
    """
    check_folding(graph, folding)
    bytes_in, bytes_out = transfer_bytes(graph)
    return FpgaProfile(
        name=name,
        interval_cycles=interval(graph, folding),
        latency_cycles=latency(graph, folding, len(graph.stages)),
        clock_hz=clock_hz,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        resources=of_graph(graph, folding),
        joules=UNBUILT_PJ * (graph.multiplications * 1e-12),
        source="performance model; not built",
    )


def cuts(graph: IntegerGraph, folding: Folding, whole: FpgaProfile, cpu: ServiceTime) -> tuple[FpgaProfile, ...]:
    """The same design with only its first stages on the FPGA, for each place where the chain could be cut.

    What the CPU does then takes its part of the multiplications of the time that it takes for all: an estimate.
    """
    busy, found = cycles_of(graph, folding), []
    resources, lanes, done = of_frame(graph), graph.input.channels, 0
    for number, stage in enumerate(graph.stages[:-1], start=1):
        fold = folding.stages[stage.name]
        resources, lanes = resources + of_stage(stage, fold, lanes), fold.lanes
        done += stage.multiplications
        part = done / graph.multiplications
        found.append(
            FpgaProfile(
                name=whole.name,
                interval_cycles=max(input_cycles(graph), *(busy[each.name] for each in graph.stages[:number])),
                latency_cycles=latency(graph, folding, number),
                clock_hz=whole.clock_hz,
                bytes_in=whole.bytes_in,
                bytes_out=stage.given.elements * stage.given.bits // 8 + FRAMING_BYTES,
                resources=resources,
                joules=whole.joules * part,
                clock_w=whole.clock_w,
                source="performance model",
                cut=stage.name,
                rest=cpu.scaled(1 - part),
            )
        )
    return tuple(found)


def latency(graph: IntegerGraph, folding: Folding, stages: int) -> int:
    """Cycles from an image's first pixel to the last value of its `stages`-th stage on an idle device: an estimate.

    The slowest stage sets the pace of the rows; each one behind it still has to do the rows under its last window.
    """
    chosen = graph.stages[:stages]
    busy = [cycles_of(graph, folding)[stage.name] for stage in chosen]
    slowest = max(range(stages), key=lambda number: busy[number])
    tail = 0
    for stage in chosen[slowest + 1 :]:
        rows = min(stage.convolved.height, stage.conv.kernel)
        tail += rows * row_cycles(stage, folding.stages[stage.name])
    return max(busy[slowest], input_cycles(graph)) + tail
