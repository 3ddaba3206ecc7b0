"""What is known about a cascade's accuracy on a sample of images, with labels for all, some or none of them.

An image tells what it loses, ℓ, if a stage answers it in place of the reference stage:

    both answers agree             ℓ = 0, whatever the label
    they differ, and a label tells ℓ = loss of the stage − loss of the reference stage, in [−1, 1]
    they differ, without a label   ℓ = their disagreement, the most that can be lost

So labels are needed for disagreements only, and each can only lower ℓ. For kinds of task whose disagreement does not
bound ℓ (`TaskKind.agreement_bounds_drop`), images have labels, all of them, or what is lost is the disagreement itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hawkvision.tasks.class_scores import Floats

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """One stage on n images: scores, losses, and disagreements with the reference stage; each (n,).

    Losses and disagreements lie in 0..1. Losses are NaN where there is no label.
    """

    scores: Floats
    losses: Floats
    disagreements: Floats


@dataclass(frozen=True, slots=True)
class Evidence:
    """A random sample of n images of one population, in an order that does not depend on them."""

    edge: StageEvidence
    reference_losses: Floats
    """NaN where there is no label."""
    intermediate: StageEvidence | None = None
    binary: bool = True
    """Whether every loss and disagreement is always 0 or 1 (`TaskKind.binary`)."""
    planned: int | None = None
    """How many images there will be, if these are the first of them; None if they were fixed beforehand."""

    def __post_init__(self) -> None:
        lengths = {len(self.reference_losses)}
        values = [self.reference_losses[self.labelled]]
        for stage in self.stages:
            lengths |= {len(stage.scores), len(stage.losses), len(stage.disagreements)}
            values += [stage.losses[~np.isnan(stage.losses)], stage.disagreements]
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(f"all parts of the evidence must have the same length, at least 1; got lengths {lengths}")
        every = np.concatenate(values)
        if not (((every == 0.0) | (every == 1.0)) if self.binary else ((every >= 0.0) & (every <= 1.0))).all():
            expected = "0 or 1" if self.binary else "from 0 to 1"
            raise ValueError(f"losses and disagreements must be {expected}, got {every.min()} to {every.max()}")

    def __len__(self) -> int:
        return len(self.reference_losses)

    @property
    def stages(self) -> tuple[StageEvidence, ...]:
        """The stages below the reference stage."""
        return (self.edge,) if self.intermediate is None else (self.edge, self.intermediate)

    @property
    def exact(self) -> bool:
        """Whether the exact test applies: to losses of 0 or 1 of images that were fixed beforehand."""
        return self.binary and self.planned is None

    @property
    def labelled(self) -> Flags:
        """Which images have a label (n,)."""
        return ~np.isnan(self.reference_losses)

    def lost(self, stage: StageEvidence) -> Floats:
        """ℓ of each image (n,) if the stage answers it."""
        known = stage.losses - self.reference_losses
        return np.where(np.isnan(known), stage.disagreements, known)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Accept the edge's answer when its score is ≥ `edge`, else the intermediate stage's when its score is ≥
    `intermediate`.
    """

    edge: float
    intermediate: float = math.inf


BEST_ONLY = Thresholds(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class ThresholdStep:
    """The results of a pair of thresholds on a sample."""

    thresholds: Thresholds
    escalation: float
    """Share that left the edge, 0..1."""
    to_best: float
    """Share that the reference stage answered, 0..1."""
    drop: float
    """Mean of ℓ: with all labels the plug-in estimate of the accuracy drop, else the most that it can be."""
    lost: float
    """Sum of the positive ℓ; with losses of 0 or 1, a number of images. The following likewise."""
    gained: float
    """Sum of the negative ℓ, without the sign."""
    differing: float
    """Sum of the disagreements of the images answered below the reference stage."""


def threshold_grid(scores: Floats, points: int = 200) -> Floats:
    """Thresholds in testing order: +∞, then falling quantiles of *unlabelled* scores (m,), then −∞."""
    inner = np.unique(np.quantile(scores, np.linspace(1.0, 0.0, points + 1)[1:-1]))[::-1]
    return np.concatenate([[np.inf], inner, [-np.inf]])


def two_levels(grid: Floats) -> tuple[Thresholds, ...]:
    """The path of a cascade without an intermediate stage, from a descending grid."""
    return tuple(Thresholds(float(value)) for value in grid)


def sweep(evidence: Evidence, path: Sequence[Thresholds]) -> Iterator[ThresholdStep]:
    """The results of each pair of thresholds on this sample, in the order of the path."""
    n, lost = len(evidence), [evidence.lost(stage) for stage in evidence.stages]
    for thresholds in path:
        answered = _answered(evidence, thresholds)
        gone = np.concatenate([each[some] for each, some in zip(lost, answered, strict=True)])
        differing = sum(
            float(stage.disagreements[some].sum()) for stage, some in zip(evidence.stages, answered, strict=True)
        )
        escalated = n - int(answered[0].sum())
        more, less = float(gone[gone > 0].sum()), -float(gone[gone < 0].sum())
        yield ThresholdStep(thresholds, escalated / n, (n - len(gone)) / n, (more - less) / n, more, less, differing)


def losses(evidence: Evidence, thresholds: Thresholds) -> Floats:
    """ℓ of every image (n,), in [−1, +1]; 0 where the reference stage answers."""
    found = np.zeros(len(evidence))
    for stage, answered in zip(evidence.stages, _answered(evidence, thresholds), strict=True):
        found += np.where(answered, evidence.lost(stage), 0.0)
    return found


def disagreements(evidence: Evidence, thresholds: Thresholds) -> tuple[Floats, Floats]:
    """The disagreement of every image (n,) that the edge answers, and that the intermediate stage answers; else 0."""
    at_edge, *between = (
        np.where(answered, stage.disagreements, 0.0)
        for stage, answered in zip(evidence.stages, _answered(evidence, thresholds), strict=True)
    )
    return at_edge, between[0] if between else np.zeros(len(evidence))


def _answered(evidence: Evidence, thresholds: Thresholds) -> tuple[Flags, ...]:
    """Which images (n,) each stage below the reference stage answers."""
    accepted = evidence.edge.scores >= thresholds.edge
    if evidence.intermediate is None:
        return (accepted,)
    return accepted, ~accepted & (evidence.intermediate.scores >= thresholds.intermediate)
