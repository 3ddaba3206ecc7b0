"""The FPGA studies: their figures are what they say, and their goals can be missed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fpga.compiler.devices import device
from fpga.compiler.folding import interval, latency
from fpga.reports.build_report import read
from fpga.reports.energy import BOARD_W
from hawkvision.core.types import AccuracyStatus
from loadgen.analysis.evaluation import TargetRow
from tests.bench.fpga import exact, partial
from tests.bench.fpga.accuracy import Stage, measure, missed
from tests.bench.fpga.cascade import is_kept, margin
from tests.bench.fpga.energy import WATTS_A_CORE, Cpu, ratios
from tests.fpga.designs import CASES
from tests.hawkvision.model_zoo.synthetic_task import TESTED, write_cascade


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Stage]:
    models, data = write_cascade(tmp_path_factory.mktemp("task"))
    return measure("shapes", data, models=models)


def test_stages_are_the_cascades_and_lose_what_lies_between_their_accuracies(stages: list[Stage]) -> None:
    twin, of = stages
    assert [(stage.name, stage.of, stage.accuracy.n) for stage in stages] == [
        ("tiny_w4", "tiny", TESTED),
        ("tiny", None, TESTED),
    ]
    assert twin.lost_points == pytest.approx(100 * (of.accuracy.value - twin.accuracy.value), abs=1e-3)
    assert (twin.differing, twin.logits, of.lost_points) == (0, 3 * TESTED, 0.0)


def test_lost_points_and_differing_logits_miss_the_goal(stages: list[Stage]) -> None:
    good = dataclasses.replace(stages[0], lost_points=1.0)
    assert missed([good]) == []
    assert missed([dataclasses.replace(good, lost_points=1.04, differing=2)]) == [
        "tiny_w4 loses 1.04 points",
        "tiny_w4: 2 logits differ",
    ]


def test_first_test_images_alone_are_looked_at_if_asked(tmp_path: Path) -> None:
    models, data = write_cascade(tmp_path)
    assert np.unique([stage.accuracy.n for stage in measure("shapes", data, 10, models)]).tolist() == [10]


def row(lost: int, gained: int, guaranteed: float | None, n: int = 1000) -> TargetRow:
    return TargetRow(
        target="t", n=n, accuracy=0.9, low=0.8, high=1.0, lost=lost, gained=gained, drop=(lost - gained) / n,
        guaranteed_drop=guaranteed, status={AccuracyStatus.CERTIFIED: n}, escalated=0.1, degraded=0, p50_ms=1.0,
        p99_ms=2.0,
    )  # fmt: skip


def test_margin_is_that_of_a_paired_difference() -> None:
    assert margin(row(30, 10, 0.01)) == pytest.approx(1.96 * ((0.04 - 0.02**2) / 1000) ** 0.5)
    assert margin(row(0, 0, 0.01)) == 0.0


def test_a_guarantee_is_broken_by_more_than_chance() -> None:
    assert is_kept(row(30, 10, 0.01))
    assert not is_kept(row(60, 10, 0.01))
    assert is_kept(row(900, 0, None)), "nothing was guaranteed"


REPORT = read(Path(__file__).parents[3] / "fpga" / "reports" / "fashion_mnist-tiny_w4-lfe5u-45f.json")
PERIOD_US = 1e6 / REPORT.rate


def test_at_full_rate_the_energy_is_that_of_chip_and_board() -> None:
    found = ratios(Cpu("quick", PERIOD_US / 2), REPORT)
    assert found["equal rate, chip and board"] == pytest.approx(found["chip and board"], rel=1e-3)


def test_fpga_that_waits_for_a_slower_cpu_draws_power_and_is_clocked_all_the_while() -> None:
    slow = Cpu("slow", 3 * PERIOD_US)
    mid, chip = REPORT.energy.mid, device(REPORT.device)
    fpga_uj = mid.nets_uj + mid.multipliers_uj + mid.memories_uj + 3 * mid.clock_uj
    fpga_uj += (chip.static_w[1] + BOARD_W[1]) * slow.us
    expected = slow.us * WATTS_A_CORE[1] / fpga_uj
    assert ratios(slow, REPORT)["equal rate, chip and board"][1] == pytest.approx(expected, rel=1e-3)


SMALL = next(iter(CASES.values()))


def test_every_way_of_streaming_is_counted_and_no_logit_differs() -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    parts = exact.measure(SMALL.graph, SMALL.folding, images)
    assert [part.images for part in parts] == [14, 13, 13]
    assert [part.differing for part in parts] == [0, 0, 0]
    estimate = interval(SMALL.graph, SMALL.folding)
    assert not exact.missed(parts, estimate)
    assert exact.missed([dataclasses.replace(parts[0], differing=2)], estimate) == ["without pauses: 2 logits differ"]
    assert len(exact.missed(parts, 2 * estimate)) == 1


def test_slow_link_hides_all_work_but_the_last_rows() -> None:
    slow, quick = partial.measure(SMALL.graph, SMALL.folding, mhz=100, lost=0.3, links=[0.1, 1e6])
    whole = latency(SMALL.graph, SMALL.folding)
    assert slow.differing == quick.differing == 0
    assert slow.early < 0.7 * slow.late
    assert abs(slow.late - whole) <= 0.05 * whole
    assert abs(quick.early - quick.late) <= 0.05 * whole
