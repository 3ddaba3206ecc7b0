"""Average precision, against COCO's own evaluation code."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from hawkvision.tasks.boxes.average_precision import detection_quality

CLASSES = 4
Truth = tuple[NDArray[np.float64], NDArray[np.int64]]


def _boxes(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    corner = rng.uniform(0.0, 0.6, (count, 2))
    return np.concatenate([corner, corner + rng.uniform(0.1, 0.4, (count, 2))], axis=1)


def _images(rng: np.random.Generator, count: int) -> tuple[list[NDArray[np.float64]], list[Truth]]:
    """Images with truths, and detections that are near copies of them, among others that are not."""
    found, truths = [], []
    for _ in range(count):
        boxes = _boxes(rng, int(rng.integers(0, 8)))
        classes = rng.integers(0, CLASSES, len(boxes))
        near = np.repeat(boxes, 2, axis=0) + rng.normal(0.0, 0.02, (2 * len(boxes), 4))
        labels = np.repeat(classes, 2)
        stray = _boxes(rng, int(rng.integers(0, 4)))
        every = np.concatenate([near, stray])
        kinds = np.concatenate([labels, rng.integers(0, CLASSES, len(stray))])
        scores = rng.integers(1, 20, len(every)) / 20.0  # with ties
        found.append(np.column_stack([every, scores, kinds]))
        truths.append((boxes, classes))
    return found, truths


def _coco(found: list[NDArray[np.float64]], truths: list[Truth]) -> NDArray[np.float64]:
    def box(row: NDArray[np.float64]) -> list[float]:
        return [float(v) for v in (row[0], row[1], row[2] - row[0], row[3] - row[1])]

    annotations: list[dict[str, Any]] = [
        {"image_id": image, "category_id": int(label), "bbox": box(row), "area": 1.0, "iscrowd": 0}
        for image, (boxes, classes) in enumerate(truths)
        for row, label in zip(boxes, classes, strict=True)
    ]
    for number, each in enumerate(annotations, 1):
        each["id"] = number
    results = [
        {"image_id": image, "category_id": int(row[5]), "bbox": box(row), "score": float(row[4])}
        for image, rows in enumerate(found)
        for row in rows[np.argsort(-rows[:, 4], kind="stable")]
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        images = [{"id": image} for image in range(len(truths))]
        truth.dataset = {"images": images, "annotations": annotations, "categories": [{"id": i} for i in range(9)]}
        truth.createIndex()
        judge = COCOeval(truth, truth.loadRes(results), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    stats: NDArray[np.float64] = np.asarray(judge.stats)
    return stats


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_that_of_cocos_code(seed: int) -> None:
    found, truths = _images(np.random.default_rng(seed), 40)
    expected = _coco(found, truths)
    quality = detection_quality(found, truths)
    assert quality["mAP"] == pytest.approx(expected[0], abs=1e-9)
    assert quality["AP50"] == pytest.approx(expected[1], abs=1e-9)
    assert 0.2 < quality["mAP"] < quality["AP50"] < 1.0


def test_precision_recall_and_f1_count_boxes_from_the_threshold_on() -> None:
    one = np.array([[0.0, 0.0, 0.5, 0.5]])
    truth = (np.concatenate([one, one + 0.5]), np.array([2, 2]))
    found = np.array([
        [0.0, 0.0, 0.5, 0.5, 0.9, 2],  # right
        [0.0, 0.0, 0.5, 0.5, 0.8, 2],  # the same again
        [0.5, 0.5, 1.0, 1.0, 0.7, 3],  # of another class
        [0.5, 0.5, 1.0, 1.0, 0.4, 2],  # right, but below the threshold
        [0.0, 0.0, 0.0, 0.0, 0.0, 0],  # padding
    ])  # fmt: skip
    quality = detection_quality([found], [truth], threshold=0.5)
    assert [quality["precision"], quality["recall"]] == pytest.approx([1 / 3, 1 / 2])
    assert quality["F1"] == pytest.approx(2 / 5)


def test_images_without_truths_or_detections_are_counted() -> None:
    nothing = np.zeros((0, 6))
    truth = (np.array([[0.1, 0.1, 0.2, 0.2]]), np.array([0]))
    empty = (np.zeros((0, 4)), np.zeros(0, np.int64))
    stray = np.array([[0.1, 0.1, 0.2, 0.2, 0.9, 0]])
    assert detection_quality([nothing], [truth])["recall"] == 0.0
    assert detection_quality([stray], [empty])["precision"] == 0.0
    assert detection_quality([nothing], [empty])["F1"] == 0.0
    assert detection_quality([], [])["mAP"] == 0.0
    with pytest.raises(ValueError, match="as many images as truths, got 1 and 2"):
        detection_quality([stray], [truth, truth])
