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

from hawkvision.core.types import Output
from hawkvision.models.input_spec import Weights
from hawkvision.tasks.boxes.rows import CLASS, MEMBERS, MOST, SCORE, Floats, overlaps

OVERLAP: Final = 0.55
FEW: Final = 16
"""Up to this many clusters, plain numbers are faster than arrays."""


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
    clusters: list[_Cluster] = []
    fused = np.zeros((len(rows), 4))
    scores = np.zeros((len(rows), len(weights)))
    boxes, strengths, found, owners = rows[:, :4].tolist(), strength.tolist(), rows[:, SCORE].tolist(), owner.tolist()
    for at in np.argsort(-strength, kind="stable").tolist():
        best, overlap = _nearest(boxes[at], clusters, fused)
        if overlap <= OVERLAP:
            best = len(clusters)
            clusters.append(_Cluster())
        clusters[best].add(boxes[at], strengths[at])
        fused[best] = clusters[best].box
        scores[best, owners[at]] = max(scores[best, owners[at]], found[at])
    count = len(clusters)
    score = (scores[:count] * weights).sum(axis=1) / weights.sum()
    classes = np.full((count, 1), rows[0, CLASS])
    return np.concatenate([fused[:count], score[:, np.newaxis], classes, scores[:count]], axis=1)


def _nearest(box: Sequence[float], clusters: Sequence[_Cluster], fused: Floats) -> tuple[int, float]:
    """The cluster that a box overlaps most, and by how much; (0, 0) if there is none."""
    if len(clusters) > FEW:
        near = overlaps(np.array([box]), fused[: len(clusters)])[0]
        return int(near.argmax()), float(near.max())
    found = [_overlap(box, each.box) for each in clusters]
    best = max(found, default=0.0)
    return (found.index(best) if found else 0), best


class _Cluster:
    """Boxes of one object, and their weighted mean."""

    def __init__(self) -> None:
        self.box: list[float] = [0.0] * 4
        self._sums = [0.0] * 4
        self._strength = 0.0

    def add(self, box: Sequence[float], strength: float) -> None:
        """Add a box; the mean follows."""
        self._sums = [total + strength * side for total, side in zip(self._sums, box, strict=True)]
        self._strength += strength
        self.box = [total / self._strength for total in self._sums]


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes; faster than `overlaps` for two."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0.0 or height <= 0.0:
        return 0.0
    common = width * height
    return common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common)
