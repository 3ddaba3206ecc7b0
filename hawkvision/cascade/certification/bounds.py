"""Tests of one threshold: is the accuracy it gives up below ε? Three p-values, each valid at any sample size.

Let an image be answered below the cascade's reference stage when its score is at least τ. The accuracy given up is E ℓ
with

    ℓ = 1{answered below} · (loss_below − loss_reference)  ∈ [−1, +1].

All three test H0: E ℓ ≥ ε. Where losses are 0 or 1, only discordant images count: b of them lost (+1), c of them gained
(−1), out of n.

*Exact* (`paired_exact_p`), for losses of 0 or 1. Outcomes are ordered by the score statistic T = (b − c − nε) / σ̃,
with σ̃ the standard deviation of b − c at the likeliest discordance rate q = P(ℓ ≠ 0) under E ℓ = ε (Tango, Statistics
in Medicine 1998), and the p-value is the probability of this T or a smaller one. Given q that is a finite sum: on the
boundary of H0 the number of discordant images is binomial(n, q), and each is a loss with probability (q + ε) / 2q. The
nuisance q is removed by the supremum over a (1 − β) confidence interval of q, plus β (Berger and Boos, JASA 1994; for
paired proportions Hsueh, Liu and Chen, Biometrics 2001). The boundary is enough: for fixed q a larger drop makes losses
out of gains, and T larger. Ordering by b − c alone is exact too, but rejects less often.

*Betting* (`paired_betting_p`), for any losses. A gambler bets against H0 image by image, with stakes that depend on the
past only; if H0 is true the expected wealth never grows, so wealth K gives p = 1/K (Waudby-Smith and Ramdas,
"Estimating means of bounded random variables by betting", JRSS-B 2024). It is weaker than the exact test but needs no
independence: under H0 the expected loss of each image given those before it is at least ε. The stakes are tuned to n
and the maximum of the wealth counts, so it tests one sample of a size that was fixed in advance. The means of other
bounded values are tested, and bounded, in the same way (`betting_p`, `mean_interval`).

*Agreement* (`agreement_p`). Without labels: where loss(a, t) − loss(b, t) ≤ disagreement(a, b), E ℓ is at most the
mean of 1{answered below} · disagreement. Where that is 0 or 1, it is a plain binomial proportion (Clopper and Pearson,
1934); any other is tested by betting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta as beta_distribution
from scipy.stats import binom

NUISANCE_BETA: Final = 0.004
"""Upper limit of the part of δ that is spent on the confidence interval of the discordance rate."""

NUISANCE_SHARE: Final = 0.16
"""The same as a share of a small δ; with all of δ spent, no sample could reject."""

NUISANCE_POINTS: Final = 33
"""Discordance rates at which the supremum is computed. Between them the tail rises by at most a tenth of β; the tests
enumerate all outcomes and find no rate at which the test exceeds its level."""

TAIL_SIGMAS: Final = 8.0
"""Binomial mass further than this many standard deviations from the mean is left out: at most 1.2e-11."""

Floats: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = NDArray[np.int64] | NDArray[np.float64]


@lru_cache(maxsize=4096)  # thresholds next to one another, and targets tried again, often have the same counts
def paired_exact_p(lost: int, gained: int, n: int, max_drop: float, beta: float = NUISANCE_BETA) -> float:
    """p-value of H0: E ℓ ≥ max_drop, from `lost` (ℓ = +1) and `gained` (ℓ = −1) of n images.

    The p-value is 1 where the observed drop is at least max_drop. `beta` is spent on the nuisance rate; it follows from
    the level of the test (`nuisance_beta`), never from the counts.

    Raises:
        ValueError: if the counts do not fit n or max_drop is not in (0, 1].
    """
    if lost < 0 or gained < 0 or lost + gained > n or n < 1:
        raise ValueError(f"expected counts with lost + gained <= n and n >= 1, got {lost}, {gained}, {n}")
    if not 0.0 < max_drop <= 1.0:
        raise ValueError(f"max_drop must lie in (0, 1], got {max_drop}")
    discordant = lost + gained
    observed = float(_score(np.array([lost - gained]), np.array([discordant]), n, max_drop)[0])
    if observed >= 0.0:
        return 1.0
    half = beta / 2
    low = 0.0 if discordant == 0 else float(beta_distribution.ppf(half, discordant, n - discordant + 1))
    high = 1.0 if discordant == n else float(beta_distribution.ppf(1 - half, discordant + 1, n - discordant))
    # |E ℓ| ≤ q, so on the boundary of H0 no rate below max_drop is possible.
    rates = np.linspace(max(low, max_drop), max(high, max_drop), NUISANCE_POINTS)
    return min(1.0, float(_lower_tails(observed, n, rates, max_drop).max()) + beta)


def nuisance_beta(delta: float) -> float:
    """The part of `delta` that a test of that level spends on the nuisance rate."""
    return min(NUISANCE_BETA, NUISANCE_SHARE * delta)


def _score(difference: Numbers, discordant: Numbers, n: int, drop: float) -> Floats:
    """T of outcomes with b − c = `difference` and b + c = `discordant`, each (k,); it grows with the difference."""
    # The likeliest q given E ℓ = drop is the larger root of n q² − (b + c + (b − c) drop) q + (b − c) drop − a drop².
    agreeing = n - discordant
    linear = discordant + difference * drop
    root = np.sqrt(np.maximum(0.0, linear**2 - 4.0 * n * (difference * drop - agreeing * drop**2)))
    rate = np.clip((linear + root) / (2.0 * n), drop, 1.0)
    deviation = np.sqrt(n * np.maximum(rate - drop**2, np.finfo(np.float64).tiny))
    return np.asarray((difference - n * drop) / deviation)


def _lower_tails(observed: float, n: int, rates: Floats, drop: float) -> Floats:
    """P(T ≤ observed) for an observed T < 0, discordance `rates` (m,) and E ℓ = drop, as a mixture over b + c."""
    discordant, weights = _discordant(n, rates)
    loss_share = np.minimum(1.0, (rates + drop) / (2 * rates))[:, None]
    tails = binom.cdf(_most_lost(observed, discordant, n, drop), discordant, loss_share)
    mixed: Floats = np.asarray(weights * tails).sum(axis=1)
    return mixed


def _discordant(n: int, rates: Floats) -> tuple[Numbers, Floats]:
    """The numbers of discordant images (k,) that matter at any of `rates` (m,), and their probabilities (m, k)."""
    spread = TAIL_SIGMAS * np.sqrt(n * rates * (1 - rates) + 1) + 1
    first = max(0, math.floor((n * rates - spread).min()))
    last = min(n, math.ceil((n * rates + spread).max()))
    discordant = np.arange(first, last + 1)
    return discordant, np.asarray(binom.pmf(discordant, n, rates[:, None]))


def _most_lost(observed: float, discordant: Numbers, n: int, drop: float) -> Numbers:
    """For each b + c (k,) the largest b whose T is at most `observed` < 0; −1 if none is."""
    most = observed + 1e-9 * max(1.0, -observed)  # the observed outcome itself must count in spite of rounding
    passes, fails = np.full_like(discordant, -1), discordant + 1
    while (fails - passes).max() > 1:
        intermediate = (passes + fails) // 2
        passed = _score(2 * intermediate - discordant, discordant, n, drop) <= most
        passes, fails = np.where(passed, intermediate, passes), np.where(passed, fails, intermediate)
    return passes


LARGEST_STAKE: Final = 0.75
"""Share of the wealth that one image may lose; with 1 a single loss would end the game."""

LARGEST_STAKE_ON_FRACTIONS: Final = 0.9
"""The same where losses are seldom whole."""

PRECISION: Final = 1e-4
"""Of bounds that are found by bisection; they are rounded to the safe side."""


def betting_p(values: Numbers, mean: float, delta: float, largest_stake: float = LARGEST_STAKE_ON_FRACTIONS) -> float:
    """p-value of H0: E x ≥ mean, from values (n,) in [0, 1] in an order that does not depend on them.

    Stakes are the predictable plug-in of the source above (its equation 26). `delta` only tunes them.

    Raises:
        ValueError: if there are no values, or one lies outside of [0, 1].
    """
    x = values.astype(np.float64)
    if len(x) == 0 or not (x.min() >= 0.0 and x.max() <= 1.0):
        raise ValueError("expected at least one loss, none of them out of range")
    return float(min(1.0, math.exp(-log_wealth(x, mean, delta, largest_stake))))


def log_wealth(
    x: Floats, mean: float | Floats, delta: float, largest_stake: float = LARGEST_STAKE_ON_FRACTIONS
) -> Floats:
    """The logarithm of the largest wealth in `betting_p`, of each of several samples (..., n); `mean` (..., 1)."""
    n = x.shape[-1]
    counts = np.arange(1, n + 1)
    means = (0.5 + np.cumsum(x, axis=-1)) / (counts + 1)
    variance = (0.25 + np.cumsum((x - means) ** 2, axis=-1)) / (counts + 1)
    past_variance = np.concatenate([np.full((*x.shape[:-1], 1), 0.25), variance[..., :-1]], axis=-1)
    # One image loses at most stake · (1 − mean), which is 0 for a mean of 1.
    ceiling = largest_stake / np.maximum(1.0 - mean, 1e-12)
    stake = np.minimum(np.sqrt(2.0 * math.log(1.0 / delta) / (n * past_variance)), ceiling)
    wealth: Floats = np.cumsum(np.log1p(stake * (mean - x)), axis=-1).max(axis=-1)
    return wealth


def paired_betting_p(
    losses: NDArray[np.int8] | Floats, max_drop: float, delta: float = 0.05, largest_stake: float = LARGEST_STAKE
) -> float:
    """p-value of H0: E ℓ ≥ max_drop, from losses (n,) in [−1, 1] in an order that does not depend on them.

    Raises:
        ValueError: if there are no losses, one lies outside of [−1, 1], or max_drop is not in (0, 1].
    """
    if not 0.0 < max_drop <= 1.0:
        raise ValueError(f"max_drop must lie in (0, 1], got {max_drop}")
    return betting_p((losses.astype(np.float64) + 1.0) / 2.0, (max_drop + 1.0) / 2.0, delta, largest_stake)


def mean_upper_bound(values: Floats, delta: float) -> float:
    """An upper confidence bound, at level 1 − delta, on the mean of values (n,) in [0, 1] in a random order."""
    return _least(lambda mean: betting_p(values, mean, delta) <= delta)


def mean_interval(values: Floats, delta: float = 0.05) -> tuple[float, float]:
    """A two-sided interval, at level 1 − delta, for the mean of values (n,) in [0, 1] in a random order."""
    return 1.0 - mean_upper_bound(1.0 - values, delta / 2), mean_upper_bound(values, delta / 2)


def mean_drop_upper_bound(losses: Floats, delta: float) -> float:
    """The smallest ε that a single threshold certifies by betting, from losses (n,) in [−1, 1] in a random order."""
    return _least(lambda drop: paired_betting_p(losses, drop, delta, LARGEST_STAKE_ON_FRACTIONS) <= delta)


def _least(passes: Callable[[float], bool]) -> float:
    """The smallest value in (0, 1] that passes a test that all larger values pass; 1 if none does."""
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        intermediate = (low + high) / 2
        low, high = (low, intermediate) if passes(intermediate) else (intermediate, high)
    return high


def agreement_p(differing: int, n: int, max_drop: float) -> float:
    """p-value of H0: P(answered below with another label than the reference stage's) ≥ max_drop.

    Raises:
        ValueError: if the count does not fit n or max_drop is not in (0, 1].
    """
    if not 0 <= differing <= n or n < 1:
        raise ValueError(f"expected 0 <= differing <= n and n >= 1, got {differing}, {n}")
    if not 0.0 < max_drop <= 1.0:
        raise ValueError(f"max_drop must lie in (0, 1], got {max_drop}")
    return float(binom.cdf(differing, n, max_drop))


def drop_upper_bound(lost: int, gained: int, n: int, delta: float = 0.05) -> float:
    """The smallest ε that a single threshold certifies: an upper confidence bound on its drop, to 1e-4."""
    return _least(lambda drop: paired_exact_p(lost, gained, n, drop, nuisance_beta(delta)) <= delta)


def clopper_pearson(successes: int, n: int, delta: float = 0.05) -> tuple[float, float]:
    """The exact two-sided interval of a proportion, at confidence 1 - delta (Clopper and Pearson, 1934)."""
    low = 0.0 if successes == 0 else float(beta_distribution.ppf(delta / 2, successes, n - successes + 1))
    high = 1.0 if successes == n else float(beta_distribution.ppf(1 - delta / 2, successes + 1, n - successes))
    return low, high
