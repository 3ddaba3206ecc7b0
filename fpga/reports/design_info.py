"""The known properties of the design on a device: folding, clock and energy, from the files of its build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fpga.compiler.folding import Folding, check_folding, interval, read_folding
from fpga.reports.build_report import check_graph, read
from hawkvision.integer.ir import IntegerGraph


@dataclass(frozen=True, slots=True)
class DesignFiles:
    """The files about a design; None if there is none."""

    report: Path | None = None
    """The report of its build: folding, clock and estimated energy."""
    folding: Path | None = None
    """Replaces the report's folding."""
    clock_mhz: float | None = None
    """Replaces the report's clock."""


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


def read_design(graph: IntegerGraph, files: DesignFiles) -> DesignInfo:
    """Read the files of a design.

    Raises:
        CompileError: if a file is missing, broken or about another graph.
    """
    folding: Folding | None = None
    clock_hz = joules = None
    if files.report is not None:
        found = read(files.report)
        check_graph(found, graph, str(files.report))
        folding, clock_hz = found.folding, found.median_mhz * 1e6
        joules = found.energy.mid.chip_uj * 1e-6
    if files.folding is not None:
        folding, joules = read_folding(files.folding), None  # the report's energy is that of another design
    if files.clock_mhz is not None:
        clock_hz = files.clock_mhz * 1e6
    if folding is not None:
        check_folding(graph, folding)
    return DesignInfo(folding, clock_hz, joules)
