"""Reads netlists that yosys wrote as JSON: the ports and cells of a flat module."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from hawkvision.core.errors import CompileError

Bit = int | str


class NetlistCell(msgspec.Struct):
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
        """A parameter as a number; undefined bits read as zero."""
        value = self.parameters.get(name, 0)
        return value if isinstance(value, int) else int(value.replace("x", "0") or "0", 2)


class NetlistPort(msgspec.Struct):
    """A port of yosys's JSON."""

    direction: str
    bits: list[Bit]


class NetlistModule(msgspec.Struct):
    """A flat module of yosys's JSON."""

    ports: dict[str, NetlistPort]
    cells: dict[str, NetlistCell]


class _YosysFile(msgspec.Struct):
    modules: dict[str, NetlistModule]


def read_module(path: Path, top: str) -> NetlistModule:
    """Read the flat top module of a netlist file.

    Raises:
        CompileError: if the file is no netlist, or has no such module.
    """
    try:
        design = msgspec.json.decode(path.read_bytes(), type=_YosysFile)
    except (OSError, msgspec.DecodeError) as error:
        raise CompileError(f"{path}: not a netlist: {error}") from None
    if top not in design.modules:
        raise CompileError(f"{path}: expected a module {top}, found {', '.join(design.modules) or 'none'}")
    return design.modules[top]


def count_cells(module: NetlistModule) -> Counter[str]:
    """Number of cells by type."""
    return Counter(cell.type for cell in module.cells.values() if not cell.type.startswith("$"))
