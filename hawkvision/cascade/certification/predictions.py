"""Predictions of a cascade's stages on a data set, and how the data set is split."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.bounds import clopper_pearson
from hawkvision.cascade.certification.certificate import Flags, Sample, StageOutcomes
from hawkvision.core.types import Score
from hawkvision.models.manifest import MeasuredAccuracy
from hawkvision.tasks.class_scores import Floats, Probabilities, score

SMALLEST_GROUP = 10
"""Images of a source that is split by itself: the fewest that give each of the three parts some. Smaller sources are
pooled."""


class Split(msgspec.Struct, frozen=True):
    """Disjoint index sets of a data set."""

    profile: NDArray[np.intp]
    certify: NDArray[np.intp]
    held_out: NDArray[np.intp]

    def used(self) -> NDArray[np.intp]:
        """All indices, rising."""
        return np.sort(np.concatenate([self.profile, self.certify, self.held_out]))


def split_indices(groups: NDArray[np.str_], seed: int, shares: tuple[float, float] = (0.2, 0.5)) -> Split:
    """Divide images into profile, certification and held-out sets, with equal shares of every group.

    Groups of fewer than `SMALLEST_GROUP` images are pooled. With at least that many images no part is empty.

    Args:
        groups: (n,) the source of each image, so that each part has the same mixture.
        seed: of the shuffle.
        shares: of the profile and the certification part; the rest is held out.
    """
    rng = np.random.default_rng(seed)
    parts: tuple[list[NDArray[np.intp]], ...] = ([], [], [])
    names, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    pool = len(names)
    place = np.where(counts[inverse] < SMALLEST_GROUP, pool, inverse)
    for group in np.unique(place):
        members = rng.permutation(np.flatnonzero(place == group))
        first, second = (round(len(members) * share) for share in (shares[0], shares[0] + shares[1]))
        for part, chosen in zip(parts, np.split(members, [first, second]), strict=True):
            part.append(chosen)
    profile, certify, held_out = (np.sort(np.concatenate(part)) for part in parts)
    return Split(profile, certify, held_out)


def measure_accuracy(correct: NDArray[np.bool_], data_sha256: str, delta: float = 0.05) -> MeasuredAccuracy:
    """Top-1 accuracy with its exact interval at confidence 1 − delta."""
    low, high = clopper_pearson(int(correct.sum()), len(correct), delta)
    return MeasuredAccuracy(
        value=round(float(correct.mean()), 6), n=len(correct), low=round(low, 6), high=round(high, 6),
        data_sha256=data_sha256,
    )  # fmt: skip


class StagePredictions(msgspec.Struct, frozen=True):
    """One stage's calibrated probabilities (n, classes) for all images, exactly as it serves them."""

    name: str
    probabilities: Probabilities
    cost_ms: float

    def labels(self) -> NDArray[np.intp]:
        """The most probable class of each image (n,)."""
        found: NDArray[np.intp] = self.probabilities.argmax(axis=1)
        return found

    def scores(self, kind: Score) -> Floats:
        """The score of each image (n,)."""
        return score(self.probabilities, kind).astype(np.float64)


def make_sample(
    edge: StagePredictions,
    kind: Score,
    best: StagePredictions,
    labels: NDArray[np.integer] | None,
    chosen: NDArray[np.intp],
    intermediate: StagePredictions | None = None,
    intermediate_kind: Score | None = None,
) -> Sample:
    """The images `chosen` as a sample. Without labels no answer counts as right, and only agreement can certify."""
    truth = None if labels is None else labels[chosen]
    best_labels = best.labels()[chosen]

    def stage(predictions: StagePredictions, kind: Score) -> StageOutcomes:
        answers = predictions.labels()[chosen]
        return StageOutcomes(predictions.scores(kind)[chosen], _right(answers, truth), answers != best_labels)

    between = None if intermediate is None or intermediate_kind is None else stage(intermediate, intermediate_kind)
    return Sample(stage(edge, kind), _right(best_labels, truth), between)


def _right(answers: NDArray[np.intp], truth: NDArray[np.integer] | None) -> Flags:
    return np.zeros(len(answers), np.bool_) if truth is None else np.asarray(answers == truth)
