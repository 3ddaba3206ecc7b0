"""The bench of quantisation: its figures are the rungs' own, and goals can be missed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.bench.fpga.accuracy import Rung, measure, missed
from tests.hawkvision.zoo.synthetic_task import TESTED, write_ladder


@pytest.fixture(scope="module")
def rungs(tmp_path_factory: pytest.TempPathFactory) -> list[Rung]:
    models, data, _ = write_ladder(tmp_path_factory.mktemp("task"))
    return measure("shapes", data, models=models)


def test_rungs_are_the_ladders_and_lose_what_lies_between_their_accuracies(rungs: list[Rung]) -> None:
    twin, of = rungs
    assert [(rung.name, rung.of, rung.accuracy.n) for rung in rungs] == [
        ("tiny_w4", "tiny", TESTED),
        ("tiny", None, TESTED),
    ]
    assert twin.lost_points == pytest.approx(100 * (of.accuracy.value - twin.accuracy.value), abs=1e-3)
    assert (twin.differing, twin.logits, of.lost_points) == (0, 3 * TESTED, 0.0)


def test_lost_points_and_differing_logits_miss_the_goal(rungs: list[Rung]) -> None:
    good = dataclasses.replace(rungs[0], lost_points=1.0)
    assert missed([good]) == []
    assert missed([dataclasses.replace(good, lost_points=1.04, differing=2)]) == [
        "tiny_w4 loses 1.04 points",
        "tiny_w4: 2 logits differ",
    ]


def test_first_test_images_alone_are_looked_at_if_asked(tmp_path: Path) -> None:
    models, data, _ = write_ladder(tmp_path)
    assert np.unique([rung.accuracy.n for rung in measure("shapes", data, 10, models)]).tolist() == [10]
