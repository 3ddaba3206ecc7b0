"""A threshold with a guarantee: how far the edge may lower its bar before accuracy could suffer.

Theory. Let a request be accepted at the edge when its score is at least τ, and answered by the ladder's best rung
otherwise. The accuracy given up is E ℓ with

    ℓ = 1{score ≥ τ} · (right_best − right_edge)  ∈ {−1, 0, +1},

so only the discordant accepted pictures count: b of them lost (+1), c of them gained (−1), out of n. For one τ we test
H0: E ℓ ≥ ε. Given the discordance rate q = P(ℓ ≠ 0), the number of discordant pictures is binomial(n, q) and, on the
boundary of H0, each is a loss with probability (q + ε) / 2q. The p-value is P(b − c ≤ observed), made free of the
nuisance q by taking its supremum over a (1 − β) confidence interval of q and adding β (Berger and Boos, JASA 1994).
On the boundary is enough: for fixed q, a larger drop makes b − c stochastically larger.

Thresholds are tested in an order fixed before looking at labels, from +∞ downwards, until the first failure (fixed
sequence testing, Maurer et al. 1995). So with probability at least 1 − δ over the certification sample, the drop of the
threshold that was kept is below ε, for traffic exchangeable with that sample. Pairing is what makes it cheap: at
n = 1,000 and half the gap it escalates 18 % where certifying absolute accuracy needs 34 to 56 %.

τ = +∞ needs no test: the best rung answers everything, and nothing is given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta as beta_distribution
from scipy.stats import binom

from hawkvision.cascade.scores import Floats

NUISANCE_BETA = 0.004
"""Share of δ spent on the confidence interval of the discordance rate."""

NUISANCE_POINTS = 33
"""Discordance rates at which the supremum is sought. The tail is smooth in q between them: brute-force enumeration
(tests) finds no rate where the test exceeds its level."""

TAIL_SIGMAS = 8.0
"""Binomial mass further than this many standard deviations from the mean is left out. It is largest for small rates
and reaches 1.2e-11 (scan over n from 100 to 100,000): less than a billionth of any δ worth asking for."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Accept at the edge when score ≥ `value`; +∞ escalates everything, −∞ nothing."""

    value: float
    escalation: float
    """Share of the certification sample that was escalated, 0..1."""
    drop: float
    """Mean of ℓ on the certification sample: the plug-in estimate of what is given up."""


def paired_exact_p(lost: int, gained: int, n: int, max_drop: float) -> float:
    """p-value of H0: E ℓ ≥ max_drop, from `lost` (ℓ = +1) and `gained` (ℓ = −1) of n pictures.

    Raises:
        ValueError: if the counts do not fit n or max_drop is not in (0, 1].
    """
    if lost < 0 or gained < 0 or lost + gained > n or n < 1:
        raise ValueError(f"expected counts with lost + gained <= n and n >= 1, got {lost}, {gained}, {n}")
    if not 0.0 < max_drop <= 1.0:
        raise ValueError(f"max_drop must lie in (0, 1], got {max_drop}")
    discordant = lost + gained
    half = NUISANCE_BETA / 2
    low = 0.0 if discordant == 0 else float(beta_distribution.ppf(half, discordant, n - discordant + 1))
    high = 1.0 if discordant == n else float(beta_distribution.ppf(1 - half, discordant + 1, n - discordant))
    # |E ℓ| ≤ q, so on the boundary of H0 no rate below max_drop is possible.
    rates = np.linspace(max(low, max_drop), max(high, max_drop), NUISANCE_POINTS)
    worst = max(_lower_tail(lost - gained, n, float(rate), max_drop) for rate in rates)
    return min(1.0, worst + NUISANCE_BETA)


def _lower_tail(observed: int, n: int, rate: float, drop: float) -> float:
    """P(b − c ≤ observed) with discordance `rate` and E ℓ = drop, exactly, as a mixture over b + c."""
    spread = TAIL_SIGMAS * math.sqrt(n * rate * (1 - rate) + 1) + 1
    first = max(0, math.floor(n * rate - spread))
    last = min(n, math.ceil(n * rate + spread))
    discordant = np.arange(first, last + 1)
    loss_share = min(1.0, (rate + drop) / (2 * rate))
    # b − c ≤ observed with b + c = k is b ≤ (k + observed) / 2.
    tail = binom.cdf(np.floor((discordant + observed) / 2), discordant, loss_share)
    return float((binom.pmf(discordant, n, rate) * tail).sum())


def threshold_grid(scores: Floats, points: int = 200) -> Floats:
    """Thresholds in testing order, +∞ first, −∞ last, between them quantiles of *unlabelled* scores (m,)."""
    inner = np.unique(np.quantile(scores, np.linspace(1.0, 0.0, points + 1)[1:-1]))[::-1]
    return np.concatenate([[np.inf], inner, [-np.inf]])


def sweep(
    scores: Floats, edge_right: NDArray[np.bool_], best_right: NDArray[np.bool_], grid: Floats
) -> Iterator[tuple[Threshold, int, int]]:
    """For every τ of the descending grid: what it would do on this sample, and (lost, gained) among the accepted."""
    n = len(scores)
    order = np.argsort(-scores, kind="stable")
    lost = np.concatenate([[0], np.cumsum((best_right & ~edge_right)[order])])
    gained = np.concatenate([[0], np.cumsum((edge_right & ~best_right)[order])])
    accepted = np.searchsorted(-scores[order], -grid, side="right")
    for value, count in zip(grid, accepted, strict=True):
        b, c = int(lost[count]), int(gained[count])
        yield Threshold(float(value), 1.0 - int(count) / n, (b - c) / n), b, c


def certify(
    scores: Floats,
    edge_right: NDArray[np.bool_],
    best_right: NDArray[np.bool_],
    grid: Floats,
    max_drop: float,
    delta: float = 0.05,
) -> Threshold:
    """The lowest threshold whose drop below the best rung is certified to be less than `max_drop`.

    Args:
        scores: (n,) edge scores of the labelled certification sample.
        edge_right: (n,) whether the edge rung was right.
        best_right: (n,) whether the ladder's best rung was right.
        grid: descending thresholds starting with +∞, chosen without these labels (`threshold_grid`).
        max_drop: ε, the accuracy that may be given up, in [0, 1]; 0 can only be kept by escalating everything.
        delta: probability, over samples, that the certificate is wrong.

    Raises:
        ValueError: if shapes differ or the grid does not descend from +∞.
    """
    if not len(scores) == len(edge_right) == len(best_right) or len(scores) == 0:
        raise ValueError("scores, edge_right and best_right must have the same length, at least 1")
    if grid[0] != np.inf or np.any(np.diff(grid) >= 0):
        raise ValueError("the grid must start at +inf and descend")
    kept = Threshold(np.inf, 1.0, 0.0)
    if max_drop <= 0.0:
        return kept
    n = len(scores)
    last_counts, last_passed = (-1, -1), True
    for candidate, lost, gained in sweep(scores, edge_right, best_right, grid):
        if candidate.value == np.inf:
            continue
        if (lost, gained) != last_counts:
            last_counts = (lost, gained)
            last_passed = paired_exact_p(lost, gained, n, max_drop) <= delta
        if not last_passed:
            break
        kept = candidate
    return kept


def drop_upper_bound(lost: int, gained: int, n: int, delta: float = 0.05) -> float:
    """The smallest ε that a single threshold certifies: an upper confidence bound on its drop, to 1e-4."""
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if paired_exact_p(lost, gained, n, middle) <= delta:
            high = middle
        else:
            low = middle
    return high
