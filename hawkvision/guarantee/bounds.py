"""Tests of one threshold: is the accuracy it gives up below ε? Two p-values, each valid at any sample size.

Let an image be answered below the cascade's reference stage when its score is at least τ. The accuracy given up is E ℓ
with

    ℓ = 1{answered below} · (loss_below − loss_reference)  ∈ [−1, +1].

Both test H0: E ℓ ≥ ε, and neither p-value falls when an ℓ rises.

*Exact* (`paired_exact_p`), for losses of 0 or 1, of which b images lost (+1) and c gained (−1), out of n. Outcomes are
ordered by the score statistic T = (b − c − nε) / σ̃, with σ̃ the standard deviation of b − c at the likeliest rate
q = P(ℓ ≠ 0) under E ℓ = ε (Tango, Statistics in Medicine 1998), and the p-value is the probability of this T or a
smaller one. Given q that is a finite sum: on the boundary of H0 the number of images with ℓ ≠ 0 is binomial(n, q), and
each is a loss with probability (q + ε) / 2q. The nuisance q is removed by the supremum over a (1 − β) confidence
interval of q, plus β (Berger and Boos, JASA 1994; for paired proportions Hsueh, Liu and Chen, Biometrics 2001). The
interval comes from the number of images on which the stages *differ*, since q is at most the rate of that; so it does
not depend on labels, and T alone orders the outcomes. The boundary is enough: for fixed q a larger drop makes losses
out of gains, and T larger. Ordering by b − c alone is exact too, but rejects less often.

*Betting* (`paired_betting_p`), for any losses. A gambler bets against H0 image by image, with stakes that depend on
earlier disagreements only, not on labels; if H0 is true the expected wealth never grows, so wealth K gives p = 1/K
(Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 2024). It is weaker than the
exact test but needs no independence: under H0 the expected loss of each image given those before it is at least ε. The
stakes are tuned to a size that was fixed in advance and the maximum of the wealth counts, so a sample that is still
arriving may be tested again and again.
Means of values in [0, 1] get intervals in the same way (`mean_interval`), with stakes from the values themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.guarantee.binomial import pmf, proportion_upper

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
Counts: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = Counts | Floats


@lru_cache(maxsize=4096)  # thresholds next to one another, and targets tried again, often have the same counts
def paired_exact_p(
    lost: int, gained: int, n: int, max_drop: float, beta: float = NUISANCE_BETA, differing: int | None = None
) -> float:
    """p-value of H0: E ℓ ≥ max_drop, from `lost` (ℓ = +1) and `gained` (ℓ = −1) of n images.

    The p-value is 1 where the observed drop is at least max_drop. `beta` is spent on the nuisance rate; it follows from
    the level of the test (`nuisance_beta`), never from the counts. `differing` are the images of which ℓ could be other
    than 0, whatever their labels; None means those of which it is.

    Raises:
        ValueError: if the counts do not fit n or max_drop is not in (0, 1].
    """
    discordant = lost + gained
    most = discordant if differing is None else differing
    if lost < 0 or gained < 0 or not discordant <= most <= n or n < 1:
        raise ValueError(
            f"expected counts with lost + gained <= differing <= n and n >= 1, got {lost}, {gained}, {most}, {n}"
        )
    if not 0.0 < max_drop <= 1.0:
        raise ValueError(f"max_drop must lie in (0, 1], got {max_drop}")
    observed = float(_score(np.array([lost - gained]), np.array([discordant]), n, max_drop)[0])
    if observed >= 0.0:
        return 1.0
    high = proportion_upper(most, n, beta)
    # |E ℓ| ≤ q, so on the boundary of H0 no rate below max_drop is possible.
    rates = np.linspace(max_drop, max(high, max_drop), NUISANCE_POINTS)
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
    most = _most_lost(observed, discordant, n, drop)
    share = np.minimum(1.0, (rates + drop) / (2 * rates))[:, None]
    # One discordant image more raises the most losses by one or none; so each tail follows from that before it.
    rises = np.diff(most)
    assert ((rises == 0) | (rises == 1)).all(), "a loss raises T, and a gain lowers it"
    at = pmf(most, discordant, share)
    tails = np.empty_like(at)
    tails[:, 0] = pmf(np.arange(most[0] + 1), discordant[0], share).sum(axis=1)
    tails[:, 1:] = tails[:, :1] + np.cumsum(rises * at[:, 1:] - share * at[:, :-1], axis=1)
    mixed: Floats = np.asarray(weights * np.maximum(tails, 0.0)).sum(axis=1)
    return mixed


def _discordant(n: int, rates: Floats) -> tuple[Counts, Floats]:
    """The numbers of discordant images (k,) that matter at any of `rates` (m,), and their probabilities (m, k)."""
    spread = TAIL_SIGMAS * np.sqrt(n * rates * (1 - rates) + 1) + 1
    first = max(0, math.floor((n * rates - spread).min()))
    last = min(n, math.ceil((n * rates + spread).max()))
    discordant = np.arange(first, last + 1)
    return discordant, pmf(discordant, n, rates[:, None])


def _most_lost(observed: float, discordant: Counts, n: int, drop: float) -> Counts:
    """For each b + c (k,) the largest b whose T is at most `observed` < 0; −1 if none is."""
    most = observed + 1e-9 * max(1.0, -observed)  # the observed outcome itself must count in spite of rounding
    passes, fails = np.full_like(discordant, -1), discordant + 1
    while (fails - passes).max() > 1:
        intermediate = (passes + fails) // 2
        passed = _score(2 * intermediate - discordant, discordant, n, drop) <= most
        passes, fails = np.where(passed, intermediate, passes), np.where(passed, fails, intermediate)
    return passes


LARGEST_STAKE: Final = 0.9
"""Share of the wealth that one image may lose; with 1 a single loss would end the game."""

PRECISION: Final = 1e-4
"""Of bounds that are found by bisection; they are rounded to the safe side."""


def paired_betting_p(
    losses: Numbers, differing: Numbers, max_drop: float, delta: float = 0.05, planned: int | None = None
) -> float:
    """p-value of H0: E ℓ ≥ max_drop, from losses ℓ (n,) in [−1, 1] in an order that does not depend on them.

    `differing` (n,), in [0, 1], is what stakes may know of the images before: how far the stages' answers differ,
    without labels. `delta` only tunes the stakes, as does `planned`, the number of images that there will be if these
    are the first of them: then the p-value may be looked at after each image. None means that these are all.

    Raises:
        ValueError: if there are no losses, one lies outside of [−1, 1], or max_drop is not in (0, 1].
    """
    if not 0.0 < max_drop <= 1.0:
        raise ValueError(f"max_drop must lie in (0, 1], got {max_drop}")
    values, squares = _within(losses, -1.0), differing.astype(np.float64) ** 2
    return float(min(1.0, math.exp(-log_wealth(values, max_drop, delta, squares, planned))))


def log_wealth(
    values: Floats, mean: float | Floats, delta: float, squares: Floats, planned: int | None = None
) -> Floats:
    """The logarithm of the largest wealth of a bet against E x ≥ mean, for each of several samples (..., n) of x ≤ 1.

    Stakes are the predictable plug-in of the source above (its equation 26), of the `squares` (..., n) of images
    before; `mean` is (..., 1), and `planned` as in `paired_betting_p`.
    """
    n = values.shape[-1]
    spread = (0.25 + np.cumsum(squares, axis=-1)) / np.arange(2, n + 2)
    past = np.concatenate([np.full((*spread.shape[:-1], 1), 0.25), spread[..., :-1]], axis=-1)
    # One image loses at most stake · (1 − mean), which is 0 for a mean of 1.
    ceiling = LARGEST_STAKE / np.maximum(1.0 - mean, 1e-12)
    stake = np.minimum(np.sqrt(2.0 * math.log(1.0 / delta) / ((planned or n) * past)), ceiling)
    wealth: Floats = np.cumsum(np.log1p(stake * (mean - values)), axis=-1).max(axis=-1)
    return wealth


def deviations(values: Floats) -> Floats:
    """The squared distance of each value (..., n) from the mean so far: the `squares` of a sample by itself."""
    means = (0.5 + np.cumsum(values, axis=-1)) / np.arange(2, values.shape[-1] + 2)
    squared: Floats = (values - means) ** 2
    return squared


def _within(values: Numbers, least: float) -> Floats:
    """Raises: ValueError if there are no values (n,), or one does not lie in [least, 1]."""
    x = values.astype(np.float64)
    if len(x) == 0 or not (x.min() >= least and x.max() <= 1.0):
        raise ValueError("expected at least one loss, none of them out of range")
    return x


def mean_upper_bound(values: Floats, delta: float) -> float:
    """An upper confidence bound, at level 1 − delta, on the mean of values (n,) in [0, 1] in a random order."""
    x = _within(values, 0.0)
    squares, enough = deviations(x), math.log(1.0 / delta)
    return _least(lambda mean: bool(log_wealth(x, mean, delta, squares) >= enough))


def mean_interval(values: Floats, delta: float = 0.05) -> tuple[float, float]:
    """A two-sided interval, at level 1 − delta, for the mean of values (n,) in [0, 1] in a random order."""
    return 1.0 - mean_upper_bound(1.0 - values, delta / 2), mean_upper_bound(values, delta / 2)


def mean_drop_upper_bound(losses: Floats, differing: Floats, delta: float, planned: int | None = None) -> float:
    """The smallest ε that a single threshold certifies by betting; the arguments are those of `paired_betting_p`."""
    return _least(lambda drop: paired_betting_p(losses, differing, drop, delta, planned) <= delta)


def drop_upper_bound(lost: int, gained: int, n: int, delta: float = 0.05, differing: int | None = None) -> float:
    """The smallest ε that a single threshold certifies: an upper confidence bound on its drop, to 1e-4."""
    return _least(lambda drop: paired_exact_p(lost, gained, n, drop, nuisance_beta(delta), differing) <= delta)


def _least(passes: Callable[[float], bool]) -> float:
    """The smallest value in (0, 1] that passes a test that all larger values pass; 1 if none does."""
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        intermediate = (low + high) / 2
        low, high = (low, intermediate) if passes(intermediate) else (intermediate, high)
    return high
