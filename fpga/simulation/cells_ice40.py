"""The functions of the cells in iCE40 netlists, in terms of the kernel, which knows ECP5's cells.

A 4 kbit block RAM becomes one of ECP5's with as many words, a large RAM one with its first 1,024 words, and a 16x16
multiplier an 18x18 one with flip-flops behind each half of the product that has a register.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fpga.compiler.yosys_netlist import NetlistCell
from fpga.simulation.cell_layout import (
    LANES,
    LUT,
    MULTIPLY,
    ONE,
    SETS,
    ZERO,
    AddCell,
    BlockRam,
    CellLayout,
    CellOp,
    FlipFlop,
    Multiplier,
    PendingCell,
    RamPort,
)
from hawkvision.core.errors import CompileError

INVERT: Final = 0x5555
BOTH: Final = 0x8888
"""Look-up tables that invert the first input, and that join the first two by AND."""
SLICES: Final = {0: (1, 0), 1: (2, 0), 2: (4, 1), 3: (8, 3)}
"""By mode of a block RAM: the words that share a row of 16 bits, interleaved bit by bit; and the pin of a word's first
bit."""
ADDRESS_FROM: Final = {0: 4, 1: 3, 2: 2, 3: 1}
"""First address bit in the kernel's port of as many words."""
WIDTHS: Final = {0: 18, 1: 9, 2: 4, 3: 2}
"""The kernel's width of that port."""
LARGE_WORDS_LOG2: Final = 10
OPERANDS: Final = {"A": 1, "B": 2}
INTERMEDIATE: Final = 4
SUM: Final = 8
"""The kernel's flags of a multiplier: registers of the operands, behind the partial products, and behind the sum."""
NEEDS_ZERO: Final = (
    *("IRSTTOP", "IRSTBOT", "ORSTTOP", "ORSTBOT", "OLOADTOP", "OLOADBOT", "ADDSUBTOP", "ADDSUBBOT"),
    *("OHOLDTOP", "OHOLDBOT", "AHOLD", "BHOLD"),
)


def _lut4(layout: CellLayout, _name: str, cell: NetlistCell) -> None:
    inputs = layout.many(cell, ("I0", "I1", "I2", "I3"))
    layout.read(*inputs)
    layout.combinational(LUT, inputs, layout.one(cell, "O"), cell.number("LUT_INIT"))


def _carry(layout: CellLayout, _name: str, cell: NetlistCell) -> None:
    inputs = [*layout.many(cell, ("I0", "I1", "CI")), ZERO]
    layout.read(*inputs)
    layout.combinational(LUT, inputs, layout.one(cell, "CO"), 0b11101000_11101000)


def _both(layout: CellLayout, one: int, other: int) -> int:
    """The AND of two nets."""
    if ZERO in (one, other):
        return ZERO
    if ONE in (one, other):
        return other if one == ONE else one
    out = layout.inside()
    layout.combinational(LUT, (one, other, ZERO, ZERO), out, BOTH)
    return out


def _inverse(layout: CellLayout, net: int) -> int:
    if net <= ONE:
        return ONE - net
    out = layout.inside()
    layout.combinational(LUT, (net, ZERO, ZERO, ZERO), out, INVERT)
    return out


def _flip_flop(sets: bool, enabled: bool, resets: bool) -> AddCell:
    def add(layout: CellLayout, name: str, cell: NetlistCell) -> None:
        layout.clocked(name, layout.one(cell, "C"), False)
        enable = layout.one(cell, "E") if enabled else ONE
        reset = layout.one(cell, "S" if sets else "R") if resets else ZERO
        data = layout.one(cell, "D")
        layout.read(*(net for net in (data, enable, reset) if net > ONE))
        gated = _both(layout, enable, reset)  # a reset acts only while enabled
        layout.flip_flops.append(FlipFlop(layout.one(cell, "Q"), data, enable, gated, SETS if sets else 0))

    return add


def _enable(layout: CellLayout, cell: NetlistCell, *ports: str) -> int:
    """The AND of several ports that are high if unconnected."""
    nets = [layout.one(cell, port) if cell.connections.get(port) else ONE for port in ports]
    return _both(layout, *nets)


def _block_ram(layout: CellLayout, name: str, cell: NetlistCell) -> None:
    mode = cell.number("READ_MODE")
    writes = _enable(layout, cell, "WCLKE", "WE")
    if writes != ZERO and cell.number("WRITE_MODE") != mode:
        raise CompileError(f"netlist: cell {name}: a block RAM whose ports differ in width is not modelled")
    contents = _contents(cell, mode)
    masked = zip(cell.connections.get("MASK", []), cell.connections["WDATA"], strict=False)
    # Unused bits are never written; they would be written with the zero that they hold.
    unused = ("1", "0")
    masks = {layout.net(mask) for mask, data in masked if (mask, data) != unused or contents.any()} or {ZERO}
    if len(masks) > 1:
        raise CompileError(f"netlist: cell {name}: a block RAM whose bits are written apart is not modelled")
    written = _inverse(layout, masks.pop())
    for clock in ("RCLK", "WCLK"):
        if layout.one(cell, clock) > ONE:
            layout.clocked(name, layout.one(cell, clock), False)
    entry = BlockRam()
    data = _fill_port(layout, cell, "W", entry.port[0], mode, writes, written)
    entry.port[0].write = ONE
    entry.port[0].data[:] = data
    layout.read(*(net for net in (*data, *map(layout.net, cell.connections.get("MASK", []))) if net > ONE))
    entry.port[1].out[:] = _fill_port(layout, cell, "R", entry.port[1], mode, _enable(layout, cell, "RCLKE", "RE"), ONE)
    entry.written = int(writes != ZERO)
    layout.block_rams.append(entry)
    layout.contents.append(np.tile(contents, LANES) if entry.written else contents)


def _fill_port(
    layout: CellLayout, cell: NetlistCell, side: str, port: RamPort, mode: int, enable: int, written: int
) -> list[int]:
    """Fill address and enable of the kernel's port; return the 36 nets of its data."""
    words, first = SLICES[mode]
    address = [layout.net(bit) for bit in cell.connections[f"{side}ADDR"]][: 8 + mode]
    low = ADDRESS_FROM[mode]
    # Both bytes of a 16-bit word are written, or none; the kernel has their enables below the address.
    port.address[:] = [*([written] * low), *address, *([ZERO] * (14 - low - len(address)))]
    port.enable, port.width = enable, WIDTHS[mode]
    layout.read(*(net for net in (*address, enable) if net > ONE))
    data = [layout.net(bit) for bit in cell.connections[f"{side}DATA"][first::words]]
    return [*data, *([ZERO] * (36 - len(data)))]


def _contents(cell: NetlistCell, mode: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """The kernel's 1,024 cells of 18 bits: word w of a mode lies in row w mod 256, in slices w div 256."""
    words, _ = SLICES[mode]
    cells = np.zeros(1024, np.uint32)
    for word in range(256 * words):
        row = cell.number(f"INIT_{word % 256 >> 4:X}") >> 16 * (word & 15)
        value = sum((row >> place & 1) << at for at, place in enumerate(range(word // 256, 16, words)))
        address = word << ADDRESS_FROM[mode]
        shift = 0
        if mode:
            shift = 9 * (address >> 3 & 1)
            shift += 4 * (address >> 2 & 1) if mode >= 2 else 0
            shift += 2 * (address >> 1 & 1) if mode == 3 else 0
        cells[address >> 4] |= np.uint32(value << shift)
    return cells


def _large_ram(layout: CellLayout, name: str, cell: NetlistCell) -> None:
    address = [layout.net(bit) for bit in cell.connections["ADDRESS"]]
    if any(address[LARGE_WORDS_LOG2:]):
        raise CompileError(f"netlist: cell {name}: only {1 << LARGE_WORDS_LOG2:,} words of a large RAM are modelled")
    if layout.many(cell, ("STANDBY", "SLEEP", "POWEROFF")) != [ZERO, ZERO, ONE]:
        raise CompileError(f"netlist: cell {name}: a large RAM that sleeps is not modelled")
    mask = [layout.net(bit) for bit in cell.connections["MASKWREN"]]
    if mask[0] != mask[1] or mask[2] != mask[3]:
        raise CompileError(f"netlist: cell {name}: of a large RAM bytes are modelled, and not half of one")
    layout.clocked(name, layout.one(cell, "CLOCK"), False)
    data, out = ([layout.net(bit) for bit in cell.connections[port]] for port in ("DATAIN", "DATAOUT"))
    entry = BlockRam()
    port = entry.port[0]
    port.address[:] = [mask[0], mask[2], ZERO, ZERO, *address[:LARGE_WORDS_LOG2]]
    port.enable, port.write, port.width = layout.one(cell, "CHIPSELECT"), layout.one(cell, "WREN"), 18
    # The kernel's bytes have nine bits.
    port.data[:] = [*data[:8], ZERO, *data[8:], *([ZERO] * 19)]
    port.out[:] = [*out[:8], ZERO, *out[8:], *([ZERO] * 19)]
    entry.port[1].width = 18
    entry.written = 1
    layout.read(*(net for net in (*address, *data, *mask, port.enable, port.write) if net > ONE))
    layout.block_rams.append(entry)
    layout.contents.append(np.zeros(1024 * LANES, np.uint32))


def _multiplier(layout: CellLayout, name: str, cell: NetlistCell) -> None:
    entry = Multiplier(registers=_multiplier_registers(layout, name, cell))
    for side, nets in (("A", entry.a), ("B", entry.b)):
        bits = [layout.net(bit) for bit in cell.connections[side]]
        layout.read(*(bit for bit in bits if bit > ONE))
        nets[:] = [*bits, *([bits[15] if cell.number(f"{side}_SIGNED") else ZERO] * 2)]
    entry.signed_a, entry.signed_b = cell.number("A_SIGNED"), cell.number("B_SIGNED")
    product = [layout.net(bit) for bit in cell.connections["O"]]
    halves = (("BOT", product[:16]), ("TOP", product[16:]))
    shown = [net for half, nets in halves for net in _half(layout, name, cell, half, nets)]
    entry.p[:] = [*shown, *([ZERO] * 4)]
    if not entry.registers:
        op = CellOp(kind=MULTIPLY, out=ZERO, init=len(layout.multipliers))
        layout.work.append(PendingCell(op, (*entry.a, *entry.b), tuple(shown)))
    layout.multipliers.append(entry)


def _multiplier_registers(layout: CellLayout, name: str, cell: NetlistCell) -> int:
    """The registers before the output registers, as the kernel's flags."""
    intermediate = {cell.number(f"{field}_REG") for field in ("TOP_8x8_MULT", "BOT_8x8_MULT")}
    intermediate.add(cell.number("PIPELINE_16x16_MULT_REG1"))
    inside = (INTERMEDIATE if intermediate == {1} else 0) | (SUM if cell.number("PIPELINE_16x16_MULT_REG2") else 0)
    operands = sum(flag for side, flag in OPERANDS.items() if cell.number(f"{side}_REG"))
    enabled = not cell.connections.get("CE") or layout.one(cell, "CE") == ONE
    unlike = {
        "a multiplier of 8x8": cell.number("MODE_8x8"),
        "the falling edge": cell.number("NEG_TRIGGER"),
        "some of the registers in the middle": len(intermediate) > 1,
        "one operand in a register and none behind": operands in OPERANDS.values() and not inside,
        "an enable, a reset, or one that adds": not enabled or any(layout.many(cell, NEEDS_ZERO)),
    }
    found = [words for words, is_so in unlike.items() if is_so]
    if found:
        raise CompileError(f"netlist: cell {name}: not modelled: {', '.join(found)}")
    if operands | inside:
        layout.clocked(name, layout.one(cell, "CLK"), False)
    return operands | inside


def _half(layout: CellLayout, name: str, cell: NetlistCell, half: str, nets: list[int]) -> list[int]:
    """Nets of half a product: at its pins, or before its output register."""
    select = cell.number(f"{half}OUTPUT_SELECT")
    if select == 3:
        return nets
    added = [layout.net(bit) for bit in cell.connections.get("C" if half == "TOP" else "D", [])]
    plain = cell.number(f"{half}ADDSUB_LOWERINPUT") == 2 and cell.number(f"{half}ADDSUB_UPPERINPUT") == 1
    carried = half == "BOT" and cell.number("BOTADDSUB_CARRYSELECT") != 0
    if select != 1 or any(added) or not plain or carried or cell.number("TOPADDSUB_CARRYSELECT") == 1:
        raise CompileError(f"netlist: cell {name}: expected the product, or a register behind it, and nothing added")
    layout.clocked(name, layout.one(cell, "CLK"), False)
    inside = [layout.inside() for _ in nets]
    layout.flip_flops += [FlipFlop(net, before, ONE, ZERO, 0) for net, before in zip(nets, inside, strict=True)]
    return inside


CELLS: Final[dict[str, AddCell]] = {
    "SB_LUT4": _lut4,
    "SB_CARRY": _carry,
    "SB_DFF": _flip_flop(False, False, False),
    "SB_DFFE": _flip_flop(False, True, False),
    "SB_DFFSR": _flip_flop(False, False, True),
    "SB_DFFESR": _flip_flop(False, True, True),
    "SB_DFFSS": _flip_flop(True, False, True),
    "SB_DFFESS": _flip_flop(True, True, True),
    "SB_RAM40_4K": _block_ram,
    "SB_SPRAM256KA": _large_ram,
    "SB_MAC16": _multiplier,
}
