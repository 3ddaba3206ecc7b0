from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hawkvision.tasks.boxes.rows import TrueBoxes
from hawkvision.tasks.detection import DetectedObject, Detection
from tests.bench.detection.confidence import agreement, area, escalated_first, ridge
from tests.bench.detection.served import boxes_of
from tests.bench.detection.views import accepted_loss, counts, true_counts

GAIN = np.array([0.5, -0.2, 0.0, 0.3])
ALL = np.arange(4)


def test_no_order_is_better_than_the_true_gain() -> None:
    rng = np.random.default_rng(0)
    best = area(-GAIN, GAIN, ALL)
    assert area(GAIN, GAIN, ALL) < 0 < best
    assert all(area(rng.random(4), GAIN, ALL) <= best for _ in range(20))
    assert escalated_first(-GAIN, ALL).tolist() == [0, 3, 2, 1]


def test_random_order_gains_nothing_on_average() -> None:
    rng = np.random.default_rng(1)
    assert np.mean([area(rng.random(4), GAIN, ALL) for _ in range(4000)]) == pytest.approx(0.0, abs=0.005)


def test_a_regression_finds_what_its_target_is_made_of() -> None:
    statistics = np.random.default_rng(2).normal(size=(400, 3))
    target = statistics @ np.array([1.0, 0.0, -2.0])
    found = ridge(statistics, target, np.arange(200))
    assert np.corrcoef(found[200:], target[200:])[0, 1] > 0.99


def test_members_agree_where_both_found_the_object() -> None:
    rows = np.array([[0, 0, 1, 1, 0.8, 0, 0.9, 0.7], [0, 0, 1, 1, 0.3, 1, 0.6, 0.0]], np.float32)
    assert agreement(rows, 0.5) == pytest.approx(2 / 3)
    assert agreement(rows[:0], 0.5) == 1.0


def test_the_surest_are_accepted_first() -> None:
    loss = np.array([0.0, 1.0])
    assert accepted_loss(loss, np.array([2.0, 1.0])) == pytest.approx(0.25)
    assert accepted_loss(loss, np.array([1.0, 2.0])) == pytest.approx(0.75)


def test_boxes_of_a_group_are_counted_from_the_threshold_on() -> None:
    rows = np.array([[0, 0, 1, 1, 0.8, 2], [0, 0, 1, 1, 0.3, 2], [0, 0, 1, 1, 0.9, 1]], np.float32)
    assert counts([rows], np.array([2, 3]), 0.5).tolist() == [1.0]
    truth = TrueBoxes(np.zeros((3, 4)), np.array([2, 3, 0]))
    assert true_counts([truth], np.array([2, 3])).tolist() == [2.0]


def test_an_answer_is_read_back_as_rows() -> None:
    found = Detection((DetectedObject("cat", 3, 0.5, (0.1, 0.2, 0.3, 0.4)),), 0.7)
    read = msgspec.json.decode(msgspec.json.encode(found), type=Detection)
    assert boxes_of(read).tolist() == [[0.1, 0.2, 0.3, 0.4, 0.5, 3.0]]
