"""Tests of one threshold: is the accuracy it gives up below ε? Three p-values, each valid at any sample size.

Let an image be answered below the cascade's reference stage when its score is at least τ. The accuracy given up is E ℓ
with

    ℓ = 1{answered below} · (right_best − right_below)  ∈ {−1, 0, +1}.

Only discordant images count: b of them lost (+1), c of them gained (−1), out of n. All three test H0: E ℓ ≥ ε.

*Exact* (`paired_exact_p`). Outcomes are ordered by the score statistic T = (b − c − nε) / σ̃, with σ̃ the standard
deviation of b − c at the likeliest discordance rate q = P(ℓ ≠ 0) under E ℓ = ε (Tango, Statistics in Medicine 1998),
and the p-value is the probability of this T or a smaller one. Given q that is a finite sum: on the boundary of H0 the
number of discordant images is binomial(n, q), and each is a loss with probability (q + ε) / 2q. It is made free of
the nuisance q by taking its supremum over a (1 − β) confidence interval of q and adding β (Berger and Boos, JASA 1994;
for paired proportions Hsueh, Liu and Chen, Biometrics 2001). The boundary is enough: for fixed q a larger drop makes
losses out of gains, and T larger. Ordering by b − c alone is exact too, but two losses of two discordant images say
more than twelve of twenty-two: with no drop, 5 % discordant, n = 60 and ε = 0.06 it rejects in 11 %, T in 53 %.

*Betting* (`paired_betting_p`). A gambler bets against H0 image by image, with stakes that depend on the past only;
if H0 is true the expected wealth never grows, so wealth K is evidence with p = 1/K (Waudby-Smith and Ramdas,
"Estimating means of bounded random variables by betting", JRSS-B 2024). Weaker than the exact test wherever measured
(n = 1,000, q = 0.15, drop 0.02 against ε = 0.04: 32 % against 47 %), but it asks no independence, only that each
image is as bad as ε given those before it. The stakes are tuned to n and the best moment of the game counts, so it
tests one sample of a size fixed before; looking again as a sample grows would need stakes that do not know n.

*Agreement* (`agreement_p`). Without labels: an answer that equals the reference stage's gives nothing up, so E ℓ is at
most the probability of answering below with another label, a plain binomial proportion (Clopper and Pearson, 1934).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta as beta_distribution
from scipy.stats import binom

NUISANCE_BETA: Final = 0.004
"""The most of δ that is spent on the confidence interval of the discordance rate."""

NUISANCE_SHARE: Final = 0.16
"""The largest share of a small δ that is spent on it: with all of it spent, no sample could reject."""

NUISANCE_POINTS: Final = 33
"""Discordance rates at which the supremum is sought. Between them the tail rises by 3e-4 at most (scan of p-values near
δ), a tenth of β; brute-force enumeration (tests) finds no rate where the test exceeds its level."""

TAIL_SIGMAS: Final = 8.0
"""Binomial mass further than this many standard deviations from the mean is left out. It is largest for small rates
and reaches 1.2e-11 (scan over n from 100 to 100,000): less than a billionth of any δ worth asking for."""

Floats: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = NDArray[np.int64] | NDArray[np.float64]


@lru_cache(maxsize=4096)  # thresholds next to one another, and targets tried again, often have the same counts
def paired_exact_p(lost: int, gained: int, n: int, max_drop: float, beta: float = NUISANCE_BETA) -> float:
    """p-value of H0: E ℓ ≥ max_drop, from `lost` (ℓ = +1) and `gained` (ℓ = −1) of n images.

    It is 1, and not sought, where the observed drop is no smaller than max_drop. `beta` is spent on the nuisance rate
    (`nuisance_beta`), chosen by the level of the test and never by the counts.

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
    """What a test of level `delta` spends on the nuisance rate."""
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
    most = observed + 1e-9 * max(1.0, -observed)  # the observed outcome itself must not be lost to rounding
    passes, fails = np.full_like(discordant, -1), discordant + 1
    while (fails - passes).max() > 1:
        intermediate = (passes + fails) // 2
        passed = _score(2 * intermediate - discordant, discordant, n, drop) <= most
        passes, fails = np.where(passed, intermediate, passes), np.where(passed, fails, intermediate)
    return passes


LARGEST_STAKE: Final = 0.75
"""Share of the wealth that may be lost on one image: 1 would let a single loss end the game."""


def paired_betting_p(losses: NDArray[np.int8], max_drop: float, delta: float = 0.05) -> float:
    """p-value of H0: E ℓ ≥ max_drop, from losses (n,) in −1, 0, +1 in the order in which they were drawn.

    Stakes are the predictable plug-in of the source above (its equation 26), on (ℓ + 1) / 2. `delta` only tunes them.

    Raises:
        ValueError: if there are no losses or max_drop is not in (0, 1].
    """
    if len(losses) == 0:
        raise ValueError("expected at least one loss")
    if not 0.0 < max_drop <= 1.0:
        raise ValueError(f"max_drop must lie in (0, 1], got {max_drop}")
    n = len(losses)
    x = (losses.astype(np.float64) + 1.0) / 2.0
    null_mean = (max_drop + 1.0) / 2.0
    seen = np.arange(1, n + 1)
    mean = (0.5 + np.cumsum(x)) / (seen + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (seen + 1)
    past_variance = np.concatenate([[0.25], variance[:-1]])
    # The most that one image can cost is stake · (1 − null_mean); max_drop = 1 can cost nothing.
    ceiling = LARGEST_STAKE / max(1.0 - null_mean, 1e-12)
    stake = np.minimum(np.sqrt(2.0 * math.log(1.0 / delta) / (n * past_variance)), ceiling)
    wealth = np.cumsum(np.log1p(stake * (null_mean - x)))
    return float(min(1.0, math.exp(-wealth.max())))


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
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        intermediate = (low + high) / 2
        if paired_exact_p(lost, gained, n, intermediate, nuisance_beta(delta)) <= delta:
            high = intermediate
        else:
            low = intermediate
    return high


def clopper_pearson(successes: int, n: int, delta: float = 0.05) -> tuple[float, float]:
    """The exact two-sided interval of a proportion, at confidence 1 - delta (Clopper and Pearson, 1934)."""
    low = 0.0 if successes == 0 else float(beta_distribution.ppf(delta / 2, successes, n - successes + 1))
    high = 1.0 if successes == n else float(beta_distribution.ppf(1 - delta / 2, successes + 1, n - successes))
    return low, high
