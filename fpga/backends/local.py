"""Backends without a device: `fpga-ref`, the integer graph on this machine's CPU, and `fpga-sim`, the simulated RTL."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fpga.backends.base import CycleBasis, FpgaBackend, FpgaCounts, TimeBasis
from fpga.reports.build_report import UNKNOWN_DESIGN, DesignInfo
from fpga.simulation.integer_kernel import IntegerKernel, KernelKind
from fpga.simulation.rtl_simulation import Simulation
from hawkvision.core.errors import CompileError
from hawkvision.core.types import Pixels
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph


class ReferenceBackend(FpgaBackend):
    """The integer kernel as a backend. With a folding it also counts the cycles that a device would take.

    Raises:
        BackendError: if the kernel is not exact.
        CompileError: if `kernel` is "compiled" and it cannot be compiled.
    """

    name = "fpga-ref"

    def __init__(
        self,
        graph: IntegerGraph,
        design: DesignInfo = UNKNOWN_DESIGN,
        kernel: KernelKind | None = None,
    ) -> None:
        super().__init__(graph, design)
        self._kernel = IntegerKernel(graph, kernel)
        self._cycles_each: dict[CycleBasis, int] = {}
        self._seconds_each: dict[TimeBasis, float] = {}
        if (cycles := design.interval(graph)) is not None:
            self._cycles_each["modelled"] = cycles
            if design.clock_hz is not None:
                self._seconds_each["modelled"] = cycles / design.clock_hz

    @property
    def kernel(self) -> KernelKind:
        """The kernel in use."""
        return self._kernel.kind

    def counts(self) -> FpgaCounts:
        """See `FpgaBackend.counts`."""
        # Each image takes the same cycles, so they are multiplied here instead of added up per image.
        counts = super().counts()
        cycles = {basis: each * counts.images for basis, each in self._cycles_each.items()}
        seconds = {basis: each * counts.images for basis, each in self._seconds_each.items()}
        return replace(counts, cycles=cycles, seconds=seconds)

    def _integers(self, batch: Pixels) -> NDArray[np.int32]:
        logits = self._kernel.logits(batch)
        self._count(len(batch))
        return logits


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
