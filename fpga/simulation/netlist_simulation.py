"""Simulates a synthesised netlist: the values of the device's cells, and how often each net toggles.

`netlist_kernel.c` runs yosys's netlist as 64 copies of the chip in parallel, each on its own images. It shares nothing
with the RTL, Verilator or the integer graph, so equal logits are evidence for all of them. Cells have no delays: a net
toggles at most once per cycle, and glitches are missed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fpga.compiler.yosys_netlist import count_cells, read_module
from fpga.simulation.cell_layout import (
    LANES,
    ONE,
    SETS,
    ZERO,
    BlockRam,
    CellLayout,
    CellOp,
    DistributedMemory,
    FlipFlop,
    Multiplier,
)
from fpga.simulation.cells_ecp5 import CELLS
from hawkvision.core.errors import CompileError
from hawkvision.system.native_build import LibraryRecipe, open_library

SOURCE: Final = Path(__file__).with_name("netlist_kernel.c")
FLAGS: Final = ("-std=gnu11", "-O3", "-fPIC", "-shared")

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SwitchingActivity:
    """Switching in `cycles` clock cycles, averaged over the copies of the chip."""

    cycles: int
    net_toggles: float
    """Transitions of all nets except the clock."""
    branch_toggles: float
    """Transitions of each net times the inputs beyond the first that it drives."""
    multiplications: float
    """Multiplier blocks whose operands changed, summed over cycles."""
    memory_accesses: float
    """Enabled clock edges of block RAM ports, summed over cycles."""
    flip_flops: int


class _NetlistStruct(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        *((name, ctypes.c_int32) for name in ("nets", "ops", "flip_flops", "memories", "multipliers", "block_rams")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("op", "flip_flop", "memory", "multiplier", "block_ram"),
                *("value", "before", "next", "toggles", "operations", "accesses"),
            )
        ),
    ]


class _StreamStruct(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        *(
            (name, ctypes.c_int32)
            for name in ("reset", "in_valid", "in_ready", "in_bits", "out_valid", "out_ready", "out_bits")
        ),
        ("in_data", ctypes.c_int32 * 64),
        ("out_data", ctypes.c_int32 * 64),
    ]


class NetlistSimulation:
    """A netlist ready to run, for one thread at a time.

    Raises:
        CompileError: if a cell, or its use, is not modelled, or there is no C compiler.
    """

    def __init__(self, path: Path, top: str) -> None:
        module = read_module(path, top)
        self._ports = module.ports
        self.cells = count_cells(module)
        layout = CellLayout(module, CELLS)
        self._layout = layout
        self._order = layout.ordered()
        self._library = _library()

    def _state(self) -> tuple[_NetlistStruct, Mapping[str, Words]]:
        """State after configuration, and its arrays; they must outlive the calls."""
        layout = self._layout
        parts: dict[str, Any] = {
            "op": (CellOp * len(self._order))(*self._order),
            "flip_flop": (FlipFlop * len(layout.flip_flops))(*layout.flip_flops),
            "memory": (DistributedMemory * len(layout.memories))(*layout.memories),
            "multiplier": (Multiplier * len(layout.multipliers))(*layout.multipliers),
            "block_ram": (BlockRam * len(layout.block_rams))(*layout.block_rams),
        }
        contents = [cells.copy() for cells in layout.contents]
        for ram, cells in zip(parts["block_ram"], contents, strict=True):
            ram.cells = cells.ctypes.data
        counts = (len(parts[name]) for name in ("op", "flip_flop", "memory", "multiplier", "block_ram"))
        arrays = {name: np.zeros(layout.nets, np.uint64) for name in ("value", "before", "next", "toggles")}
        arrays["operations"] = np.zeros(len(layout.multipliers), np.uint64)
        arrays["accesses"] = np.zeros(2 * len(layout.block_rams), np.uint64)
        arrays["value"][ONE] = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
        for flip_flop in layout.flip_flops:
            arrays["value"][flip_flop.q] = arrays["value"][ONE if flip_flop.flags & SETS else ZERO]
        state = _NetlistStruct(layout.nets, *counts)
        for name, part in parts.items():
            setattr(state, name, ctypes.addressof(part))
        for name, array in arrays.items():
            setattr(state, name, array.ctypes.data)
        self._kept = (parts, contents, arrays)
        return state, arrays

    def nets(self, port: str) -> list[int]:
        """The nets of a port, least significant first.

        Raises:
            CompileError: if there is no such port.
        """
        if port not in self._ports:
            raise CompileError(f"netlist: no port {port!r}, only {', '.join(self._ports)}")
        return [self._layout.net(bit) for bit in self._ports[port].bits]

    def stream(
        self,
        words: Words,
        results: int,
        *,
        inputs: Sequence[str],
        outputs: Sequence[str],
        handshake: tuple[str, str, str, str, str],
        counted: tuple[int, int],
        limit: int,
    ) -> tuple[Words, SwitchingActivity]:
        """Stream words (LANES, beats) through without pause until each lane has `results` results.

        Args:
            words: values of the `inputs` ports together, the first port in the lowest bits. results: words of the
            `outputs` ports per lane. inputs: names of ports. outputs: names of ports. handshake: ports for reset, input
            valid, input ready, output valid, output ready. counted: activity counts from the cycle in which the first
            lane has the first of these numbers of results to the cycle in which it has the second.
            limit: cycles at most.

        Returns the results (LANES, results), and the activity.

        Raises:
            CompileError: if results are missing after `limit` cycles.
        """
        state, arrays = self._state()
        into = [net for port in inputs for net in self.nets(port)]
        out = [net for port in outputs for net in self.nets(port)]
        reset, in_valid, in_ready, out_valid, out_ready = (self.nets(port)[0] for port in handshake)
        stream = _StreamStruct(reset, in_valid, in_ready, len(into), out_valid, out_ready, len(out))
        stream.in_data[: len(into)] = into
        stream.out_data[: len(out)] = out
        taken, cycles = np.zeros((LANES, results), np.uint64), ctypes.c_int64()
        offered = np.ascontiguousarray(words, np.uint64)
        ended = self._library.netlist_stream(
            ctypes.byref(state),
            ctypes.byref(stream),
            ctypes.c_void_p(offered.ctypes.data),
            ctypes.c_int64(offered.shape[1]),
            ctypes.c_void_p(taken.ctypes.data),
            ctypes.c_int64(results),
            ctypes.c_int64(counted[0]),
            ctypes.c_int64(counted[1]),
            ctypes.c_int64(limit),
            ctypes.byref(cycles),
        )
        if ended < 0:
            raise CompileError(f"netlist: fewer than {results} results a lane after {limit} cycles")
        return taken, self._activity(arrays, cycles.value)

    def cycles(self, stimulus: Mapping[str, Words], cycles: int, skip: int = 0) -> SwitchingActivity:
        """Run without handshake; `stimulus` has the words (cycles, bits) of ports. The first `skip` cycles do not
        count.
        """
        state, arrays = self._state()
        nets = np.array([net for port in stimulus for net in self.nets(port)], np.int32)
        given = [np.asarray(words, np.uint64).reshape(cycles, -1) for words in stimulus.values()]
        words = np.ascontiguousarray(np.concatenate(given, axis=1)) if given else np.zeros((cycles, 0), np.uint64)
        for first, count, counting in ((0, skip, 0), (skip, cycles - skip, 1)):
            self._library.netlist_cycles(
                ctypes.byref(state),
                ctypes.c_int64(count),
                ctypes.c_void_p(nets.ctypes.data),
                ctypes.c_int32(len(nets)),
                ctypes.c_void_p(words[first:].ctypes.data),
                ctypes.c_int32(counting),
            )
        return self._activity(arrays, cycles - skip)

    def _activity(self, arrays: Mapping[str, Words], cycles: int) -> SwitchingActivity:
        layout = self._layout
        real = np.array([net for net in layout.named() if net != layout.clock], np.int64)
        toggles = arrays["toggles"][real] / LANES
        more = np.array([max(layout.sinks[int(net)] - 1, 0) for net in real])
        return SwitchingActivity(
            cycles=cycles,
            net_toggles=float(toggles.sum()),
            branch_toggles=float((toggles * more).sum()),
            multiplications=float(arrays["operations"].sum() / LANES),
            memory_accesses=float(arrays["accesses"].sum() / LANES),
            flip_flops=len(layout.flip_flops),
        )


@functools.cache
def _library() -> ctypes.CDLL:
    recipe = LibraryRecipe(name="netlist", language="C", source=SOURCE, included=(), flags=FLAGS)
    library = open_library(recipe)
    library.netlist_stream.restype = ctypes.c_int64
    library.netlist_cycles.restype = None
    return library
