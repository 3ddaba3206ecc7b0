"""Simulates a design's RTL cycle by cycle: Verilator translates it to C++, a driver feeds it beat by beat."""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fpga.compiler import emit
from fpga.compiler.folding import Folding, interval
from fpga.simulation.verilator import VerilatorDesign, library
from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.reference import Mask

DRIVER: Final = emit.RTL / "sim" / "stream_driver.cpp"
TIMEOUT_FACTOR: Final = 8
"""Factor over the expected cycles; random stalls cost less."""

Cycles = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SimulationRun:
    """Logits and their times, in cycles since the start of the run."""

    logits: NDArray[np.int32]
    """(n, classes)"""
    first_in: Cycles
    """(n,) cycle in which the image's first pixel was taken."""
    last_in: Cycles
    """(n,) cycle in which its last pixel was taken."""
    last_out: Cycles
    """(n,) cycle in which its last logit was given."""
    cycles: int
    """Cycles of the whole run."""


@dataclass(frozen=True, slots=True)
class Stalls:
    """Random pauses of the streams: each side pauses in a cycle with a probability of `…/256`."""

    into: int = 0
    out_of: int = 0
    seed: int = 0


class _SimulationJob(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("images", "height", "width", "channels", "classes")),
        *((name, ctypes.c_void_p) for name in ("pixels", "mask", "arrives")),
        ("stall_in", ctypes.c_uint32),
        ("stall_out", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("limit", ctypes.c_int64),
        ("beats", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logits", "first_in", "last_in", "last_out")),
        *((name, ctypes.c_int64) for name in ("cycles", "given", "misplaced")),
    ]


class Simulation:
    """One simulated device. Building it takes seconds unless it is cached.

    Its callers take turns; several simulations may run at once.

    Raises:
        CompileError: if the folding does not fit the graph, or a tool is missing or fails.
        BackendError: if the library cannot be loaded, or another user may have written it.
    """

    def __init__(self, graph: IntegerGraph, folding: Folding) -> None:
        path = library(design(graph, folding))
        self.graph = graph
        self._interval = interval(graph, folding)
        self._lock = threading.Lock()
        try:
            self._code = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendError(f"{path}: the simulation cannot be loaded: {error}") from None
        self._code.hv_new.restype = ctypes.c_void_p
        handle = self._code.hv_new()
        if handle is None:
            raise BackendError(f"{path}: the simulation cannot start")
        self._handle = ctypes.c_void_p(handle)
        weakref.finalize(self, self._code.hv_free, self._handle)

    def reset(self) -> None:
        """Reset the device in any state."""
        with self._lock:
            self._code.hv_reset(self._handle)

    def run(
        self,
        pixels: Pixels,
        mask: Mask | None = None,
        *,
        arrives: Cycles | None = None,
        stalls: Stalls | None = None,
        timeout_factor: float = TIMEOUT_FACTOR,
    ) -> SimulationRun:
        """Stream images (n, height, width, channels) through the device back to back.

        Args:
            pixels: the images.
            mask: (n, height, width), true where a pixel arrived; None means everywhere.
            arrives: (n, height), the cycle from which each row is available; None means all from the start.
            stalls: random pauses of the streams.
            timeout_factor: multiple of the expected cycles after which the run fails.

        Raises:
            BackendError: if shapes do not fit, or the device does not answer correctly in time.
        """
        n = len(pixels)
        job, logits, times = self._job(pixels, mask, arrives, stalls or Stalls(), timeout_factor)
        with self._lock:
            self._code.hv_run(self._handle, ctypes.byref(job))
            sound = job.given == n * self.graph.classes and not job.misplaced
            if not sound:
                self._code.hv_reset(self._handle)  # so that nothing is left for the next caller
        if not sound:
            raise BackendError(
                f"the simulated device gave {job.given} of {n * self.graph.classes} logits in {job.cycles} cycles, "
                f"{job.misplaced} of them wrongly marked"
            )
        return SimulationRun(logits, times[0], times[1], times[2], int(job.cycles))

    def _job(
        self,
        pixels: Pixels,
        mask: Mask | None,
        arrives: Cycles | None,
        stalls: Stalls,
        timeout_factor: float,
    ) -> tuple[_SimulationJob, NDArray[np.int32], Cycles]:
        at, n = self.graph.input, len(pixels)
        if pixels.dtype != np.uint8 or pixels.shape != (n, at.height, at.width, at.channels):
            raise BackendError(f"expected uint8 images (n, {at.height}, {at.width}, {at.channels}), got {pixels.shape}")
        if mask is not None and mask.shape != pixels.shape[:3]:
            raise BackendError(f"mask: expected {pixels.shape[:3]}, got {mask.shape}")
        if arrives is not None and arrives.shape != pixels.shape[:2]:
            raise BackendError(f"arrives: expected {pixels.shape[:2]}, got {arrives.shape}")
        logits = np.zeros((n, self.graph.classes), np.int32)
        times = np.zeros((3, n), np.int64)
        last = 0 if arrives is None or not arrives.size else int(arrives.max())
        slower = 256 / (256 - min(max(stalls.into, stalls.out_of), 255))
        arrays = [
            np.ascontiguousarray(pixels),
            None if mask is None else np.ascontiguousarray(mask, np.uint8),
            None if arrives is None else np.ascontiguousarray(arrives, np.int64),
        ]
        job = _SimulationJob(
            n, at.height, at.width, at.channels, self.graph.classes,
            *(None if array is None else array.ctypes.data for array in arrays),
            stalls.into, stalls.out_of, stalls.seed,
            last + int(timeout_factor * slower * self._interval * (n + len(self.graph.stages) + 1)),
            n * at.height * at.width,
            logits.ctypes.data, times[0].ctypes.data, times[1].ctypes.data, times[2].ctypes.data,
        )  # fmt: skip
        job.keep = arrays
        return job, logits, times


def design(graph: IntegerGraph, folding: Folding) -> VerilatorDesign:
    """A folded graph as input for Verilator.

    Raises:
        CompileError: if the folding does not fit the graph.
    """
    files = emit.sources(graph, folding)
    return VerilatorDesign(
        emit.TOP,
        {name: content for name, content in files.items() if name.endswith(".sv")},
        DRIVER.read_bytes(),
        {parameter: (name, files[name]) for parameter, name in emit.memory_names(graph)},
    )
