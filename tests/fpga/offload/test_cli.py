"""`hawkvision plan`: what it prints, and what it refuses; foldings of real graphs as the planner sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fpga.compiler.devices import device
from fpga.compiler.folding import format_folding, interval
from fpga.compiler.folding_search import FoundFolding, slowest_that_keeps_up
from fpga.offload.cli import app
from fpga.offload.fpga_profiles import cuts, profile_of_folding
from fpga.offload.queueing import ServiceTime
from hawkvision.core.errors import ConfigError
from hawkvision.integer.onnx_writer import write
from hawkvision.models.manifest import artifact_path
from tests.hawkvision.integer.graphs import fashion_shape

GRAPH = fashion_shape()


@pytest.fixture(scope="module")
def found() -> FoundFolding:
    return slowest_that_keeps_up(GRAPH, device("lfe5u-25f"), 1_000, 120)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = artifact_path(tmp_path, "fashion_mnist", "tiny_w4")
    path.parent.mkdir(parents=True)
    path.write_bytes(write(GRAPH))
    return tmp_path


def plan(cache: Path, found: FoundFolding, *words: str) -> Result:
    folding = cache / "folding.json"
    folding.write_bytes(format_folding(found.folding))
    given = ["--cache-dir", str(cache), "--variant", "tiny_w4", "--folding", str(folding), "--device", "lfe5u-25f"]
    return CliRunner().invoke(app, [*given, "--cores", "2", *words], catch_exceptions=False)


def test_plan_as_json_says_what_goes_where_and_why_not(cache: Path, found: FoundFolding) -> None:
    ran = plan(cache, found, "--rate", "300", "--deadline-ms", "20", "--cpu-ms", "2", "--link-mbit", "1000", "--json")
    made = json.loads(ran.stdout)
    (placed,) = made["workloads"]
    assert ran.exit_code == 0
    assert made["feasible"]
    assert placed["share"] == 1.0
    assert placed["fpga_utilisation"] == pytest.approx(300 * interval(GRAPH, found.folding) / 120e6, rel=0.01)
    assert made["cpu_seconds_per_second"] == pytest.approx(300 * 0.2e-3, rel=0.01)
    assert {r["choice"] for r in made["rejected"]} >= {"CPU"}


def test_plan_as_text_names_estimates_and_reasons(cache: Path, found: FoundFolding) -> None:
    ran = plan(cache, found, "--rate", "300", "--cpu-ms", "0.05")
    assert ran.exit_code == 0
    for words in ("an estimate", "none is better", "not chosen", "costs"):
        assert words in " ".join(ran.stdout.split())


def test_deadline_that_nothing_keeps_is_an_exit_status(cache: Path, found: FoundFolding) -> None:
    ran = plan(cache, found, "--rate", "300", "--deadline-ms", "0.1", "--cpu-ms", "2")
    assert ran.exit_code == 1
    assert "No placement keeps all bounds" in ran.stdout


def test_rate_far_beyond_everything_is_an_exit_status(cache: Path, found: FoundFolding) -> None:
    ran = plan(cache, found, "--rate", "1000000", "--cpu-ms", "2")
    assert ran.exit_code == 1
    assert "No placement keeps all bounds" in ran.stdout


@pytest.mark.parametrize("option", ["--rate", "--clock-mhz", "--cpu-ms", "--host-ms"])
def test_numbers_without_bound_are_refused(cache: Path, found: FoundFolding, option: str) -> None:
    ran = plan(cache, found, option, "inf")
    assert ran.exit_code == 2
    assert f"Invalid value for '{option}'" in ran.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--also", "cifar10:inf:5"], "expected a rate and a deadline above 0"),
        (["--objective", "speed"], "expected cpu or energy"),
        (["--also", "cifar10:fast"], "expected TASK:RATE:DEADLINE_MS"),
        (["--cpu-ms", "1", "--calibration", "c.json"], "give only one"),
        (["--calibration", "none.json"], "none.json"),
        (
            ["--variant", "tiny_w9"],
            r"no such model; build it with `hawkvision models build --task \w+ tiny_w9 --cache-dir",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(cache: Path, found: FoundFolding, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + says):
        plan(cache, found, *words)


def test_task_without_a_variant_for_fpgas_is_refused() -> None:
    with pytest.raises(ConfigError, match="task 'imagenet' has no variant for FPGAs"):
        CliRunner().invoke(app, ["--task", "imagenet"], catch_exceptions=False)


def test_cuts_do_the_whole_network_between_them(found: FoundFolding) -> None:
    cpu = ServiceTime.constant(1e-3)
    whole = profile_of_folding(GRAPH, found.folding, "w4", 120e6)
    parts = cuts(GRAPH, found.folding, whole, cpu)
    assert [part.cut for part in parts] == [stage.name for stage in GRAPH.stages[:-1]]
    rests = [part.rest.mean_s for part in parts if part.rest is not None]
    assert rests == sorted(rests, reverse=True)
    assert all(part.interval_cycles <= whole.interval_cycles < part.latency_cycles * 2 for part in parts)
    assert parts[-1].resources.luts < whole.resources.luts
