"""Predictions of a cascade's stages on a data set, and how the data set is split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.guarantee.binomial import clopper_pearson
from hawkvision.guarantee.bounds import mean_interval
from hawkvision.guarantee.evidence import Evidence, StageEvidence
from hawkvision.models.manifest import MeasuredAccuracy
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import Output, TaskKind, Truth

T = TypeVar("T")
ByImage: TypeAlias = Sequence[T] | Mapping[int, T]
"""Values by the index of the image; a mapping holds only some images."""

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


def in_random_order(chosen: NDArray[np.intp]) -> NDArray[np.intp]:
    """The same indices shuffled, for betting: data sets list images by class or origin."""
    shuffled: NDArray[np.intp] = np.random.default_rng(len(chosen)).permutation(chosen)
    return shuffled


def measure_accuracy(right: NDArray[np.bool_] | Floats, data_sha256: str, delta: float = 0.05) -> MeasuredAccuracy:
    """The mean of how right the answers to n images are, with an interval at confidence 1 − delta.

    The interval is the exact one of a proportion for booleans, and by betting (`bounds.mean_interval`) for fractions,
    whose order must not depend on them.
    """
    if right.dtype == np.bool_:
        low, high = clopper_pearson(int(right.sum()), len(right), delta)
    else:
        low, high = mean_interval(right.astype(np.float64), delta)
    return MeasuredAccuracy(
        value=round(float(right.mean()), 6), n=len(right), low=round(low, 6), high=round(high, 6),
        data_sha256=data_sha256,
    )  # fmt: skip


def select(values: ByImage[T], chosen: NDArray[np.intp]) -> list[T]:
    """The values at these indices."""
    return [values[i] for i in chosen.tolist()]


@dataclass(frozen=True, slots=True)
class StagePredictions:
    """One stage's calibrated outputs for all images, exactly as it serves them."""

    name: str
    outputs: ByImage[Output]
    cost_ms: float

    def of(self, chosen: NDArray[np.intp]) -> list[Output]:
        """The outputs of the images `chosen`."""
        return select(self.outputs, chosen)


@dataclass(frozen=True, slots=True)
class Scored:
    """A stage's predictions and the score that it is accepted by, out of `TaskKind.scores`."""

    predictions: StagePredictions
    score: str


def accuracies(kind: TaskKind[Any], outputs: Sequence[Output], truths: Sequence[Truth]) -> NDArray[np.bool_] | Floats:
    """How right each output is (n,): 1 − loss, as booleans for kinds with losses of 0 or 1."""
    right = 1.0 - kind.losses(outputs, truths)
    return right == 1.0 if kind.binary else right


def make_evidence(
    kind: TaskKind[Any],
    edge: Scored,
    best: StagePredictions,
    truths: ByImage[Truth | None],
    chosen: NDArray[np.intp],
    intermediate: Scored | None = None,
) -> Evidence:
    """The images `chosen`, in that order, as evidence.

    Args:
        kind: of the task.
        edge: the edge stage.
        best: the reference stage.
        truths: of all images; None for those without a label.
        chosen: indices of images.
        intermediate: the stage between them.
    """
    reference, own = best.of(chosen), select(truths, chosen)
    labelled = [row for row, truth in enumerate(own) if truth is not None]
    known = [own[row] for row in labelled]

    def losses(outputs: Sequence[Output]) -> Floats:
        found = np.full(len(chosen), np.nan)
        if labelled:
            found[labelled] = kind.losses([outputs[row] for row in labelled], known)
        return found

    def stage(scored: Scored) -> StageEvidence:
        outputs = scored.predictions.of(chosen)
        scores = kind.score_all(outputs, scored.score)
        return StageEvidence(scores, losses(outputs), kind.disagreements(outputs, reference))

    between = None if intermediate is None else stage(intermediate)
    return Evidence(stage(edge), losses(reference), between, binary=kind.binary)
