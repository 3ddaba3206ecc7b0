"""`fpga-ref`: the integer graph on this machine's CPU, the same bits as the hardware's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fpga.backends.base import UNKNOWN, Build, FpgaBackend
from fpga.simulation.integer_kernel import How, Kernel
from hawkvision.integer.ir import Graph
from hawkvision.integer.reference import Mask
from hawkvision.metrics import Cycles, FpgaCounts, Seconds
from hawkvision.types import Pixels


class ReferenceBackend(FpgaBackend):
    """`fpga.simulation.integer_kernel` as a backend. Where the folding is known, it counts the cycles that a device
    would have taken.

    Raises:
        BackendError: if the kernel is not exact.
        CompileError: as `fpga.simulation.integer_kernel.Kernel` says, if `how` is given.
    """

    name = "fpga-ref"

    def __init__(self, graph: Graph, build: Build = UNKNOWN, how: How | None = None, cache: Path | None = None) -> None:
        super().__init__(graph, build)
        self._kernel = Kernel(graph, None if cache is None else cache / "fpga", how)
        self._cycles_each: dict[Cycles, int] = {}
        self._seconds_each: dict[Seconds, float] = {}
        if (cycles := build.interval(graph)) is not None:
            self._cycles_each["modelled"] = cycles
            if build.clock_hz is not None:
                self._seconds_each["modelled"] = cycles / build.clock_hz

    @property
    def how(self) -> How:
        """Whether compiled code runs, or NumPy in its place."""
        return self._kernel.how

    def counts(self) -> FpgaCounts:
        """See `FpgaBackend.counts`. What a picture takes is known beforehand, so it is multiplied when asked for."""
        counts = super().counts()
        cycles = {kind: each * counts.pictures for kind, each in self._cycles_each.items()}
        seconds = {kind: each * counts.pictures for kind, each in self._seconds_each.items()}
        return replace(counts, cycles=cycles, seconds=seconds)

    def _integers(self, batch: Pixels, mask: Mask | None) -> NDArray[np.int32]:
        logits = self._kernel.logits(batch, mask)
        self._count(len(batch))
        return logits
