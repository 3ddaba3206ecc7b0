"""The FPGA studies: their figures are what they say, and their goals can be missed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fpga.compiler.folding import interval
from tests.bench.fpga import exact
from tests.bench.fpga.accuracy import Stage, measure, missed
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


SMALL = next(iter(CASES.values()))


def test_every_way_of_streaming_is_counted_and_no_logit_differs() -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    parts = exact.measure(SMALL.graph, SMALL.folding, images)
    assert [part.images for part in parts] == [14, 13, 13, 40]
    assert [part.differing for part in parts] == [0, 0, 0, 0]
    estimate = interval(SMALL.graph, SMALL.folding)
    assert not exact.missed(parts, estimate)
    assert exact.missed([dataclasses.replace(parts[0], differing=2)], estimate) == ["without pauses: 2 logits differ"]
    assert len(exact.missed(parts, 2 * estimate)) == 1
