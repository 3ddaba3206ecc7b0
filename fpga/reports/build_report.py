"""The report of a build, as a JSON file.

Resources and clock are counted by the tools; cycles, logits and switching are simulated; energy is estimated, with its
range. Nothing ran on a board.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fpga.compiler.devices import Resources
from fpga.compiler.folding import Folding, check_folding, interval, read_folding
from fpga.compiler.synthesis import SeedResult
from fpga.reports.energy import EnergyEstimate
from hawkvision.core.errors import CompileError
from hawkvision.integer.ir import IntegerGraph

Positive = Annotated[float, Meta(gt=0)]
Cycles = Annotated[int, Meta(ge=1)]


class NetlistProof(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of the netlist's logits with the integer reference."""

    images: int
    images_from: str
    logits: int
    differing: int
    cycles_per_image: float
    """Simulated cycles from one image to the next."""
    cells: dict[str, int]


class SwitchingCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Activity per inference, counted in the netlist on the same images."""

    inferences: int
    net_toggles: float
    branch_toggles: float
    multiplications: float
    memory_accesses: float


class BuildReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one build."""

    format: Literal[1] = 1
    task: str
    variant: str
    graph_sha256: str
    device: str
    command: str
    tools: dict[str, str]
    folding: Folding
    multipliers_in_use: int
    """Multiply-accumulates per cycle when all stages are busy."""
    multiplications: int
    """Multiply-accumulates per inference."""
    available: Resources
    estimated: Resources
    """Estimated by `fpga.compiler.resource_model` before synthesis."""
    synthesised: Resources
    placed: Resources
    """Placed by the best seed, as nextpnr counts."""
    target_mhz: float
    seeds: tuple[SeedResult, ...]
    median_mhz: Positive
    best_mhz: Positive
    critical_path: tuple[str, ...]
    pins: str
    stage_cycles: dict[str, Cycles]
    estimated_cycles: Cycles
    """Modelled cycles from one image to the next."""
    simulated_cycles: Cycles
    """The same, measured in the RTL simulation."""
    latency_cycles: Cycles
    """Cycles from an image's first pixel to its last logit on an idle device, measured in the RTL simulation."""
    proof: NetlistProof
    switching: SwitchingCounts
    energy: EnergyEstimate
    """At the median clock and full load."""
    synthesis_cpu_s: float

    def __post_init__(self) -> None:
        if set(self.stage_cycles) != set(self.folding.stages):
            raise ValueError("stage_cycles: expected the stages of folding")

    @property
    def rate(self) -> float:
        """Inferences per second at the median clock."""
        return self.median_mhz * 1e6 / self.simulated_cycles

    @property
    def latency_us(self) -> float:
        """Latency at the median clock, with one pixel per cycle."""
        return self.latency_cycles / self.median_mhz


def read(path: Path) -> BuildReport:
    """Read a report.

    Raises:
        CompileError: if the file cannot be read, or is no report.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=BuildReport)
    except OSError as error:
        raise CompileError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CompileError(f"{path}: not a report: {error}") from None


@dataclass(frozen=True, slots=True)
class DesignInfo:
    """Facts about a design; None where they are not known."""

    folding: Folding | None = None
    clock_hz: float | None = None
    joules: float | None = None
    """Estimated energy per image of the chip alone, the middle value."""

    def interval(self, graph: IntegerGraph) -> int | None:
        """Modelled cycles from one image to the next."""
        return None if self.folding is None else interval(graph, self.folding)


UNKNOWN_DESIGN: Final = DesignInfo()


def read_design(
    graph: IntegerGraph, report: Path | None = None, folding: Path | None = None, clock_mhz: float | None = None
) -> DesignInfo:
    """What is known of a design: its build's report says folding, clock and energy; the others replace its parts.

    Raises:
        CompileError: if a file is missing, broken or about another graph.
    """
    design = UNKNOWN_DESIGN
    if report is not None:
        found = read(report)
        if found.graph_sha256 != graph.sha256:
            raise CompileError(
                f"{report}: it is about the graph {found.graph_sha256[:16]}…, the model's is {graph.sha256[:16]}…"
            )
        design = DesignInfo(found.folding, found.median_mhz * 1e6, found.energy.mid.chip_uj * 1e-6)
    if folding is not None:
        # The report's energy is that of another design.
        design = replace(design, folding=read_folding(folding), joules=None)
    if clock_mhz is not None:
        design = replace(design, clock_hz=clock_mhz * 1e6)
    if design.folding is not None:
        check_folding(graph, design.folding)
    return design


def encode_report(report: BuildReport) -> bytes:
    """A report as indented JSON, numbers rounded to five digits."""
    return msgspec.json.format(msgspec.json.encode(_rounded(report)), indent=2) + b"\n"


def _rounded(report: BuildReport) -> object:
    """Round floats to five digits."""

    def shorten(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, dict):
            return {key: shorten(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [shorten(item) for item in value]
        return value

    return shorten(msgspec.to_builtins(report))
