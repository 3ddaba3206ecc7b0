"""Detected boxes as rows of an array, and what several kinds of tasks do with them.

An `Output` of boxes has shape (k, 6 + m), best first, with columns x1, y1, x2, y2 (fractions of the width and height of
the model's input, after `placed` of the upright image), calibrated score, and class. Ensembles of m members add the
score that each member gave to the object, 0 where it did not find it.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError, ConfigError
from hawkvision.core.types import Output, Tensors, ToImage
from hawkvision.models.image_sets.labelled_images import Annotation

Floats: TypeAlias = NDArray[np.float64]

BOXES: Final = "boxes"
"""The tensor (n, k, 4) that decoders of boxes return."""
SCORES: Final = "scores"
"""The tensor (n, k), 0 for rows that are padding."""
CLASSES: Final = "classes"
"""The tensor (n, k) of class indices."""
SCORE: Final = 4
CLASS: Final = 5
MEMBERS: Final = 6
"""The first of the members' columns."""
MOST: Final = 100
"""Most boxes of an image, as in COCO's evaluation."""
LEAST_SIDE: Final = 1e-5
"""Boxes with shorter sides are dropped, because rounding could leave nothing of them."""
SAME: Final = 0.5
"""Intersection over union from which on two boxes of a class are the same object."""


class TrueBoxes(NamedTuple):
    """The label of one image: its objects. A plain tuple of both arrays will do."""

    boxes: NDArray[Any]
    """(m, 4) of x1, y1, x2, y2 in fractions of the upright image."""
    classes: NDArray[Any]
    """(m,) class indices."""


def true_boxes(annotation: Annotation, kind: str) -> TrueBoxes:
    """The label of one image, from what a data set says is in it.

    Raises:
        ConfigError: if it does not say where objects are.
    """
    if annotation.boxes is None:
        raise ConfigError(f"kind {kind!r} needs boxes, got classes only; expected a COCO, YOLO or npz set with boxes")
    return TrueBoxes(annotation.boxes, annotation.classes)


def is_true_boxes(truth: Any) -> bool:
    """Whether a label is one of boxes."""
    return isinstance(truth, tuple) and len(truth) == 2 and np.ndim(truth[0]) == 2 and np.ndim(truth[1]) == 1


def overlaps(boxes: NDArray[Any], others: NDArray[Any]) -> Floats:
    """Intersection over union (n, m) of boxes (n, 4) and (m, 4) given as x1, y1, x2, y2, in any unit."""
    a, b = np.asarray(boxes, np.float64)[:, np.newaxis], np.asarray(others, np.float64)[np.newaxis]
    sides = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0.0, None)
    common = sides[..., 0] * sides[..., 1]
    union = areas(a) + areas(b) - common
    found: Floats = np.divide(common, union, out=np.zeros_like(common), where=union > 0.0)
    return found


def areas(boxes: Floats) -> Floats:
    """The areas (...) of boxes (..., 4)."""
    sides = np.clip(boxes[..., 2:4] - boxes[..., 0:2], 0.0, None)
    found: Floats = sides[..., 0] * sides[..., 1]
    return found


def matches(boxes: NDArray[Any], classes: NDArray[Any], others: NDArray[Any], of_others: NDArray[Any]) -> int:
    """How many boxes (n, 4), best first, find an object of their class among others (m, 4).

    Each in turn takes the one that it overlaps most of those that are still free, if that is at least `SAME`.
    """
    if not len(boxes) or not len(others):
        return 0
    free = np.where(np.asarray(classes)[:, np.newaxis] == np.asarray(of_others), overlaps(boxes, others), -1.0)
    found = 0
    for row in free:
        best = int(row.argmax())
        if row[best] >= SAME:
            found += 1
            free[:, best] = -1.0
    return found


def read_boxes(tensors: Tensors, temperature: float, labels: int) -> list[Output]:
    """The outputs (k, 6) of n images, at most `MOST` boxes each.

    Raises:
        BackendError: if a tensor is missing, has another shape, or has values that mean nothing.
    """
    boxes, scores, classes = (tensors.get(name) for name in (BOXES, SCORES, CLASSES))
    if boxes is None or scores is None or classes is None:
        raise BackendError(f"expected tensors {BOXES!r}, {SCORES!r} and {CLASSES!r}, got {sorted(tensors)}")
    if boxes.ndim != 3 or boxes.shape[2] != 4 or scores.shape != boxes.shape[:2] or classes.shape != boxes.shape[:2]:
        raise BackendError(
            f"expected {BOXES!r} of (n, k, 4), {SCORES!r} and {CLASSES!r} of (n, k), "
            f"got {boxes.shape}, {scores.shape} and {classes.shape}"
        )
    rows = np.concatenate([boxes, tempered(scores, temperature)[..., None], classes[..., None]], 2, dtype=np.float32)
    found = [_best(rows[i][scores[i] > 0.0]) for i in range(len(rows))]
    for each in found:
        if not np.isfinite(each).all() or (each[:, CLASS] < 0).any() or (each[:, CLASS] >= labels).any():
            raise BackendError(f"expected boxes of finite numbers and classes from 0 to {labels - 1}")
    return found


def _best(rows: Output) -> Output:
    return rows[np.argsort(-rows[:, SCORE], kind="stable")[:MOST]]


def tempered(probabilities: NDArray[Any], temperature: float) -> NDArray[np.float32]:
    """Probabilities of independent events at another temperature: sigmoid(logit(p) / temperature).

    Computed in double precision and rounded, so that processors agree.
    """
    p = np.clip(np.asarray(probabilities, np.float64), 0.0, 1.0)
    if temperature != 1.0:
        likely, unlikely = p ** (1.0 / temperature), (1.0 - p) ** (1.0 / temperature)
        p = likely / (likely + unlikely)
    return p.astype(np.float32)


def by_temperature(output: Output, temperature: float) -> Output:
    """The boxes with their scores at another temperature; those of members stay."""
    if temperature == 1.0:
        return output
    changed = output.copy()
    changed[:, SCORE] = tempered(output[:, SCORE], temperature)
    return changed


def unmirrored(output: Output) -> Output:
    """The boxes with left and right exchanged."""
    turned = output.copy()
    turned[:, 0], turned[:, 2] = 1.0 - output[:, 2], 1.0 - output[:, 0]
    return turned


def placed(output: Output, to_image: ToImage) -> Output:
    """The boxes in the image, cut off at its borders; those outside are dropped."""
    moved = output.copy()
    moved[:, :4] = np.clip(to_image(output[:, :4]), 0.0, 1.0)
    return moved[(moved[:, 2:4] - moved[:, :2] > LEAST_SIDE).all(axis=1)]


def rounded_corners(row: NDArray[Any]) -> tuple[float, float, float, float]:
    """The corners of one row as predictions have them: to six digits, so that their JSON is exact."""
    x1, y1, x2, y2 = (round(float(value), 6) for value in row[:4])
    return x1, y1, x2, y2


LEAST: Final = 0.1
"""Boxes below this score are no evidence of an object that was missed."""


def expected_f1(output: Output, threshold: float) -> float:
    """2·right / (boxes predicted + objects there), with expected numbers; without boxes, the chance of no object."""
    right: list[float] = output[output[:, SCORE] >= threshold, SCORE].tolist()
    every: list[float] = output[output[:, SCORE] >= LEAST, SCORE].tolist()
    if not right:
        return math.prod(1.0 - score for score in every)
    return min(1.0, 2.0 * math.fsum(right) / (len(right) + max(math.fsum(every), math.fsum(right))))
