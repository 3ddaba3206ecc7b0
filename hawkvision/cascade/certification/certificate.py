"""Thresholds with a guarantee on the accuracy drop.

Thresholds are tested in an order that was fixed without the certification labels. The first lets the reference stage
answer everything; each later one accepts more answers below it. Each is tested at level δ (`bounds`) until one fails
(fixed sequence testing, Maurer et al. 1995). So with probability at least 1 − δ over the certification sample, the drop
of the chosen threshold is below ε for traffic exchangeable with that sample, however many thresholds were tested.

A step of the path is a pair of thresholds. The edge's answer is accepted from `edge` on; the intermediate stage's
answer to an escalated image is accepted from `intermediate` on. `intermediate` = +∞ means two levels. With both +∞ the
reference stage answers everything, and no test is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.bounds import (
    LARGEST_STAKE,
    LARGEST_STAKE_ON_FRACTIONS,
    agreement_p,
    betting_p,
    clopper_pearson,
    drop_upper_bound,
    mean_drop_upper_bound,
    mean_upper_bound,
    nuisance_beta,
    paired_betting_p,
    paired_exact_p,
)
from hawkvision.tasks.class_scores import Floats

Flags = NDArray[np.bool_]


class Method(StrEnum):
    """Which test certifies; the theory of each is in `bounds`. `exact` needs losses of 0 or 1."""

    EXACT = "exact"
    BETTING = "betting"
    AGREEMENT = "agreement"


@dataclass(frozen=True, slots=True)
class StageOutcomes:
    """One stage on a sample: scores, losses, and disagreements with the reference stage; each (n,).

    Losses and disagreements lie in 0..1. Without labels the losses are 0.
    """

    scores: Floats
    losses: Floats
    disagreements: Floats


@dataclass(frozen=True, slots=True)
class Sample:
    """A certification sample of n images in an order that does not depend on them.

    Without labels all losses are 0, and only agreement certifies.
    """

    edge: StageOutcomes
    reference_losses: Floats
    intermediate: StageOutcomes | None = None
    binary: bool = True
    """Whether every loss and disagreement is always 0 or 1 (`TaskKind.binary`)."""

    def __post_init__(self) -> None:
        lengths = {len(self.reference_losses)}
        values = [self.reference_losses]
        for stage in (self.edge, self.intermediate):
            if stage is not None:
                lengths |= {len(stage.scores), len(stage.losses), len(stage.disagreements)}
                values += [stage.losses, stage.disagreements]
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(f"all parts of a sample must have the same length, at least 1; got lengths {lengths}")
        every = np.concatenate(values)
        if not (((every == 0.0) | (every == 1.0)) if self.binary else ((every >= 0.0) & (every <= 1.0))).all():
            expected = "0 or 1" if self.binary else "from 0 to 1"
            raise ValueError(f"losses and disagreements must be {expected}, got {every.min()} to {every.max()}")

    def __len__(self) -> int:
        return len(self.reference_losses)

    @property
    def labelled_method(self) -> Method:
        """The test that certifies losses known from labels."""
        return Method.EXACT if self.binary else Method.BETTING


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
    """Mean of ℓ, the plug-in estimate of the accuracy drop."""
    lost: float
    """Sum of the positive ℓ; with losses of 0 or 1, a number of images. The following likewise."""
    gained: float
    """Sum of the negative ℓ, without the sign."""
    differing: float
    """Sum of the disagreements of the images answered below the reference stage."""
    edge_differing: float
    """Of those that the edge answered."""


def threshold_grid(scores: Floats, points: int = 200) -> Floats:
    """Thresholds in testing order: +∞, then falling quantiles of *unlabelled* scores (m,), then −∞."""
    inner = np.unique(np.quantile(scores, np.linspace(1.0, 0.0, points + 1)[1:-1]))[::-1]
    return np.concatenate([[np.inf], inner, [-np.inf]])


def two_levels(grid: Floats) -> tuple[Thresholds, ...]:
    """The path of a cascade without an intermediate stage, from a descending grid."""
    return tuple(Thresholds(float(value)) for value in grid)


def sweep(sample: Sample, path: Sequence[Thresholds]) -> Iterator[ThresholdStep]:
    """The results of each pair of thresholds on this sample, in the order of the path."""
    n, edge, intermediate = len(sample), sample.edge, sample.intermediate
    edge_lost, edge_gained = _lost_and_gained(edge, sample)
    lost_between, gained_between = _lost_and_gained(intermediate or edge, sample)
    for thresholds in path:
        accepted = edge.scores >= thresholds.edge
        lost, gained = float(edge_lost[accepted].sum()), float(edge_gained[accepted].sum())
        differing = at_edge = float(edge.disagreements[accepted].sum())
        answered = int(accepted.sum())
        escalated = n - answered
        if intermediate is not None and thresholds.intermediate < math.inf:
            halfway = ~accepted & (intermediate.scores >= thresholds.intermediate)
            lost += float(lost_between[halfway].sum())
            gained += float(gained_between[halfway].sum())
            differing += float(intermediate.disagreements[halfway].sum())
            answered += int(halfway.sum())
        yield ThresholdStep(
            thresholds, escalated / n, (n - answered) / n, (lost - gained) / n, lost, gained, differing, at_edge
        )


def _lost_and_gained(stage: StageOutcomes, sample: Sample) -> tuple[Floats, Floats]:
    """The positive and the negative part of what each image (n,) loses by this stage's answer."""
    more = stage.losses - sample.reference_losses
    return np.maximum(more, 0.0), np.maximum(-more, 0.0)


def certify(
    sample: Sample,
    path: Sequence[Thresholds],
    max_drop: float,
    delta: float = 0.05,
    method: Method = Method.EXACT,
    cost: Callable[[ThresholdStep], float] | None = None,
) -> ThresholdStep:
    """The cheapest step of the path whose drop below the reference stage is certified to be less than `max_drop`.

    All steps before the first failure are certified together, so any of them may be chosen.

    Args:
        sample: images that served neither to choose the path nor to train a model.
        path: thresholds from (+∞, +∞) on, chosen without the sample's labels.
        max_drop: ε, the accuracy that may be given up, in [0, 1]; at 0 only the reference stage answers.
        delta: probability over samples that the certificate is wrong.
        method: the test. Betting uses the order of the sample.
        cost: of a step; None means that each step is cheaper than those before it, as with two levels.

    Raises:
        ValueError: if the path does not start with (+∞, +∞) or a threshold rises along it, or if the test is the exact
            one and losses may be fractions.
    """
    check_path(path)
    if method is Method.EXACT and not sample.binary:
        raise ValueError("the exact test needs losses of 0 or 1; expected betting")
    kept = next(sweep(sample, path[:1]))
    if max_drop <= 0.0:
        return kept
    last_counts, last_passed = (-1.0, -1.0, -1.0), True
    ordered = method is Method.BETTING or not sample.binary
    for step in sweep(sample, path[1:]):
        counts = (step.lost, step.gained, step.differing)
        # Equal counts are equal evidence, except for betting, which depends on their order too.
        if counts != last_counts or ordered:
            last_counts = counts
            last_passed = _p_value(sample, step, max_drop, delta, method) <= delta
        if not last_passed:
            break
        if cost is None or cost(step) < cost(kept):
            kept = step
    return kept


def check_path(path: Sequence[Thresholds]) -> None:
    """Check that a path is in testing order.

    Raises:
        ValueError: if it does not start with (+∞, +∞) or raises a threshold on its way.
    """
    if not path or path[0] != BEST_ONLY:
        raise ValueError("the path must start with +inf, where the reference stage answers everything")
    edges, intermediates = (np.array([getattr(t, name) for t in path]) for name in ("edge", "intermediate"))
    if not (np.all(edges[1:] <= edges[:-1]) and np.all(intermediates[1:] <= intermediates[:-1])):  # false for NaN, too
        raise ValueError("the thresholds of a path must descend, or stay")


def losses(sample: Sample, thresholds: Thresholds) -> Floats:
    """ℓ of every image (n,), in [−1, +1]."""
    accepted = sample.edge.scores >= thresholds.edge
    lost = np.where(accepted, sample.edge.losses - sample.reference_losses, 0.0)
    if sample.intermediate is not None and thresholds.intermediate < math.inf:
        halfway = ~accepted & (sample.intermediate.scores >= thresholds.intermediate)
        lost += np.where(halfway, sample.intermediate.losses - sample.reference_losses, 0.0)
    return lost


def disagreements(sample: Sample, thresholds: Thresholds) -> tuple[Floats, Floats]:
    """The disagreement of every image (n,) that the edge answers, and that the intermediate stage answers; else 0."""
    accepted = sample.edge.scores >= thresholds.edge
    at_edge = np.where(accepted, sample.edge.disagreements, 0.0)
    if sample.intermediate is None:
        return at_edge, np.zeros(len(sample))
    halfway = ~accepted & (sample.intermediate.scores >= thresholds.intermediate)
    return at_edge, np.where(halfway, sample.intermediate.disagreements, 0.0)


def _p_value(sample: Sample, step: ThresholdStep, max_drop: float, delta: float, method: Method) -> float:
    match method:
        case Method.EXACT:
            return paired_exact_p(int(step.lost), int(step.gained), len(sample), max_drop, nuisance_beta(delta))
        case Method.BETTING:
            stake = LARGEST_STAKE if sample.binary else LARGEST_STAKE_ON_FRACTIONS
            return paired_betting_p(losses(sample, step.thresholds), max_drop, delta, stake)
        case Method.AGREEMENT if sample.binary:
            return agreement_p(int(step.differing), len(sample), max_drop)
        case Method.AGREEMENT:
            return betting_p(np.add(*disagreements(sample, step.thresholds)), max_drop, delta)


def drop_bound(sample: Sample, step: ThresholdStep, delta: float, method: Method) -> float:
    """The smallest ε that the test certifies for one step alone: an upper confidence bound on its drop."""
    n = len(sample)
    if method is Method.AGREEMENT:
        if sample.binary:
            return clopper_pearson(int(step.differing), n, 2 * delta)[1]
        return mean_upper_bound(np.add(*disagreements(sample, step.thresholds)), delta)
    if sample.binary:
        return drop_upper_bound(int(step.lost), int(step.gained), n, delta)
    return mean_drop_upper_bound(losses(sample, step.thresholds), delta)


def least_drop(n: int, delta: float, *, binary: bool) -> float:
    """The smallest ε that n images can certify, which takes that not one of them loses anything."""
    return drop_upper_bound(0, 0, n, delta) if binary else mean_drop_upper_bound(np.zeros(n), delta)
