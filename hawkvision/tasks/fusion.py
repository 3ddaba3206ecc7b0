"""Weighted boxes fusion: one set of boxes from those of several detectors.

Source: R. Solovyev, W. Wang, T. Gabruseva, "Weighted boxes fusion: Ensembling boxes from different object detection
models", Image and Vision Computing 107, 2021. Within a class, boxes of all members in falling order of their weighted
scores join the cluster whose box they overlap most, if by more than `OVERLAP`, or begin one. A cluster's box is the
mean of its boxes, weighted by their weighted scores. Its score is the weighted mean of the members' best scores for it,
0 for members that did not find it, so that it stays a probability (the paper's conf · min(T, N) / N for one box of
each member).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.models.input_spec import Weights
from hawkvision.tasks.boxes import CLASS, MEMBERS, MOST, SCORE, Floats, overlaps
from hawkvision.tasks.kind import Output

OVERLAP: Final = 0.55


def weight_matrix(weights: Weights | Sequence[float], members: int, labels: int) -> Floats:
    """The weight of each member for each label (members, labels). Weights that are missing are 1."""
    if not len(weights):
        return np.ones((members, labels))
    assert len(weights) == members, "as many weights as members"
    return np.stack([np.broadcast_to(np.asarray(each, np.float64), (labels,)) for each in weights])


def fuse(members: Sequence[Output], weights: Floats) -> Output:
    """The boxes (k, 6 + m) of an ensemble of m members (k, 6 or more), best first, at most `MOST`.

    Args:
        members: of one image, with boxes in the same coordinates.
        weights: (m, labels), of each label at least one above 0.
    """
    rows = np.concatenate([np.asarray(each[:, :MEMBERS], np.float64) for each in members])
    owner = np.repeat(np.arange(len(members)), [len(each) for each in members])
    label = rows[:, CLASS].astype(np.intp)
    strength = rows[:, SCORE] * weights[owner, label]
    fused = [
        _fused_class(rows[of], owner[of], strength[of], weights[:, each])
        for each in np.unique(label)
        if len(of := np.flatnonzero((label == each) & (strength > 0.0)))
    ]
    if not fused:
        return np.zeros((0, MEMBERS + len(members)), np.float32)
    every = np.concatenate(fused)
    order = np.argsort(-every[:, SCORE], kind="stable")[:MOST]
    return every[order].astype(np.float32)


def _fused_class(rows: Floats, owner: NDArray[np.intp], strength: Floats, weights: Floats) -> Floats:
    """The fused boxes (k, 6 + m) of one class."""
    sums = np.zeros((len(rows), 5))  # of strength times sides, and of strength
    boxes = np.zeros((len(rows), 4))
    scores = np.zeros((len(rows), len(weights)))
    clusters = 0
    for at in np.argsort(-strength, kind="stable"):
        near = overlaps(rows[at : at + 1, :4], boxes[:clusters])[0]
        cluster = int(near.argmax()) if clusters else 0
        if not clusters or near[cluster] <= OVERLAP:
            cluster, clusters = clusters, clusters + 1
        sums[cluster] += strength[at] * np.append(rows[at, :4], 1.0)
        boxes[cluster] = sums[cluster, :4] / sums[cluster, 4]
        scores[cluster, owner[at]] = max(scores[cluster, owner[at]], rows[at, SCORE])
    score = (scores[:clusters] * weights).sum(axis=1) / weights.sum()
    classes = np.full((clusters, 1), rows[0, CLASS])
    return np.concatenate([boxes[:clusters], score[:, np.newaxis], classes, scores[:clusters]], axis=1)
