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

from hawkvision.cascade.certification.bounds import agreement_p, nuisance_beta, paired_betting_p, paired_exact_p
from hawkvision.tasks.class_scores import Floats

Flags = NDArray[np.bool_]


class Method(StrEnum):
    """Which test certifies; the theory of each is in `bounds`."""

    EXACT = "exact"
    BETTING = "betting"
    AGREEMENT = "agreement"


@dataclass(frozen=True, slots=True)
class StageOutcomes:
    """One stage on a sample: scores, whether it was right, and whether it differed from the reference; each (n,)."""

    scores: Floats
    right: Flags
    differs: Flags


@dataclass(frozen=True, slots=True)
class Sample:
    """A certification sample of n images. Without labels every `right` is all False and only agreement certifies."""

    edge: StageOutcomes
    best_right: Flags
    intermediate: StageOutcomes | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.best_right)}
        for stage in (self.edge, self.intermediate):
            if stage is not None:
                lengths |= {len(stage.scores), len(stage.right), len(stage.differs)}
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(f"all parts of a sample must have the same length, at least 1; got lengths {lengths}")

    def __len__(self) -> int:
        return len(self.best_right)


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
    lost: int
    gained: int
    differing: int
    """Images answered below the reference stage with a label that differs from its own."""
    edge_differing: int
    """Those that the edge answered."""


def threshold_grid(scores: Floats, points: int = 200) -> Floats:
    """Thresholds in testing order: +∞, then falling quantiles of *unlabelled* scores (m,), then −∞."""
    inner = np.unique(np.quantile(scores, np.linspace(1.0, 0.0, points + 1)[1:-1]))[::-1]
    return np.concatenate([[np.inf], inner, [-np.inf]])


def two_levels(grid: Floats) -> tuple[Thresholds, ...]:
    """The path of a cascade without an intermediate stage, from a descending grid."""
    return tuple(Thresholds(float(value)) for value in grid)


def sweep(sample: Sample, path: Sequence[Thresholds]) -> Iterator[ThresholdStep]:
    """The results of each pair of thresholds on this sample, in the order of the path."""
    n, edge, intermediate, best = len(sample), sample.edge, sample.intermediate, sample.best_right
    for thresholds in path:
        accepted = edge.scores >= thresholds.edge
        lost = int((accepted & best & ~edge.right).sum())
        gained = int((accepted & edge.right & ~best).sum())
        differing = at_edge = int((accepted & edge.differs).sum())
        answered = int(accepted.sum())
        escalated = n - answered
        if intermediate is not None and thresholds.intermediate < math.inf:
            halfway = ~accepted & (intermediate.scores >= thresholds.intermediate)
            lost += int((halfway & best & ~intermediate.right).sum())
            gained += int((halfway & intermediate.right & ~best).sum())
            differing += int((halfway & intermediate.differs).sum())
            answered += int(halfway.sum())
        yield ThresholdStep(
            thresholds, escalated / n, (n - answered) / n, (lost - gained) / n, lost, gained, differing, at_edge
        )


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
        method: the test. Betting uses the order of the sample, which must not depend on the images' content.
        cost: of a step; None means that each step is cheaper than those before it, as with two levels.

    Raises:
        ValueError: if the path does not start with (+∞, +∞) or a threshold rises along it.
    """
    check_path(path)
    kept = next(sweep(sample, path[:1]))
    if max_drop <= 0.0:
        return kept
    last_counts, last_passed = (-1, -1, -1), True
    for step in sweep(sample, path[1:]):
        counts = (step.lost, step.gained, step.differing)
        # Equal counts are equal evidence, except for betting, which depends on their order too.
        if counts != last_counts or method is Method.BETTING:
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


def losses(sample: Sample, thresholds: Thresholds) -> NDArray[np.int8]:
    """ℓ of every image (n,), in −1, 0, +1."""
    accepted = sample.edge.scores >= thresholds.edge
    lost = np.where(accepted, sample.best_right.astype(np.int8) - sample.edge.right, 0).astype(np.int8)
    if sample.intermediate is not None and thresholds.intermediate < math.inf:
        halfway = ~accepted & (sample.intermediate.scores >= thresholds.intermediate)
        lost += np.where(halfway, sample.best_right.astype(np.int8) - sample.intermediate.right, 0).astype(np.int8)
    return lost


def _p_value(sample: Sample, step: ThresholdStep, max_drop: float, delta: float, method: Method) -> float:
    match method:
        case Method.EXACT:
            return paired_exact_p(step.lost, step.gained, len(sample), max_drop, nuisance_beta(delta))
        case Method.BETTING:
            return paired_betting_p(losses(sample, step.thresholds), max_drop, delta)
        case Method.AGREEMENT:
            return agreement_p(step.differing, len(sample), max_drop)
