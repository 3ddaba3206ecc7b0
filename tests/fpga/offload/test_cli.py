"""`hawkvision plan`: what it prints, and what it refuses; foldings of real graphs as the planner sees them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fpga.compiler.devices import device
from fpga.compiler.folding import Folding, format_folding, interval
from fpga.compiler.folding_search import slowest_that_keeps_up
from hawkvision.integer.onnx_writer import write
from hawkvision.models.manifest import artifact_path
from tests.hawkvision.command import Ran, invoke
from tests.hawkvision.integer.graphs import fashion_shape

GRAPH = fashion_shape()


@pytest.fixture(scope="module")
def found() -> Folding:
    return slowest_that_keeps_up(GRAPH, device("lfe5u-25f"), 1_000, 120)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = artifact_path(tmp_path, "fashion_mnist", "tiny_w4")
    path.parent.mkdir(parents=True)
    path.write_bytes(write(GRAPH))
    return tmp_path


def plan(cache: Path, found: Folding, *words: str) -> Ran:
    folding = cache / "folding.json"
    folding.write_bytes(format_folding(found))
    given = ["--cache-dir", str(cache), "--variant", "tiny_w4", "--folding", str(folding), "--device", "lfe5u-25f"]
    return invoke("plan", *given, "--cores", "2", *words)


def test_plan_as_json_says_what_goes_where_and_what_comes_of_other_shares(cache: Path, found: Folding) -> None:
    ran = plan(cache, found, "--rate", "300", "--deadline-ms", "20", "--cpu-ms", "2", "--link-mbit", "1000", "--json")
    made = json.loads(ran.stdout)
    assert ran.exit_code == 0
    assert (made["feasible"], made["share"]) == (True, 1.0)
    by_cpu, by_fpga = made["forecasts"]
    assert (by_cpu["share"], by_fpga["share"]) == (0.0, 1.0)
    assert by_fpga["fpga_load"] == pytest.approx(300 * interval(GRAPH, found) / 120e6, rel=0.01)
    assert by_fpga["cpu_load"] == pytest.approx(300 * 0.2e-3, rel=0.01)
    assert by_cpu["cpu_load"] == pytest.approx(300 * 2e-3, rel=0.01)


def test_plan_as_text_marks_the_chosen_share(cache: Path, found: Folding) -> None:
    ran = plan(cache, found, "--rate", "300", "--cpu-ms", "0.05")
    assert ran.exit_code == 0
    assert "->   0.0% to the FPGA" in ran.stdout
    assert "   100.0% to the FPGA" in ran.stdout


def test_deadline_that_nothing_keeps_is_an_exit_status(cache: Path, found: Folding) -> None:
    for words in (("--rate", "300", "--deadline-ms", "0.1"), ("--rate", "1000000")):
        ran = plan(cache, found, "--cpu-ms", "2", *words)
        assert ran.exit_code == 1
        assert "No share keeps the deadline" in ran.stdout


@pytest.mark.parametrize("option", ["--rate", "--clock-mhz", "--cpu-ms", "--host-ms"])
def test_numbers_without_bound_are_refused(cache: Path, found: Folding, option: str) -> None:
    ran = plan(cache, found, option, "inf")
    assert ran.exit_code == 2
    assert f"{option}: Expected" in ran.output


def test_model_that_is_not_built_is_refused_with_the_command_that_builds_it(cache: Path, found: Folding) -> None:
    says = r"no such model; build it with `hawkvision models build --task \w+ tiny_w9 --cache-dir"
    assert re.search(says, plan(cache, found, "--variant", "tiny_w9").stderr)


def test_task_without_a_variant_for_fpgas_is_refused() -> None:
    assert "task 'imagenet' has no variant for FPGAs" in invoke("plan", "--task", "imagenet").stderr
