"""The cache of compiled code: bounded, the oldest goes first, and code of other users is not loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fpga.simulation.build_cache import ABANDONED_S, CacheBounds, mark_used, tidy
from fpga.simulation.verilator import VerilatorDesign, library

NOW = 1e9


def simulation(folder: Path, name: str, used_at: float, size: int = 100) -> Path:
    made = folder / f"sim-{name}"
    made.mkdir()
    (made / "model.so").write_bytes(bytes(size))
    os.utime(made, (used_at, used_at))
    return made


def kernel(folder: Path, name: str, used_at: float, size: int = 100) -> Path:
    made = folder / f"{name}.so"
    made.write_bytes(bytes(size))
    os.utime(made, (used_at, used_at))
    return made


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_used_longest_ago_makes_room_whatever_its_kind(tmp_path: Path) -> None:
    simulation(tmp_path, "a", NOW - 9000)
    kernel(tmp_path, "netlist-b", NOW - 8000)
    kernel(tmp_path, "kernel-c", NOW - 7000)
    simulation(tmp_path, "d", NOW - 6000)
    tidy(tmp_path, NOW, CacheBounds(things=2))
    assert names(tmp_path) == {"kernel-c.so", "sim-d"}


def test_bytes_are_bounded_as_well(tmp_path: Path) -> None:
    simulation(tmp_path, "large", NOW - 9000, size=1 << 20)
    simulation(tmp_path, "small", NOW - 8000)
    tidy(tmp_path, NOW, CacheBounds(size=1 << 19))
    assert names(tmp_path) == {"sim-small"}


def test_what_was_just_asked_for_stays_beyond_the_bounds(tmp_path: Path) -> None:
    simulation(tmp_path, "now", NOW - 10)
    old = simulation(tmp_path, "old", NOW - 9000)
    mark_used(old)
    tidy(tmp_path, bounds=CacheBounds(things=0))
    assert names(tmp_path) == {"sim-old"}


def test_files_of_others_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".sim-being-built").mkdir()
    os.utime(tmp_path / "notes.txt", (0, 0))
    tidy(tmp_path, (tmp_path / ".sim-being-built").stat().st_mtime + ABANDONED_S / 2, CacheBounds(things=0))
    assert names(tmp_path) == {"notes.txt", ".sim-being-built"}


def test_a_folder_that_is_missing_is_tidy_and_stays_missing(tmp_path: Path) -> None:
    tidy(tmp_path / "none", NOW)
    assert names(tmp_path) == set()


def test_many_processes_and_threads_tidy_at_once(tmp_path: Path) -> None:
    for number in range(60):
        simulation(tmp_path, f"{number:02}", NOW - 9000 + number)
    program = (
        "from pathlib import Path; from fpga.simulation.build_cache import *; "
        f"tidy(Path({str(tmp_path)!r}), {NOW}, CacheBounds(20))"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as other, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: tidy(tmp_path, NOW, CacheBounds(things=20)), range(8)))
        assert other.wait(60) == 0
    assert names(tmp_path) == {f"sim-{number}" for number in range(40, 60)}


WIRE = VerilatorDesign(
    "hv_wire",
    {"hv_wire.sv": b"module hv_wire(input wire a, output wire b); assign b = a; endmodule\n"},
    b'#include "verilated.h"\nvoid vl_fatal(const char*, int, const char*, const char*) {}\n',
)


def test_using_a_simulation_keeps_it() -> None:
    built = library(WIRE).parent
    os.utime(built, (0, 0))
    assert library(WIRE).parent == built
    assert built.stat().st_mtime > 0


def test_a_simulation_that_a_power_cut_has_damaged_is_built_anew(caplog: pytest.LogCaptureFixture) -> None:
    built = library(WIRE)
    whole = built.read_bytes()
    # In another file of that name: some process may have the whole one loaded.
    (built.parent / "damaged").write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
    (built.parent / "damaged").replace(built)
    assert library(WIRE) == built
    assert "is damaged and is built again" in caplog.text
    assert len(built.read_bytes()) == len(whole)
    assert built.read_bytes()[4096:8192] != bytes(4096)
