"""What detections, counts and sets of labels are worth, by examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError, ManifestError
from hawkvision.tasks.boxes.fusion import fuse, weight_matrix
from hawkvision.tasks.boxes.rows import MEMBERS, SCORE, matches, tempered
from hawkvision.tasks.counting import CountingKind, number_distribution
from hawkvision.tasks.detection import DetectionKind
from hawkvision.tasks.kind import Output, Tensors
from hawkvision.tasks.multi_label import MultiLabelKind
from hawkvision.tasks.registry import kind_class

LABELS = ("person", "car", "bus")
COUNTING = {"groups": {"person": ["person"], "vehicle": ["car", "bus"]}, "max_error": 4}


def rows(*boxes: tuple[float, ...]) -> Output:
    return np.array(boxes, np.float32).reshape(-1, MEMBERS)


def tensors(*boxes: tuple[float, ...]) -> Tensors:
    each = rows(*boxes)[np.newaxis]
    return {"boxes": each[..., :4], "scores": each[..., 4], "classes": each[..., 5]}


LEFT, RIGHT, NEAR_LEFT = (0.1, 0.1, 0.4, 0.5), (0.6, 0.5, 0.9, 0.9), (0.12, 0.1, 0.42, 0.5)
TRUE = (np.array([LEFT, RIGHT]), np.array([0, 1]))


@pytest.mark.parametrize(
    ("found", "loss"),
    [
        ([], 1.0),
        ([(*LEFT, 0.9, 0), (*RIGHT, 0.8, 1)], 0.0),
        ([(*LEFT, 0.9, 0)], 1 / 3),
        ([(*LEFT, 0.9, 1)], 1.0),
        ([(*LEFT, 0.9, 0), (*RIGHT, 0.3, 1)], 1 / 3),
        ([(*LEFT, 0.9, 0), (*NEAR_LEFT, 0.8, 0), (*RIGHT, 0.7, 1)], 1 / 5),
    ],
    ids=["nothing", "both", "one", "wrong class", "one unsure", "one twice"],
)
def test_the_loss_of_a_detection_is_one_less_f1(found: list[Any], loss: float) -> None:
    kind = DetectionKind(LABELS, {})
    assert kind.loss(kind.predict(rows(*found), 5), TRUE) == pytest.approx(loss)


def test_nothing_found_where_nothing_is_is_right() -> None:
    kind = DetectionKind(LABELS, {})
    empty = kind.predict(rows(), 5)
    assert kind.loss(empty, (np.zeros((0, 4)), np.zeros(0, np.intp))) == 0.0
    assert kind.disagreement(empty, empty) == 0.0
    assert empty.confidence == 1.0


def test_the_surest_box_takes_its_object_first() -> None:
    """It takes the object that it overlaps most, though another box has only that one."""
    truths = np.array([[0.0, 0.0, 0.4, 0.4], [0.05, 0.0, 0.45, 0.4]])
    surest, other = [0.04, 0.0, 0.44, 0.4], [0.25, 0.0, 0.65, 0.4]
    zeros = np.zeros(2, np.intp)
    assert matches(np.array([surest, other]), zeros, truths, zeros) == 1


def test_expected_f1_of_calibrated_boxes_is_their_mean_f1() -> None:
    """Of many images whose boxes are right as often as they say, and whose objects all have a box."""
    kind = DetectionKind(LABELS, {})
    scores = [0.9, 0.8, 0.6, 0.3]
    output = rows(*((0.2 * i, 0.0, 0.2 * i + 0.1, 0.1, score, 0) for i, score in enumerate(scores)))
    right = np.random.default_rng(3).random((4000, 4)) < scores
    hits, there = right[:, :3].sum(axis=1), right.sum(axis=1)
    measured = float((2 * hits / (3 + there)).mean())
    assert kind.score(output, "expected_f1") == pytest.approx(measured, abs=0.02)


# Fusion


def test_boxes_of_one_object_are_fused_by_the_scores_of_members() -> None:
    fused = fuse([rows((*LEFT, 0.9, 0)), rows((*NEAR_LEFT, 0.3, 0), (*RIGHT, 0.5, 1))], weight_matrix((), 2, 3))
    left = (np.array(LEFT) * 0.9 + np.array(NEAR_LEFT) * 0.3) / 1.2
    np.testing.assert_allclose(fused[0], [*left, 0.6, 0, 0.9, 0.3], atol=1e-6)
    np.testing.assert_allclose(fused[1], [*RIGHT, 0.25, 1, 0.0, 0.5], atol=1e-6)


def test_weights_per_label_say_whom_to_believe() -> None:
    members = [rows((*LEFT, 0.8, 0), (*RIGHT, 0.8, 1)), rows()]
    fused = fuse(members, weight_matrix(((3.0, 0.0, 1.0), 1.0), 2, 3))
    assert fused.shape == (1, MEMBERS + 2), "the first is not asked about cars"
    assert fused[0, SCORE] == pytest.approx(0.8 * 3 / 4)


def test_boxes_of_other_classes_or_too_far_away_are_not_fused() -> None:
    far = (0.25, 0.1, 0.55, 0.5)
    assert len(fuse([rows((*LEFT, 0.8, 0)), rows((*LEFT, 0.8, 1))], weight_matrix((), 2, 3))) == 2
    assert len(fuse([rows((*LEFT, 0.8, 0)), rows((*far, 0.8, 0))], weight_matrix((), 2, 3))) == 2


# Counting


def counted(*boxes: tuple[float, ...], **options: Any) -> dict[str, dict[str, int]]:
    kind = CountingKind(LABELS, {**COUNTING, **options})
    return kind.predict(rows(*boxes), 5).counts


def test_labels_are_counted_by_groups() -> None:
    boxes = [(*LEFT, 0.9, 0), (*NEAR_LEFT, 0.6, 1), (*RIGHT, 0.55, 2), (*RIGHT, 0.4, 0)]
    assert counted(*boxes) == {"image": {"person": 1, "vehicle": 2}}
    assert counted(*boxes, threshold={"person": 0.4, "vehicle": 0.58}) == {"image": {"person": 2, "vehicle": 1}}


def test_an_object_is_where_the_middle_of_its_box_is() -> None:
    regions = {"top": [0.0, 0.0, 1.0, 0.5], "right": [0.5, 0.0, 1.0, 1.0]}
    found = counted((*LEFT, 0.9, 0), (*RIGHT, 0.9, 1), regions=regions)
    assert found == {"top": {"person": 1, "vehicle": 0}, "right": {"person": 0, "vehicle": 1}}


def test_the_loss_of_a_count_is_its_error_up_to_a_bound() -> None:
    kind = CountingKind(LABELS, COUNTING)
    one = kind.predict(rows((*LEFT, 0.9, 0)), 5)
    assert kind.loss(one, {"person": 3, "vehicle": 0}) == pytest.approx((2 / 4 + 0) / 2)
    assert kind.loss(one, {"image": {"person": 1, "vehicle": 30}}) == pytest.approx((0 + 1) / 2)
    assert kind.loss(one, TRUE) == pytest.approx((0 + 1 / 4) / 2)


def test_members_that_count_differently_are_less_sure() -> None:
    kind = CountingKind(LABELS, COUNTING)
    one, both = rows((*LEFT, 0.9, 0)), rows((*LEFT, 0.9, 0), (*RIGHT, 0.9, 0))
    for members, agree in (([one, one], 1.0), ([one, both], 1 - 1 / 4 / 2)):
        together = kind.combine(members, (1.0, 1.0), 1.0)
        mean = (kind.score(together, "spread") + agree) / 2
        assert kind.score(together, "agreement") == pytest.approx(mean, abs=1e-6)
    assert kind.score(one, "agreement") == kind.score(one, "spread")


@given(st.lists(st.floats(0, 1), max_size=6))
def test_the_number_of_events_is_distributed_as_by_enumeration(chances: list[float]) -> None:
    wanted = np.zeros(len(chances) + 1)
    for outcome in np.ndindex(*(2,) * len(chances)):
        wanted[sum(outcome)] += math.prod(p if happens else 1 - p for p, happens in zip(chances, outcome, strict=True))
    np.testing.assert_allclose(number_distribution(np.array(chances)), wanted, atol=1e-12)


# Sets of labels


@pytest.mark.parametrize(("pool", "chance"), [("max", 0.6), ("noisy_or", 1 - 0.4 * 0.5)])
def test_a_label_applies_if_a_box_has_it(pool: str, chance: float) -> None:
    kind = MultiLabelKind(LABELS, {"pool": pool})
    (output,) = kind.outputs(tensors((*LEFT, 0.6, 0), (*RIGHT, 0.5, 0), (*RIGHT, 0.2, 2)), 1.0)
    np.testing.assert_allclose(output, [chance, 0.0, 0.2], atol=1e-6)


@pytest.mark.parametrize(
    ("probabilities", "truth", "loss"),
    [
        ([0.9, 0.9, 0.1], {0, 1}, 0.0),
        ([0.9, 0.9, 0.1], {1, 2}, 2 / 3),
        ([0.9, 0.9, 0.1], TRUE, 0.0),
        ([0.1, 0.1, 0.1], set(), 0.0),
        ([0.1, 0.1, 0.1], {2}, 1.0),
    ],
)
def test_the_loss_of_a_set_of_labels_is_its_jaccard_distance(
    probabilities: list[float], truth: Any, loss: float
) -> None:
    kind = MultiLabelKind(LABELS, {})
    prediction = kind.predict(np.array(probabilities, np.float32), 1)
    assert kind.loss(prediction, truth) == pytest.approx(loss)


def test_weights_per_label_choose_between_members() -> None:
    kind = MultiLabelKind(LABELS, {})
    members = [np.array([0.9, 0.9, 0.2], np.float32), np.array([0.1, 0.1, 0.6], np.float32)]
    combined = kind.combine(members, ((1.0, 0.0, 1.0), 1.0), 1.0)
    np.testing.assert_allclose(combined, [0.5, 0.1, 0.4], atol=1e-6)


# Tensors and options


@pytest.mark.parametrize("change", ["boxes", "scores", "classes", "finite", "class"])
def test_tensors_of_another_shape_or_without_meaning_are_refused(change: str) -> None:
    good = tensors((*LEFT, 0.6, 0), (*RIGHT, 0.5, 1))
    bad: NDArray[Any] = {
        "boxes": np.zeros((1, 2, 5), np.float32),
        "scores": np.zeros((1, 3), np.float32),
        "classes": np.zeros((2, 2), np.float32),
        "finite": np.full((1, 2, 4), np.nan, np.float32),
        "class": np.full((1, 2), 3, np.float32),
    }[change]
    name = {"finite": "boxes", "class": "classes"}.get(change, change)
    with pytest.raises(BackendError, match="expected"):
        DetectionKind(LABELS, {}).outputs({**good, name: bad}, 1.0)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("detection", {"threshold": 0}, r"options of kind 'detection': .*threshold"),
        ("multi_label", {"pool": "mean"}, r"options of kind 'multi_label': .*mean.*pool"),
        ("counting", {"max_error": 4}, r"options of kind 'counting': .*groups"),
        ("counting", {**COUNTING, "groups": {"cat": ["lynx"]}}, r"groups\.cat: no label 'lynx'"),
        ("counting", {**COUNTING, "threshold": {"person": 0.4}}, r"threshold: expected one for each of .*vehicle"),
        ("counting", {**COUNTING, "regions": {"a": [0, 0, 2, 1]}}, r"options of kind 'counting': .*regions"),
    ],
)
def test_options_out_of_range_are_refused_by_name(kind: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        kind_class(kind)(LABELS, options)


@given(st.floats(0, 1, width=32), st.floats(0.1, 10))
def test_a_temperature_keeps_the_order_and_the_half(probability: float, temperature: float) -> None:
    changed = float(tempered(np.array([probability]), temperature)[0])
    assert 0.0 <= changed <= 1.0
    assert (changed > 0.5) <= (probability >= 0.5)
