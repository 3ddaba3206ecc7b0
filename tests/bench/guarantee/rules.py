"""Rules that pick a threshold from a sample: the product's certificates and published alternatives.

A rule gets the results of each threshold of a descending grid on n images, and names the lowest threshold that it
accepts for a drop of at most ε against the reference stage. Ours is the exact test of `hawkvision.guarantee.bounds` in
fixed sequence, with labels on any part of the images; the others need all labels. One pass here counts all thresholds,
because studies call the rules ten thousand times.

    ours                         a disagreement without a label counts as lost; where the stages agree, no label counts
    plug-in                      the lowest threshold whose observed drop is within ε: no guarantee
    SGR                          Geifman and El-Yaniv, NeurIPS 2017: binary search, binomial tail at δ / ⌈log₂ steps⌉.
                                 Its selective risk is the error rate of the whole cascade, which may reach the
                                 reference stage's true error + ε; that error is given to it
    LTT                          learn then test (Angelopoulos et al. 2021): the same risk, Clopper-Pearson bounds,
                                 fixed sequence at δ
    conformal alignment          Huang et al., "Reliable Inference in Edge-Cloud Model Cascades via Conformal Alignment"
                                 (arXiv 2510.17543): of the images that the edge answers, at most a share ε is lost
                                 against the reference stage, in expectation. This holds on average over samples, not in
                                 1 − δ of them, and gains do not count
    MAPIE paired                 its Hoeffding-Bentkus p-values and fixed sequence on (ℓ + 1)/2 against (ε + 1)/2,
                                 because its controllers take no signed loss
    MAPIE losses                 the same library on 1{ℓ = +1} against ε, as a binary risk: gains do not count
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta as beta_distribution

from hawkvision.guarantee.bounds import nuisance_beta, paired_exact_p
from hawkvision.tasks.class_scores import Floats

Counts = NDArray[np.int64]


Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pool:
    """A population: what an edge stage and the reference stage said of each of N images."""

    name: str
    scores: Floats
    edge_right: Flags
    best_right: Flags
    differs: Flags

    def __len__(self) -> int:
        return len(self.scores)

    def taken(self, chosen: NDArray[np.intp]) -> Pool:
        """The chosen images, in that order."""
        return Pool(
            self.name,
            self.scores[chosen],
            self.edge_right[chosen],
            self.best_right[chosen],
            self.differs[chosen],
        )


@dataclass(frozen=True, slots=True)
class Swept:
    """What each threshold of a descending grid does on n images; counts are (steps,)."""

    n: int
    lost: Counts
    gained: Counts
    differing: Counts
    accepted: Counts
    best_right: int

    @property
    def drop(self) -> Floats:
        """Accuracy given up at each threshold."""
        return (self.lost - self.gained) / self.n

    @property
    def escalation(self) -> Floats:
        """Share escalated at each threshold."""
        return 1.0 - self.accepted / self.n

    @property
    def right(self) -> Counts:
        """Right answers of the whole cascade."""
        return self.best_right - self.lost + self.gained


@dataclass(frozen=True, slots=True)
class Goal:
    """What a rule is to keep: the drop below ε, or in absolute terms the accuracy, which is the reference stage's less
    ε."""

    max_drop: float
    accuracy: float
    delta: float


Rule = Callable[[Swept, Goal], int]
"""From a sample to the number of the threshold to keep; 0 escalates everything."""


def sweep_grid(pool: Pool, grid: Floats, known: Flags | None = None) -> Swept:
    """Count what every threshold of the grid does; `known` (n,): which images have a label, None for all."""
    places = np.searchsorted(-grid, -pool.scores, side="left")
    labelled = np.ones(len(pool), np.bool_) if known is None else known

    def cumulated(flags: Flags) -> Counts:
        return np.bincount(places[flags], minlength=len(grid)).cumsum()

    return Swept(
        n=len(pool),
        lost=cumulated(np.where(labelled, pool.best_right & ~pool.edge_right, pool.differs)),
        gained=cumulated(pool.edge_right & ~pool.best_right & labelled),
        differing=cumulated(pool.differs),
        accepted=cumulated(np.ones(len(pool), np.bool_)),
        best_right=int(pool.best_right.sum()),
    )


def perfect_escalation(pool: Pool, max_drop: float) -> float:
    """The smallest share that any threshold can escalate while it gives up no more than `max_drop`."""
    swept = sweep_grid(pool, np.concatenate([[np.inf], np.unique(pool.scores)[::-1]]))
    return float(swept.escalation[swept.drop <= max_drop].min())


def _before_first_failure(passed: Iterator[bool]) -> int:
    """The last threshold before the first that fails, of tests of thresholds 1, 2, …; threshold 0 needs none."""
    kept = 0
    for ok in passed:
        if not ok:
            break
        kept += 1
    return kept


_exact_p = functools.lru_cache(maxsize=1 << 18)(paired_exact_p.__wrapped__)
"""`paired_exact_p`, remembered: the draws of one cell meet the same counts again and again."""


def exact(sample: Swept, goal: Goal) -> int:
    """Fixed sequence with the paired exact test."""
    beta = nuisance_beta(goal.delta)
    counts = zip(sample.lost[1:].tolist(), sample.gained[1:].tolist(), sample.differing[1:].tolist(), strict=True)
    return _before_first_failure(
        _exact_p(b, c, sample.n, goal.max_drop, beta, most) <= goal.delta for b, c, most in counts
    )


def plug_in(sample: Swept, goal: Goal) -> int:
    """The lowest threshold whose observed drop is within ε."""
    return int(np.flatnonzero(sample.drop <= goal.max_drop)[-1])


def selective_risk(sample: Swept, goal: Goal) -> int:
    """SGR's binary search, each step at its share of δ."""
    steps = math.ceil(math.log2(len(sample.lost)))
    lower = _accuracy_bounds(sample, goal.delta / steps)
    low, high, kept = 0, len(lower) - 1, 0
    while low <= high:
        intermediate = (low + high) // 2
        if lower[intermediate] >= goal.accuracy:
            kept, low = intermediate, intermediate + 1
        else:
            high = intermediate - 1
    return kept


def learn_then_test(sample: Swept, goal: Goal) -> int:
    """Fixed sequence on absolute accuracy, by Clopper-Pearson bounds.

    Here escalating everything must pass too, or nothing is certified.
    """
    passed = iter((_accuracy_bounds(sample, goal.delta) >= goal.accuracy).tolist())
    return _before_first_failure(passed) if next(passed) else 0


def _accuracy_bounds(sample: Swept, delta: float) -> Floats:
    """Lower Clopper-Pearson bounds (steps,) of the cascade's accuracy."""
    right = sample.right
    return np.asarray(beta_distribution.ppf(delta, np.maximum(right, 1e-9), sample.n - right + 1))


def conformal_alignment(sample: Swept, goal: Goal) -> int:
    """Conformal p-values of "the edge loses what the reference stage knows", and Benjamini-Hochberg at ε over the
    traffic.

    Of much traffic, BH accepts scores from the lowest threshold on at which the p-value, (1 + losses accepted) /
    (n + 1), is at most ε times the share accepted.
    """
    p_values = (1 + sample.lost) / (sample.n + 1)
    accepted = np.flatnonzero(p_values <= goal.max_drop * sample.accepted / sample.n)
    return int(accepted[-1]) if len(accepted) else 0


def mapie_paired(sample: Swept, goal: Goal) -> int:
    """MAPIE on the loss moved into [0, 1]."""
    return _mapie((sample.drop + 1.0) / 2.0, sample.n, (goal.max_drop + 1.0) / 2.0, goal.delta, binary=False)


def mapie_losses(sample: Swept, goal: Goal) -> int:
    """MAPIE on the share of lost images alone, which bounds the drop."""
    return _mapie(sample.lost / sample.n, sample.n, goal.max_drop, goal.delta, binary=True)


def _mapie(risks: Floats, n: int, level: float, delta: float, *, binary: bool) -> int:
    # Imported when asked for: it takes two seconds and brings scikit-learn.
    from mapie.risk_control.fwer_control import FWERFixedSequenceTesting
    from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value

    p_values = compute_hoeffding_bentkus_p_value(risks[1:], n, level, binary)[:, 0]
    return len(FWERFixedSequenceTesting(n_starts=1).run(p_values, delta))


OTHERS: Final[dict[str, Rule]] = {
    "plug-in": plug_in,
    "SGR": selective_risk,
    "LTT": learn_then_test,
    "conformal alignment": conformal_alignment,
    "MAPIE paired": mapie_paired,
    "MAPIE losses": mapie_losses,
}
