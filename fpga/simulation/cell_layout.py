"""Cells laid out for `netlist_kernel.c`: its structures, the numbering of nets and the order of evaluation."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fpga.compiler.yosys_netlist import Bit, NetlistCell, NetlistModule
from hawkvision.core.errors import CompileError

LANES: Final = 64
"""Copies of the chip that run side by side: the bits of a word."""
ZERO: Final = 0
ONE: Final = 1
"""Net numbers of the constants."""


class CellOp(ctypes.Structure):
    """A combinational cell: `struct op`."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("kind", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("inputs", ctypes.c_int32 * 4),
        ("init", ctypes.c_int32),
        ("more", ctypes.c_int32),
        ("carry_in", ctypes.c_int32),
        ("inject", ctypes.c_int32),
    ]


class FlipFlop(ctypes.Structure):
    """`struct flip_flop`."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        (name, ctypes.c_int32) for name in ("q", "d", "enable", "reset", "flags")
    ]


class DistributedMemory(ctypes.Structure):
    """`struct memory`."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("data", ctypes.c_int32 * 4),
        ("write_address", ctypes.c_int32 * 4),
        ("write", ctypes.c_int32),
        ("cells", ctypes.c_uint64 * 64),
    ]


class Multiplier(ctypes.Structure):
    """`struct multiplier`."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("a", ctypes.c_int32 * 18),
        ("b", ctypes.c_int32 * 18),
        ("p", ctypes.c_int32 * 36),
        ("signed_a", ctypes.c_int32),
        ("signed_b", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        *((name, ctypes.c_int64 * LANES) for name in ("held_a", "held_b", "pipe", "out")),
    ]


class RamPort(ctypes.Structure):
    """`struct port`."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("address", ctypes.c_int32 * 14),
        *((name, ctypes.c_int32) for name in ("enable", "write", "reset", "width", "mode", "registered")),
        ("data", ctypes.c_int32 * 36),
        ("out", ctypes.c_int32 * 36),
    ]


class BlockRam(ctypes.Structure):
    """`struct block_ram`."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("port", RamPort * 2),
        ("written", ctypes.c_int32),
        ("cells", ctypes.c_void_p),
        ("certified", ctypes.c_uint64 * (2 * LANES)),
    ]


LUT, MUX, CARRY, MEMORY, MULTIPLY = range(5)
"""Kinds of combinational cells."""
CE_INVERTED, LSR_INVERTED, SETS = 1, 2, 4
"""Flags of a flip-flop."""


@dataclass(slots=True)
class PendingCell:
    """A combinational cell that waits for its inputs."""

    op: CellOp
    needs: tuple[int, ...]
    gives: tuple[int, ...]


class CellLayout:
    """The cells of a netlist by kind, with their nets numbered."""

    def __init__(self, module: NetlistModule, cells: Mapping[str, AddCell]) -> None:
        """`cells` has, by type, the function that adds a cell.

        Raises:
            CompileError: if a cell, or its use, is not modelled.
        """
        self.module = module
        self._numbers: dict[Bit, int] = {"0": ZERO, "1": ONE, "x": ZERO, "z": ZERO}
        self.nets = 2
        self.work: list[PendingCell] = []
        self.flip_flops: list[FlipFlop] = []
        self.memories: list[DistributedMemory] = []
        self.multipliers: list[Multiplier] = []
        self.block_rams: list[BlockRam] = []
        self.contents: list[NDArray[np.uint32]] = []
        self.sinks: Counter[int] = Counter()
        self.clock: int | None = None
        for port in module.ports.values():  # some are connected to nothing
            for bit in port.bits:
                self.net(bit)
        for name, cell in module.cells.items():
            if cell.type == "$scopeinfo":  # where a flattened module began
                continue
            add = cells.get(cell.type)
            if add is None:
                raise CompileError(f"netlist: cell {name}: {cell.type} is not modelled")
            add(self, name, cell)

    def net(self, bit: Bit) -> int:
        """The number of a net."""
        found = self._numbers.get(bit)
        if found is None:
            found = self._numbers[bit] = self.nets
            self.nets += 1
        return found

    def named(self) -> list[int]:
        """The netlist's own nets, without constants and nets inside cells."""
        return sorted({net for net in self._numbers.values() if net > ONE})

    def inside(self) -> int:
        """A new net inside a cell, which does not count for power."""
        self.nets += 1
        return self.nets - 1

    def one(self, cell: NetlistCell, port: str) -> int:
        """The net at a one-bit port; unconnected ports read as zero."""
        bits = cell.connections.get(port, [])
        return self.net(bits[0]) if bits else ZERO

    def many(self, cell: NetlistCell, ports: Iterable[str]) -> list[int]:
        """The nets at several one-bit ports."""
        return [self.one(cell, port) for port in ports]

    def read(self, *nets: int) -> None:
        """Count an input for each of these nets."""
        self.sinks.update(nets)

    def clocked(self, name: str, net: int, inverted: bool) -> None:
        """Refuse a second clock, and falling edges."""
        if inverted or (self.clock is not None and net != self.clock):
            raise CompileError(f"netlist: cell {name}: expected one clock and its rising edge")
        self.clock = net

    def combinational(self, kind: int, inputs: Sequence[int], out: int, init: int = 0, **fields: int) -> None:
        """Add a cell whose output follows its inputs."""
        nets = (ctypes.c_int32 * 4)(*inputs)
        op = CellOp(kind=kind, out=out, inputs=nets, init=init, **fields)
        gives = (out, fields["more"]) if "more" in fields else (out,)
        self.work.append(PendingCell(op, (*inputs, fields.get("carry_in", ZERO)), gives))

    def ordered(self) -> list[CellOp]:
        """All combinational cells, each after those that drive it.

        Raises:
            CompileError: if they form a loop.
        """
        readers: dict[int, list[int]] = {}
        driven = {net for work in self.work for net in work.gives}
        waits = []
        for index, work in enumerate(self.work):
            needs = {net for net in work.needs if net in driven}
            waits.append(len(needs))
            for net in needs:
                readers.setdefault(net, []).append(index)
        ready = [index for index, count in enumerate(waits) if count == 0]
        order: list[CellOp] = []
        while ready:  # each cell enters once
            work = self.work[ready.pop()]
            order.append(work.op)
            for net in work.gives:
                for index in readers.get(net, ()):
                    waits[index] -= 1
                    if waits[index] == 0:
                        ready.append(index)
        if len(order) != len(self.work):
            raise CompileError(f"netlist: {len(self.work) - len(order)} cells form a combinational loop")
        return order


AddCell = Callable[[CellLayout, str, NetlistCell], None]
"""Adds a named cell to a layout."""
