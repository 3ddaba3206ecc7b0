"""How good detected boxes are over a data set: COCO's average precision, and F1 at one threshold of the scores.

Source: T.-Y. Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014, as its evaluation code computes it.
Within one image and class, boxes claim truths in falling order of their scores; each takes the free truth that it
overlaps most, if that is enough. Average precision is the mean of the precision at 101 recalls, where the precision at
a recall is the best at that recall or a higher one. The mean goes over classes that occur in the truths, and for `mAP`
over the overlaps 0.50, 0.55 … 0.95. Crowd regions are not known, and no sizes are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.tasks.boxes.rows import overlaps as overlaps

Floats: TypeAlias = NDArray[np.float64]

OVERLAPS: Final = tuple((50 + 5 * step) / 100 for step in range(10))
RECALLS: Final = np.linspace(0.0, 1.0, 101)
MOST_BOXES: Final = 100
"""Per image, the highest scores first."""
ROUNDING: Final = 1e-10


def detection_quality(
    detections: Sequence[NDArray[np.floating]],
    truths: Sequence[tuple[NDArray[np.floating], NDArray[np.integer]]],
    threshold: float = 0.5,
) -> dict[str, float]:
    """Figures over a data set, each in 0..1; 0 where no image has a box.

    `mAP`: average precision, mean over overlaps and classes. `AP50`: the same at overlap 0.5. `precision`: share of the
    boxes from the threshold on that are right at overlap 0.5. `recall`: share of the truths that those boxes found.
    `F1`: the harmonic mean of both.

    Args:
        detections: of each image, boxes (k, 6) as x1, y1, x2, y2, score, class; those of score 0 do not count.
        truths: of each image, boxes (m, 4) and classes (m,), in the same unit.
        threshold: the smallest score of boxes that count for precision, recall and F1.

    Raises:
        ValueError: if there are not as many detections as truths.
    """
    if len(detections) != len(truths):
        raise ValueError(f"expected detections of as many images as truths, got {len(detections)} and {len(truths)}")
    if not truths:
        return dict.fromkeys(("mAP", "AP50", "precision", "recall", "F1"), 0.0)
    matched = [_match(found, *truth) for found, truth in zip(detections, truths, strict=True)]
    scores, classes, right = (np.concatenate(parts) for parts in zip(*matched, strict=True))
    counts = np.bincount(np.concatenate([classes.astype(np.int64) for _, classes in truths]))
    curves = [
        [_average_precision(scores[classes == each], right[classes == each, level], int(counts[each]))
         for level in range(len(OVERLAPS))]
        for each in np.flatnonzero(counts)
    ]  # fmt: skip
    by_overlap = np.mean(curves, axis=0) if curves else np.zeros(len(OVERLAPS))
    kept = scores >= threshold
    hits, claimed, total = float(right[kept, 0].sum()), float(kept.sum()), float(counts.sum())
    return {
        "mAP": float(by_overlap.mean()),
        "AP50": float(by_overlap[0]),
        "precision": hits / claimed if claimed else 0.0,
        "recall": hits / total if total else 0.0,
        "F1": 2.0 * hits / (claimed + total) if claimed + total else 0.0,
    }


def _match(
    found: NDArray[np.floating], boxes: NDArray[np.floating], classes: NDArray[np.integer]
) -> tuple[Floats, NDArray[np.int64], NDArray[np.bool_]]:
    """One image's boxes, best first: scores (k,), classes (k,), and whether each is right per overlap (k, 10)."""
    found = found[found[:, 4] > 0.0]
    found = found[np.argsort(-found[:, 4], kind="stable")[:MOST_BOXES]]
    labels = found[:, 5].astype(np.int64)
    right = np.zeros((len(found), len(OVERLAPS)), np.bool_)
    shared = np.where(labels[:, np.newaxis] == classes[np.newaxis], overlaps(found[:, :4], boxes), -1.0)
    for level, least in enumerate(OVERLAPS) if shared.size else ():
        free = shared.copy()
        for row, overlap in enumerate(free):
            best = len(overlap) - 1 - int(overlap[::-1].argmax())  # of equals the last, as COCO's code has it
            if overlap[best] >= least - ROUNDING:
                right[row, level] = True
                free[:, best] = -1.0
    return found[:, 4].astype(np.float64), labels, right


def _average_precision(scores: Floats, right: NDArray[np.bool_], truths: int) -> float:
    """The average precision of one class and overlap, from all images' boxes."""
    hits = np.cumsum(right[np.argsort(-scores, kind="stable")])
    precision = np.maximum.accumulate((hits / np.arange(1, len(hits) + 1))[::-1])[::-1]
    place = np.searchsorted(hits / truths, RECALLS, side="left")
    return float(np.append(precision, 0.0)[place].mean())
