"""The cells of ECP5 netlists, laid out for `netlist_kernel.c`: what each reads and drives, in what order.

Those of iCE40 are in `netlist_ice40`.

What a cell computes is said twice in this project, here with the kernel, and in `fpga/rtl` as yosys understood it;
nothing is shared between the two. What is not modelled is refused by name, never guessed.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.errors import CompileError

LANES: Final = 64
"""Copies of the chip that run side by side: the bits of a word."""
ZERO: Final = 0
ONE: Final = 1
"""Net numbers of the constants."""

Bit = int | str


class Cell(msgspec.Struct):
    """A cell of yosys's JSON."""

    type: str
    connections: dict[str, list[Bit]]
    parameters: dict[str, str | int] = {}
    port_directions: dict[str, str] = {}

    def text(self, name: str, default: str) -> str:
        """A parameter as text."""
        value = self.parameters.get(name, default)
        return value.strip() if isinstance(value, str) else str(value)

    def number(self, name: str) -> int:
        """A parameter as a number; what is undefined reads as zero."""
        value = self.parameters.get(name, 0)
        return value if isinstance(value, int) else int(value.replace("x", "0") or "0", 2)


class Port(msgspec.Struct):
    """A port of yosys's JSON."""

    direction: str
    bits: list[Bit]


class Module(msgspec.Struct):
    """A flat module of yosys's JSON."""

    ports: dict[str, Port]
    cells: dict[str, Cell]


class _Design(msgspec.Struct):
    modules: dict[str, Module]


def read_module(path: Path, top: str) -> Module:
    """The flat top module of yosys's JSON.

    Raises:
        CompileError: if the file is something else, or has no such module.
    """
    try:
        design = msgspec.json.decode(path.read_bytes(), type=_Design)
    except (OSError, msgspec.DecodeError) as error:
        raise CompileError(f"{path}: not a netlist: {error}") from None
    if top not in design.modules:
        raise CompileError(f"{path}: expected a module {top}, found {', '.join(design.modules) or 'none'}")
    return design.modules[top]


def count_cells(module: Module) -> Counter[str]:
    """How many cells of each type."""
    return Counter(cell.type for cell in module.cells.values() if not cell.type.startswith("$"))


class Op(ctypes.Structure):
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
        ("held", ctypes.c_uint64 * (2 * LANES)),
    ]


LUT, MUX, CARRY, MEMORY, MULTIPLY = range(5)
CE_INVERTED, LSR_INVERTED, SETS = 1, 2, 4
WRITE_MODES: Final = {"NORMAL": 0, "WRITETHROUGH": 1, "READBEFOREWRITE": 2}


@dataclass(slots=True)
class Work:
    """A combinational cell that waits for its inputs."""

    op: Op
    needs: tuple[int, ...]
    gives: tuple[int, ...]


class Layout:
    """Cells by kind, their nets numbered."""

    def __init__(self, module: Module, cells: Mapping[str, Add]) -> None:
        """`cells` says, by type, how a cell is added.

        Raises:
            CompileError: if a cell, or the way it is used, is not modelled.
        """
        self.module = module
        self._numbers: dict[Bit, int] = {"0": ZERO, "1": ONE, "x": ZERO, "z": ZERO}
        self.nets = 2
        self.work: list[Work] = []
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
        """The netlist's own nets, without constants and what lies inside cells."""
        return sorted({net for net in self._numbers.values() if net > ONE})

    def inside(self) -> int:
        """A wire within a cell, of no account for power."""
        self.nets += 1
        return self.nets - 1

    def one(self, cell: Cell, port: str) -> int:
        """The net at a port of one bit; nothing connected reads as zero."""
        bits = cell.connections.get(port, [])
        return self.net(bits[0]) if bits else ZERO

    def many(self, cell: Cell, ports: Iterable[str]) -> list[int]:
        """The nets at several ports of one bit."""
        return [self.one(cell, port) for port in ports]

    def read(self, *nets: int) -> None:
        """Count the inputs that nets drive."""
        self.sinks.update(nets)

    def clocked(self, name: str, net: int, inverted: bool) -> None:
        """Insist on one clock."""
        if inverted or (self.clock is not None and net != self.clock):
            raise CompileError(f"netlist: cell {name}: expected one clock and its rising edge")
        self.clock = net

    def combinational(self, kind: int, inputs: Sequence[int], out: int, init: int = 0, **fields: int) -> None:
        """A cell whose output follows its inputs."""
        nets = (ctypes.c_int32 * 4)(*inputs)
        op = Op(kind=kind, out=out, inputs=nets, init=init, **fields)
        gives = (out, fields["more"]) if "more" in fields else (out,)
        self.work.append(Work(op, (*inputs, fields.get("carry_in", ZERO)), gives))

    def ordered(self) -> list[Op]:
        """Every combinational cell after those that drive it.

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
        order: list[Op] = []
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


Add = Callable[[Layout, str, Cell], None]
"""Adds a cell of some name to a layout."""


def _lut4(layout: Layout, _name: str, cell: Cell) -> None:
    inputs = layout.many(cell, "ABCD")
    layout.read(*inputs)
    layout.combinational(LUT, inputs, layout.one(cell, "Z"), cell.number("INIT"))


def _multiplexer(zero: str, one: str, select: str) -> Add:
    def add(layout: Layout, _name: str, cell: Cell) -> None:
        inputs = [*layout.many(cell, (zero, one, select)), ZERO]
        layout.read(*inputs[:3])
        layout.combinational(MUX, inputs, layout.one(cell, "Z"))

    return add


def _carry(layout: Layout, _name: str, cell: Cell) -> None:
    middle = layout.inside()
    for half, (carry_in, carry_out) in enumerate(
        ((layout.one(cell, "CIN"), middle), (middle, layout.one(cell, "COUT") or layout.inside()))
    ):
        inputs = layout.many(cell, (f"{port}{half}" for port in "ABCD"))
        layout.read(*inputs)
        layout.combinational(
            CARRY,
            inputs,
            layout.one(cell, f"S{half}") or layout.inside(),
            cell.number(f"INIT{half}"),
            more=carry_out,
            carry_in=carry_in,
            inject=int(cell.text(f"INJECT1_{half}", "YES") == "YES"),
        )
    layout.read(layout.one(cell, "CIN"))


def _trellis_ff(layout: Layout, name: str, cell: Cell) -> None:
    layout.clocked(name, layout.one(cell, "CLK"), cell.text("CLKMUX", "CLK") == "INV")
    enable, reset = layout.one(cell, "CE"), layout.one(cell, "LSR")
    mux, flags = cell.text("CEMUX", "1"), 0
    if mux in ("0", "1"):
        enable = ONE if mux == "1" else ZERO
    elif mux == "INV":
        flags |= CE_INVERTED
    if cell.text("LSRMUX", "LSR") == "INV":
        flags |= LSR_INVERTED
    elif cell.text("SRMODE", "LSR_OVER_CE") == "ASYNC" and reset != ZERO:
        raise CompileError(f"netlist: cell {name}: asynchronous resets are not modelled")
    if cell.text("LSRMODE", "LSR") == "PRLD":
        raise CompileError(f"netlist: cell {name}: preloading is not modelled")
    if cell.text("REGSET", "RESET") == "SET":
        flags |= SETS
    data = layout.one(cell, "DI")
    layout.read(*(net for net in (data, enable, reset) if net > ONE))
    layout.flip_flops.append(FlipFlop(layout.one(cell, "Q"), data, enable, reset, flags))


def _distributed(layout: Layout, name: str, cell: Cell) -> None:
    layout.clocked(name, layout.one(cell, "WCK"), cell.text("WCKMUX", "WCK") == "INV")
    number = len(layout.memories)
    buses = {port: [layout.net(bit) for bit in cell.connections[port]] for port in ("DI", "WAD", "RAD", "DO")}
    write = {"WRE": layout.one(cell, "WRE"), "1": ONE, "0": ZERO}.get(cell.text("WREMUX", "WRE"))
    if write is None:
        raise CompileError(f"netlist: cell {name}: an inverted write enable is not modelled")
    layout.read(*buses["DI"], *buses["WAD"], *buses["RAD"], write)
    init, full = cell.number("INITVAL"), (1 << LANES) - 1
    cells = (ctypes.c_uint64 * 64)(*(full * (init >> at & 1) for at in range(64)))
    fours = {key: (ctypes.c_int32 * 4)(*buses[key]) for key in ("DI", "WAD")}
    layout.memories.append(DistributedMemory(fours["DI"], fours["WAD"], write, cells))
    for bit, out in enumerate(buses["DO"]):
        layout.combinational(MEMORY, buses["RAD"], out, 4 * number + bit)


def _multiplier(layout: Layout, name: str, cell: Cell) -> None:
    sides = {side: layout.many(cell, (f"{side}{bit}" for bit in range(18))) for side in "AB"}
    product = layout.many(cell, (f"P{bit}" for bit in range(36)))
    registers = 0
    for flag, field in enumerate(("INPUTA", "INPUTB", "PIPELINE", "OUTPUT")):
        clock = cell.text(f"REG_{field}_CLK", "NONE")
        if clock == "NONE":
            continue
        registers |= 1 << flag
        layout.clocked(name, layout.one(cell, clock), False)
        enable = layout.one(cell, cell.text(f"REG_{field}_CE", "CE0"))
        reset = layout.one(cell, cell.text(f"REG_{field}_RST", "RST0"))
        if (enable, reset) != (ONE, ZERO):
            raise CompileError(f"netlist: cell {name}: enabled or reset multiplier registers are not modelled")
    if registers & 3 not in (0, 3):
        raise CompileError(f"netlist: cell {name}: only one of the operands is registered, which is not modelled")
    layout.read(*sides["A"], *sides["B"])
    signs = layout.many(cell, ("SIGNEDA", "SIGNEDB"))
    entry = Multiplier(
        (ctypes.c_int32 * 18)(*sides["A"]),
        (ctypes.c_int32 * 18)(*sides["B"]),
        (ctypes.c_int32 * 36)(*product),
        *signs,
        registers,
    )
    if not registers:
        op = Op(kind=MULTIPLY, out=ZERO, init=len(layout.multipliers))
        layout.work.append(Work(op, (*sides["A"], *sides["B"]), tuple(product)))
    layout.multipliers.append(entry)


def _block_ram(layout: Layout, name: str, cell: Cell) -> None:
    entry = BlockRam()
    widths = [cell.number(f"DATA_WIDTH_{side}") or 18 for side in "AB"]
    for side, port, width in zip("AB", entry.port, widths, strict=True):
        if any(layout.many(cell, (f"CS{side}{bit}" for bit in range(3)))):
            raise CompileError(f"netlist: cell {name}: chip selects are not modelled")
        clock = layout.one(cell, f"CLK{side}")
        if clock > ONE:
            layout.clocked(name, clock, cell.text(f"CLK{side}MUX", f"CLK{side}") == "INV")
        _fill_port(layout, name, cell, side, port, width)
    if widths[1] == 36:
        outs = [layout.one(cell, f"DO{side}{bit}") for side in "AB" for bit in range(18)]
        entry.port[1].out[:] = outs
        entry.port[0].out[:] = [ZERO] * 36
    if widths[0] == 36:
        entry.port[0].data[:] = [layout.one(cell, f"DI{side}{bit}") for side in "AB" for bit in range(18)]
    entry.written = int(any(port.write != ZERO and port.enable != ZERO for port in entry.port))
    contents = np.array(
        [cell.number(f"INITVAL_{row:02X}") >> 20 * word & 0x3FFFF for row in range(64) for word in range(16)],
        np.uint32,
    )
    layout.block_rams.append(entry)
    layout.contents.append(np.tile(contents, LANES) if entry.written else contents)


def _fill_port(layout: Layout, name: str, cell: Cell, side: str, port: RamPort, width: int) -> None:
    address = layout.many(cell, (f"AD{side}{bit}" for bit in range(14)))
    data = layout.many(cell, (f"DI{side}{bit}" for bit in range(18)))
    enable, write = layout.one(cell, f"CE{side}"), layout.one(cell, f"WE{side}")
    reset = layout.one(cell, f"RST{side}")
    port.address[:] = address
    port.data[:] = data + [ZERO] * 18
    port.out[:] = layout.many(cell, (f"DO{side}{bit}" for bit in range(18))) + [ZERO] * 18
    port.enable, port.write, port.reset, port.width = enable, write, reset, width
    port.registered = int(cell.text(f"REGMODE_{side}", "NOREG") == "OUTREG")
    if port.registered and reset != ZERO:
        raise CompileError(f"netlist: cell {name}: a reset of a block RAM's output register is not modelled")
    port.mode = WRITE_MODES[cell.text(f"WRITEMODE_{side}", "NORMAL")]
    layout.read(*(net for net in (*address, *data, enable, write, reset) if net > ONE))


CELLS: Final[dict[str, Add]] = {
    "LUT4": _lut4,
    "PFUMX": _multiplexer("BLUT", "ALUT", "C0"),
    "L6MUX21": _multiplexer("D0", "D1", "SD"),
    "CCU2C": _carry,
    "TRELLIS_FF": _trellis_ff,
    "TRELLIS_DPR16X4": _distributed,
    "MULT18X18D": _multiplier,
    "DP16KD": _block_ram,
}
