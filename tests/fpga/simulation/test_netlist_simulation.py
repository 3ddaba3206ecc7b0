"""The netlist evaluator: cells that compute what they should, refusals by name, a design against the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpga.simulation.netlist_simulation import NetlistSimulation, Words
from hawkvision.core.errors import CompileError
from tests.fuzz.examples import examples

ALL = (1 << 64) - 1


def cell(kind: str, parameters: dict[str, str] | None = None, **connections: list[int | str]) -> dict[str, Any]:
    return {"type": kind, "parameters": parameters or {}, "connections": connections}


def netlist(folder: Path, ports: dict[str, list[int]], outputs: set[str], **cells: dict[str, Any]) -> NetlistSimulation:
    described = {
        name: {"direction": "output" if name in outputs else "input", "bits": bits} for name, bits in ports.items()
    }
    (folder / "n.json").write_text(json.dumps({"modules": {"t": {"ports": described, "cells": cells}}}))
    return NetlistSimulation(folder / "n.json", "t")


def flip_flop(d: int | str, q: int, **more: str) -> dict[str, Any]:
    fields = {"CEMUX": "1", "REGSET": "RESET", "SRMODE": "LSR_OVER_CE", **more}
    return cell("TRELLIS_FF", fields, CLK=[2], DI=[d], Q=[q], LSR=["0"], CE=["1"])


@given(table=st.integers(0, 0xFFFF), inputs=st.lists(st.integers(0, ALL), min_size=4, max_size=4))
@settings(max_examples=examples(250), deadline=None)
def test_look_up_table_gives_the_bit_that_its_inputs_spell(
    tmp_path_factory: pytest.TempPathFactory, table: int, inputs: list[int]
) -> None:
    """Observed as toggles of its output, which begins at zero: one for each lane in which it becomes one."""
    made = netlist(
        tmp_path_factory.mktemp("lut"),
        {"clk": [2], "in": [3, 4, 5, 6], "out": [7]},
        {"out"},
        lut=cell("LUT4", {"INIT": f"{table:016b}"}, A=[3], B=[4], C=[5], D=[6], Z=[7]),
    )
    words: Words = np.array([[0] * 4, inputs], np.uint64)
    expected = [table >> sum((word >> lane & 1) << at for at, word in enumerate(inputs)) & 1 for lane in range(64)]
    changed = sum(bit != (table & 1) for bit in expected)
    into = sum(word.bit_count() for word in inputs)
    assert made.cycles({"in": words}, 2, skip=1).net_toggles == (changed + into) / 64


def test_counter_of_flip_flops_and_tables_halves_its_toggles_bit_by_bit(tmp_path: Path) -> None:
    made = netlist(
        tmp_path,
        {"clk": [2], "out": [3, 4]},
        {"out"},
        not0=cell("LUT4", {"INIT": f"{0x5555:016b}"}, A=[3], B=["0"], C=["0"], D=["0"], Z=[5]),
        xor=cell("LUT4", {"INIT": f"{0x6666:016b}"}, A=[3], B=[4], C=["0"], D=["0"], Z=[6]),
        low=flip_flop(5, 3),
        high=flip_flop(6, 4),
    )
    found = made.cycles({}, 1024, skip=0)
    # Bit 0 and its inverse change every cycle, bit 1 and its next value every other; the first cycle has no before.
    assert found.net_toggles == pytest.approx(1024 * 3, rel=0.01)
    assert found.flip_flops == 2


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (cell("EHXPLLL"), "cell odd: EHXPLLL is not modelled"),
        (flip_flop(3, 4, CLKMUX="INV"), "cell odd: expected one clock and its rising edge"),
        (cell("LUT4", {"INIT": "0" * 16}, A=[5], B=[3], C=[3], D=[3], Z=[5]), "1 cells form a combinational loop"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path: Path, made: dict[str, Any], says: str) -> None:
    with pytest.raises(CompileError, match=says):
        netlist(tmp_path, {"clk": [2], "a": [3]}, set(), odd=made)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"modules": {"other": {"ports": {}, "cells": {}}}}'])
def test_files_that_are_no_netlist_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "n.json").write_bytes(content)
    with pytest.raises(CompileError, match=r"n\.json"):
        NetlistSimulation(tmp_path / "n.json", "t")
