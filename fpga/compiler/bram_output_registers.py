"""Moves registers behind block RAMs into the block RAMs' own output registers, for ECP5.

Yosys does not do this, and the path from a block RAM to the next register often limits the clock. The function stays
the same cycle for cycle, with fewer flip-flops. The netlist is changed as JSON between yosys and nextpnr, and the
changed netlist is the one that is simulated against the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

Bit = int | str
Cell = dict[str, Any]


def absorb(netlist: Path, top: str) -> int:
    """Rewrite yosys's JSON; return the number of flip-flops moved.

    A block RAM absorbs registers only if all its outputs go to plain registers (no enable, no reset, initially zero) of
    its own clock and nowhere else, and the RAM itself has no reset.
    """
    design = msgspec.json.decode(netlist.read_bytes())
    module = design["modules"][top]
    cells: dict[str, Cell] = module["cells"]
    uses = Counter(bit for _, bits in _read(module) for bit in bits)
    registers = {
        cell["connections"]["DI"][0]: name
        for name, cell in cells.items()
        if cell["type"] == "TRELLIS_FF" and _plain(cell)
    }
    gone: list[str] = []
    for ram in [cell for cell in cells.values() if cell["type"] == "DP16KD"]:
        behind = _registers_behind(ram, registers, uses, cells)
        _take_over(ram, {bit: cells[name]["connections"]["Q"][0] for bit, name in behind.items()})
        gone += behind.values()
    for name in gone:
        del cells[name]
    netlist.write_bytes(msgspec.json.encode(design))
    return len(gone)


def _registers_behind(
    ram: Cell, registers: Mapping[Bit, str], uses: Mapping[Bit, int], cells: Mapping[str, Cell]
) -> dict[Bit, str]:
    """The register behind each output that is used; none if not all of them can move."""
    given = [bit for name in _outputs(ram) for bit in ram["connections"].get(name, []) if uses[bit]]
    behind = {bit: registers[bit] for bit in given if bit in registers and uses[bit] == 1}
    if len(behind) != len(given) or not _unreset(ram):
        return {}
    if any(cells[name]["connections"]["CLK"] != _clock(ram) for name in behind.values()):
        return {}
    return behind


def _take_over(ram: Cell, after: Mapping[Bit, Bit]) -> None:
    """Give a block RAM output registers that drive `after` in place of its outputs."""
    if not after:
        return
    for name in _outputs(ram):
        ram["connections"][name] = [after.get(bit, bit) for bit in ram["connections"].get(name, [])]
    ram["parameters"].update(REGMODE_A="OUTREG", REGMODE_B="OUTREG")
    # The lower half of a 36-bit word leaves by port A, so both ports need the clock.
    ram["connections"].update(OCEA=["1"], OCEB=["1"], CLKA=_clock(ram), CLKB=_clock(ram))


def _outputs(ram: Cell) -> list[str]:
    return [name for name, direction in ram["port_directions"].items() if direction == "output"]


def _read(module: Mapping[str, Any]) -> Iterator[tuple[str, list[Bit]]]:
    """Everything that reads nets: inputs of cells, and outputs of the module."""
    for port in module["ports"].values():
        if port["direction"] == "output":
            yield "", port["bits"]
    for name, cell in module["cells"].items():
        for port, bits in cell["connections"].items():
            if cell.get("port_directions", {}).get(port) == "input":
                yield name, [bit for bit in bits if isinstance(bit, int)]


def _plain(cell: Cell) -> bool:
    parameters, connections = cell["parameters"], cell["connections"]
    enabled = parameters.get("CEMUX", "1").strip()  # yosys appends a space to text that could be a number
    always = enabled == "1" or (enabled == "CE" and connections.get("CE", ["0"]) == ["1"])
    never = connections.get("LSR", ["0"]) in ([], ["0"]) and parameters.get("LSRMUX", "LSR") == "LSR"
    zero = parameters.get("REGSET", "RESET") == "RESET"
    return always and never and zero and parameters.get("CLKMUX", "CLK") == "CLK"


def _unreset(cell: Cell) -> bool:
    return all(cell["connections"].get(port, ["0"]) in ([], ["0"], ["x"]) for port in ("RSTA", "RSTB"))


def _clock(cell: Cell) -> list[Bit]:
    """The clock of the reading port; both ports have the same clock, or one has none."""
    clocks = [cell["connections"].get(port, []) for port in ("CLKB", "CLKA")]
    found = [clock for clock in clocks if clock and isinstance(clock[0], int)]
    return found[0] if found and all(clock == found[0] for clock in found) else []
