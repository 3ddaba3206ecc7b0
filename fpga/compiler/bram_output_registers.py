"""Registers behind block RAMs, moved into them: what yosys does not do for ECP5, and what most limits the clock.

By nextpnr's tables a block RAM gives its word 5.6 ns after the clock, and the wire to the next register comes on top.
With 2.9 ns of it that was the slowest path of the first design placed, at 117 MHz; it reached 135 MHz when its block
RAMs used their own output registers (fashion_mnist tiny_w4, lfe5u-45f, the same seed). `hv_rom`, `hv_window` and
`hv_pool` have nothing but a plain register behind every block RAM, so the two can be one: the same function, cycle for
cycle, with fewer flip-flops. The netlist is changed as JSON, between yosys and nextpnr, and it is the changed one that
is run against the reference (`fpga.simulation.netlist_simulation`).
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
    """Rewrite yosys's JSON; returns how many flip-flops went into block RAMs.

    A block RAM takes them only if everything it gives goes into plain registers (no enable, no reset, zero at the
    beginning) of its own clock and nowhere else, and it is not reset itself.
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
    for cell in list(cells.values()):
        if cell["type"] != "DP16KD":
            continue
        outputs = [name for name, way in cell["port_directions"].items() if way == "output"]
        given = [bit for name in outputs for bit in cell["connections"].get(name, []) if uses[bit]]
        behind = [registers.get(bit) for bit in given]
        if not given or None in behind or any(uses[bit] != 1 for bit in given) or not _unreset(cell):
            continue
        names = [name for name in behind if name is not None]
        if any(cells[name]["connections"]["CLK"] != _clock(cell) for name in names):
            continue
        after = {bit: cells[name]["connections"]["Q"][0] for bit, name in zip(given, names, strict=True)}
        for name in outputs:
            cell["connections"][name] = [after.get(bit, bit) for bit in cell["connections"].get(name, [])]
        cell["parameters"].update(REGMODE_A="OUTREG", REGMODE_B="OUTREG")
        # Of a word of 36 bits the lower half leaves by port A: both ports get the clock that may have been one's only.
        cell["connections"].update(OCEA=["1"], OCEB=["1"], CLKA=_clock(cell), CLKB=_clock(cell))
        gone += names
    for name in gone:
        del cells[name]
    netlist.write_bytes(msgspec.json.encode(design))
    return len(gone)


def _read(module: Mapping[str, Any]) -> Iterator[tuple[str, list[Bit]]]:
    """Everything that reads nets: inputs of cells, outputs of the module."""
    for port in module["ports"].values():
        if port["direction"] == "output":
            yield "", port["bits"]
    for name, cell in module["cells"].items():
        for port, bits in cell["connections"].items():
            if cell.get("port_directions", {}).get(port) == "input":
                yield name, [bit for bit in bits if isinstance(bit, int)]


def _plain(cell: Cell) -> bool:
    parameters, connections = cell["parameters"], cell["connections"]
    enabled = parameters.get("CEMUX", "1").strip()  # yosys puts a space behind text that could be a number
    always = enabled == "1" or (enabled == "CE" and connections.get("CE", ["0"]) == ["1"])
    never = connections.get("LSR", ["0"]) in ([], ["0"]) and parameters.get("LSRMUX", "LSR") == "LSR"
    zero = parameters.get("REGSET", "RESET") == "RESET"
    return always and never and zero and parameters.get("CLKMUX", "CLK") == "CLK"


def _unreset(cell: Cell) -> bool:
    return all(cell["connections"].get(port, ["0"]) in ([], ["0"], ["x"]) for port in ("RSTA", "RSTB"))


def _clock(cell: Cell) -> list[Bit]:
    """Of the port that reads; both have the same, or one has none."""
    clocks = [cell["connections"].get(port, []) for port in ("CLKB", "CLKA")]
    found = [clock for clock in clocks if clock and isinstance(clock[0], int)]
    return found[0] if found and all(clock == found[0] for clock in found) else []
