"""Registers behind block RAMs go into them where nothing else is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fpga.compiler.bram_output_registers import absorb


def block_ram(**more: list[int | str]) -> dict[str, Any]:
    connections: dict[str, list[int | str]] = {
        "CLKA": ["0"],
        "CLKB": [2],
        "RSTA": ["0"],
        "RSTB": ["0"],
        "DOA0": [10],
        "DOB0": [11],
        "DOB1": [99],
        **more,
    }
    ways = {name: "output" if name.startswith("DO") else "input" for name in connections}
    modes = {"REGMODE_A": "NOREG", "REGMODE_B": "NOREG"}
    return {"type": "DP16KD", "parameters": modes, "port_directions": ways, "connections": connections}


def register(d: int, q: int, enable: str = "1 ", clock: int = 2, **more: list[int | str]) -> dict[str, Any]:
    connections: dict[str, list[int | str]] = {"CLK": [clock], "DI": [d], "LSR": ["0"], "Q": [q], **more}
    ways = {name: "output" if name == "Q" else "input" for name in connections}
    parameters = {"CEMUX": enable, "CLKMUX": "CLK", "LSRMUX": "LSR", "REGSET": "RESET"}
    return {"type": "TRELLIS_FF", "parameters": parameters, "port_directions": ways, "connections": connections}


def written(folder: Path, **cells: dict[str, Any]) -> Path:
    ports = {"clk": {"direction": "input", "bits": [2]}, "out": {"direction": "output", "bits": [20, 21]}}
    path = folder / "n.json"
    path.write_bytes(msgspec.json.encode({"modules": {"t": {"ports": ports, "cells": cells}}}))
    return path


def test_plain_registers_behind_a_block_ram_go_into_it(tmp_path: Path) -> None:
    path = written(tmp_path, ram=block_ram(), low=register(10, 20), high=register(11, 21))
    assert absorb(path, "t") == 2
    cells = msgspec.json.decode(path.read_bytes())["modules"]["t"]["cells"]
    assert list(cells) == ["ram"]
    assert cells["ram"]["connections"]["DOA0"] == [20]
    assert cells["ram"]["connections"]["DOB0"] == [21]
    assert cells["ram"]["connections"]["CLKA"] == [2]
    assert cells["ram"]["parameters"] == {"REGMODE_A": "OUTREG", "REGMODE_B": "OUTREG"}


@pytest.mark.parametrize(
    "cells",
    [
        {"ram": block_ram(), "low": register(10, 20), "high": register(11, 21, enable="CE", CE=[5])},
        {"ram": block_ram(), "low": register(10, 20), "high": register(11, 21, LSR=[5])},
        {"ram": block_ram(), "low": register(10, 20), "high": register(11, 21, clock=3)},
        {"ram": block_ram(), "low": register(10, 20), "high": register(11, 21), "other": register(11, 30)},
        {"ram": block_ram(DOB0=[21]), "low": register(10, 20)},
        {"ram": block_ram(RSTB=[5]), "low": register(10, 20), "high": register(11, 21)},
        {"ram": block_ram(CLKA=[3]), "low": register(10, 20), "high": register(11, 21)},
    ],
    ids=["enabled", "reset", "other clock", "read twice", "leaves the chip", "memory reset", "two clocks"],
)
def test_anything_else_is_left_as_it_was(tmp_path: Path, cells: dict[str, Any]) -> None:
    path = written(tmp_path, **cells)
    before = path.read_bytes()
    assert absorb(path, "t") == 0
    assert path.read_bytes() == before
