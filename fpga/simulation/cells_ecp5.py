"""The functions of the cells in ECP5 netlists. A cell without a model is refused by name.

Nothing is shared with `fpga/rtl`, so that the netlist's simulation is independent evidence.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from fpga.compiler.yosys_netlist import NetlistCell
from fpga.simulation.cell_layout import (
    CARRY,
    CE_INVERTED,
    LANES,
    LSR_INVERTED,
    LUT,
    MEMORY,
    MULTIPLY,
    MUX,
    ONE,
    SETS,
    ZERO,
    AddCell,
    BlockRam,
    CellLayout,
    CellOp,
    DistributedMemory,
    FlipFlop,
    Multiplier,
    PendingCell,
    RamPort,
)
from hawkvision.core.errors import CompileError

WRITE_MODES: Final = {"NORMAL": 0, "WRITETHROUGH": 1, "READBEFOREWRITE": 2}


def _lut4(layout: CellLayout, _name: str, cell: NetlistCell) -> None:
    inputs = layout.many(cell, "ABCD")
    layout.read(*inputs)
    layout.combinational(LUT, inputs, layout.one(cell, "Z"), cell.number("INIT"))


def _multiplexer(zero: str, one: str, select: str) -> AddCell:
    def add(layout: CellLayout, _name: str, cell: NetlistCell) -> None:
        inputs = [*layout.many(cell, (zero, one, select)), ZERO]
        layout.read(*inputs[:3])
        layout.combinational(MUX, inputs, layout.one(cell, "Z"))

    return add


def _carry(layout: CellLayout, _name: str, cell: NetlistCell) -> None:
    intermediate = layout.inside()
    for half, (carry_in, carry_out) in enumerate(
        ((layout.one(cell, "CIN"), intermediate), (intermediate, layout.one(cell, "COUT") or layout.inside()))
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


def _trellis_ff(layout: CellLayout, name: str, cell: NetlistCell) -> None:
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


def _distributed(layout: CellLayout, name: str, cell: NetlistCell) -> None:
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


def _multiplier(layout: CellLayout, name: str, cell: NetlistCell) -> None:
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
        op = CellOp(kind=MULTIPLY, out=ZERO, init=len(layout.multipliers))
        layout.work.append(PendingCell(op, (*sides["A"], *sides["B"]), tuple(product)))
    layout.multipliers.append(entry)


def _block_ram(layout: CellLayout, name: str, cell: NetlistCell) -> None:
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


def _fill_port(layout: CellLayout, name: str, cell: NetlistCell, side: str, port: RamPort, width: int) -> None:
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


CELLS: Final[dict[str, AddCell]] = {
    "LUT4": _lut4,
    "PFUMX": _multiplexer("BLUT", "ALUT", "C0"),
    "L6MUX21": _multiplexer("D0", "D1", "SD"),
    "CCU2C": _carry,
    "TRELLIS_FF": _trellis_ff,
    "TRELLIS_DPR16X4": _distributed,
    "MULT18X18D": _multiplier,
    "DP16KD": _block_ram,
}
