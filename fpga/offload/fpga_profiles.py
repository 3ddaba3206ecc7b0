"""FPGA profiles for the cost model, from reports of builds or from foldings that are not built."""

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
"""Approximate bytes around an image's pixels, and around its logits."""

UNBUILT_PJ: Final = EstimateRange(8.0, 18.0, 33.0)
"""Energy per multiply-accumulate beside static power, for designs without a report: an estimate from the simulated
switching of a 4-bit Fashion-MNIST design on an LFE5U-45F."""


def transfer_bytes(graph: IntegerGraph) -> tuple[int, int]:
    """Bytes of an image to the device, and of its logits back."""
    return graph.input.elements + FRAMING_BYTES, graph.classes * BYTES_PER_LOGIT + FRAMING_BYTES


def profile_of_report(graph: IntegerGraph, report: BuildReport) -> FpgaProfile:
    """A built design: its own cycles, median clock, resources and estimated energy.

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


def profile_of_folding(graph: IntegerGraph, folding: Folding, name: str, clock_hz: float) -> FpgaProfile:
    """A design that is not built: modelled cycles, estimated resources and energy.

    Raises:
        CompileError: if the folding does not fit the graph.
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
    """The same design with only its first stages on the FPGA, for each place where the chain can be cut.

    The CPU's time for the rest is estimated from its share of the multiplications.
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
    """Estimated cycles from an image's first pixel to the last value of stage number `stages`, on an idle device.

    The slowest stage sets the pace; each stage behind it still computes the rows under its last window.
    """
    chosen = graph.stages[:stages]
    busy = [cycles_of(graph, folding)[stage.name] for stage in chosen]
    slowest = max(range(stages), key=lambda number: busy[number])
    tail = 0
    for stage in chosen[slowest + 1 :]:
        rows = min(stage.convolved.height, stage.conv.kernel)
        tail += rows * row_cycles(stage, folding.stages[stage.name])
    return max(busy[slowest], input_cycles(graph)) + tail
