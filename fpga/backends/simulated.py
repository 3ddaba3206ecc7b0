"""`fpga-sim`: the RTL itself, cycle by cycle. Exact and slow: tens of pictures a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fpga.backends.base import Build, FpgaBackend
from fpga.simulation.rtl_simulation import Simulation
from hawkvision.errors import CompileError
from hawkvision.integer import reference
from hawkvision.integer.ir import Graph
from hawkvision.integer.reference import Mask
from hawkvision.metrics import Seconds
from hawkvision.types import Pixels


class SimulatedBackend(FpgaBackend):
    """`fpga.simulation.rtl_simulation.Simulation` as a backend: one device, which its callers share.

    Raises:
        CompileError: if there is no folding, or the simulation cannot be built.
        BackendError: if it cannot be loaded.
    """

    name = "fpga-sim"

    def __init__(self, graph: Graph, build: Build, cache: Path | None = None) -> None:
        super().__init__(graph, build)
        if build.folding is None:
            raise CompileError(f"{graph.name}: fpga-sim needs a folding")
        self._simulation = Simulation(graph, build.folding, cache)

    def _integers(self, batch: Pixels, mask: Mask | None) -> NDArray[np.int32]:
        run = self._simulation.run(reference.planes(self.graph, batch), mask)
        seconds: dict[Seconds, float] = {}
        if self._build.clock_hz is not None:
            seconds["simulated"] = run.cycles / self._build.clock_hz
        self._count(len(batch), {"simulated": run.cycles}, seconds)
        return run.logits
