"""Candidates for boxes: selecting the surest and suppressing repetitions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hawkvision.tasks.boxes.rows import overlaps


class Candidates(NamedTuple):
    """Boxes of one image, surest first."""

    boxes: NDArray[Any]
    """(k, 4) of x1, y1, x2, y2."""
    scores: NDArray[Any]
    """(k,)."""
    classes: NDArray[np.intp]
    """(k,)."""

    def of(self, rows: NDArray[np.intp] | slice) -> Candidates:
        """Some of them."""
        return Candidates(self.boxes[rows], self.scores[rows], self.classes[rows])


class Surest(NamedTuple):
    """Which boxes of a model, with which class and score, surest first."""

    boxes: NDArray[np.intp]
    classes: NDArray[np.intp]
    scores: NDArray[np.float32]


def surest(scores: NDArray[np.float32], floor: float, most: int, *, one_class: bool) -> Surest:
    """The pairs of box and class with the highest scores above `floor`, at most `most`.

    Args:
        scores: (k, classes).
        floor: scores up to it are dropped.
        most: pairs that are returned.
        one_class: whether a box has only its surest class.
    """
    if one_class and scores.shape[1]:
        best = scores.argmax(axis=1)
        of_best = scores[np.arange(len(scores)), best]
        rows = np.flatnonzero(of_best > floor)
        classes, found = best[rows], of_best[rows]
    else:
        rows, classes = np.nonzero(scores > floor)
        found = scores[rows, classes]
    if len(found) > 4 * most:  # sorting all of them would take longer
        kept = np.sort(np.argpartition(-found, most)[:most])
        rows, classes, found = rows[kept], classes[kept], found[kept]
    order = np.argsort(-found, kind="stable")[:most]
    return Surest(rows[order], classes[order], found[order])


def suppressed(found: Candidates, iou: float, most: int) -> NDArray[np.intp]:
    """Non-maximum suppression by class: the rows that stay, at most `most`.

    The surest box stays, and those of its class that overlap it by more than `iou` are dropped, and so on (R. Girshick
    et al., "Rich feature hierarchies for accurate object detection and semantic segmentation", CVPR 2014, §2.2).
    """
    left = np.arange(len(found.scores))
    kept: list[int] = []
    while len(left) and len(kept) < most:
        first, left = left[0], left[1:]
        kept.append(int(first))
        same = overlaps(found.boxes[first : first + 1], found.boxes[left])[0] > iou
        left = left[~(same & (found.classes[left] == found.classes[first]))]
    return np.asarray(kept, np.intp)


def corners(centred: NDArray[Any]) -> NDArray[np.float64]:
    """Boxes (..., 4) of x1, y1, x2, y2 from centre x, centre y, width, height."""
    middle, half = np.asarray(centred[..., :2], np.float64), np.asarray(centred[..., 2:4], np.float64) / 2
    return np.concatenate([middle - half, middle + half], axis=-1)
