"""`fpga-sim`: the RTL, simulated cycle by cycle."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fpga.backends.base import FpgaBackend, TimeBasis
from fpga.reports.build_report import DesignInfo
from fpga.simulation.rtl_simulation import Simulation
from hawkvision.core.errors import CompileError
from hawkvision.core.types import Pixels
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph


class SimulatedBackend(FpgaBackend):
    """One simulated device as a backend; its callers take turns.

    Raises:
        CompileError: if there is no folding, or the simulation cannot be built.
        BackendError: if the simulation cannot be loaded.
    """

    name = "fpga-sim"

    def __init__(self, graph: IntegerGraph, design: DesignInfo) -> None:
        super().__init__(graph, design)
        if design.folding is None:
            raise CompileError(f"{graph.name}: fpga-sim needs a folding")
        self._simulation = Simulation(graph, design.folding)

    def _integers(self, batch: Pixels) -> NDArray[np.int32]:
        run = self._simulation.run(reference.planes(self.graph, batch))
        seconds: dict[TimeBasis, float] = {}
        if self._design.clock_hz is not None:
            seconds["simulated"] = run.cycles / self._design.clock_hz
        self._count(len(batch), {"simulated": run.cycles}, seconds)
        return run.logits
