"""Confidence intervals: resampling for what depends on time, exact intervals for what does not.

Neighbouring requests share a queue and a link, so slow answers come together. The circular block bootstrap (Politis and
Romano, 1992) draws whole blocks of neighbours; the rule of Politis and White (2004, corrected by Patton, Politis and
White, 2009) sets the block length from the data. Intervals are percentile intervals.

They assume that the run would go on as it went: a link that was bad once cannot say how often it is bad. `occasions`
counts separate bad spells; where they are few, the interval is right only in its order of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv  # not `scipy.stats`, which takes a second to import

Floats: TypeAlias = NDArray[np.float64]
Places: TypeAlias = NDArray[np.intp]

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 1_000
"""An end of a 95 % interval then rests on 25 resamples beyond it."""
FEWEST_RESAMPLES: Final = 200
DRAWN_AT_ONCE: Final = 100_000
"""Places held together. They stay in a core's cache; one resample after another takes about three times as long."""
MOST_DRAWN: Final = 10_000_000
"""Requests drawn over all resamples of one run: beyond 10,000 requests there are fewer resamples, which intervals that
are narrow by then can bear."""


def resamples_of(n: int) -> int:
    """How many resamples are drawn of n requests."""
    return max(FEWEST_RESAMPLES, min(RESAMPLES, MOST_DRAWN // max(n, 1)))


def block_length(*series: Floats) -> int:
    """The longest of the blocks that these series, all in order of time and of one length, need.

    Politis and White's estimate for the circular bootstrap, at most min(3 √n, n/3) as they advise.
    """
    return max(_block_length(one) for one in series)


def _block_length(series: Floats) -> int:
    n = len(series)
    deviations = series - series.mean()
    variance = float(deviations @ deviations) / n
    if n < 9 or variance == 0.0:
        return 1
    quiet_lags = max(5, math.ceil(math.log10(n)))
    farthest = min(math.ceil(math.sqrt(n)) + quiet_lags, n - 1)
    covariances = np.array([deviations[lag:] @ deviations[: n - lag] / n for lag in range(farthest + 1)])
    # Alike up to the lag after which `quiet_lags` correlations in a row are no larger than chance makes them.
    quiet = np.abs(covariances[1:] / variance) < 2.0 * math.sqrt(math.log10(n) / n)
    runs = np.convolve(quiet, np.ones(quiet_lags), mode="valid") == quiet_lags
    alike = int(np.argmax(runs)) if runs.any() else farthest
    window = min(2 * max(alike, 1), farthest)
    lags = np.arange(1, window + 1)
    taper = np.minimum(1.0, 2.0 * (1.0 - lags / window))
    bias = 2.0 * float((taper * lags) @ covariances[1 : window + 1])
    spectrum = variance + 2.0 * float(taper @ covariances[1 : window + 1])
    if spectrum <= 0.0:  # alternating series: neighbours differ more than strangers do, so blocks of one are cautious
        return 1
    wanted = math.cbrt(2.0 * bias**2 / (4.0 / 3.0 * spectrum**2) * n)
    longest = math.ceil(min(3.0 * math.sqrt(n), n / 3.0))
    return max(1, min(math.ceil(wanted), longest))


def draws(n: int, block: int, seed: int) -> Iterator[Places]:
    """Resamples of n requests in order of time, some at once: shape (resamples, n), the places each is made of.

    A resample is block after block, going round from the last request to the first.
    """
    rng = np.random.default_rng(seed)
    offsets = np.arange(block)
    left = resamples_of(n)
    while left > 0:
        rows = min(left, max(1, DRAWN_AT_ONCE // n))
        starts = rng.integers(0, n, (rows, -(-n // block)))
        yield ((starts[:, :, None] + offsets).reshape(rows, -1)[:, :n] % n).astype(np.intp)
        left -= rows


def bootstrap(n: int, block: int, seed: int, statistic: Callable[[Places], Floats]) -> Floats:
    """A vector of numbers for each resample: shape (resamples, numbers).

    The statistic is given some resamples at once, as `draws` makes them, and gives a row for each.
    """
    return np.concatenate([statistic(places) for places in draws(n, block, seed)])


def interval(resampled: Floats) -> tuple[float, float]:
    """The 95 % percentile interval of one number's resamples; both ends NaN if it could hardly ever be computed.

    Resamples in which it could not be (a ratio to nothing) are left out, up to half of them.
    """
    known = resampled[np.isfinite(resampled)]
    if 2 * len(known) < len(resampled):
        return math.nan, math.nan
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(known, (tail, 1.0 - tail))
    return float(low), float(high)


def quantiles(values: Floats, shares: Sequence[float]) -> Floats:
    """The smallest value that at least this share of all does not exceed: always one that was measured.

    Along the last axis: values of shape (…, n) give (…, shares).
    """
    places = [place_of(values.shape[-1], share) for share in shares]
    return np.partition(values, sorted(set(places)), axis=-1)[..., places]


def ranks(values: Floats) -> Floats:
    """The place of each value among all, from 1; equal ones share the mean of theirs."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    found: Floats = (np.cumsum(count) - (count - 1) / 2)[which]
    return found


def occasions(values: Floats, at_least: float, block: int) -> int:
    """On how many separate occasions values in order of time reached a level: those within a block are one.

    The declustering of extreme-value theory, by runs of `block` values below the level (Smith and Weissman, 1994).
    """
    reached = np.flatnonzero(values >= at_least)
    return int(len(reached) > 0) + int((np.diff(reached) >= block).sum())


def place_of(n: int, share: float) -> int:
    """Where that value stands among n sorted ones, counted from 0."""
    # 0.99 × 100 is 99.00000000000001 in binary, and the hundredth of a hundred is not the P99.
    return min(n, max(1, math.ceil(share * n - 1e-9))) - 1


def exact_interval(successes: float, n: float, delta: float = 0.05) -> tuple[float, float]:
    """The exact two-sided interval of a proportion, at confidence 1 - delta (Clopper and Pearson, 1934).

    Neither number need be whole: see `clustered_interval`.
    """
    low = 0.0 if successes <= 0 else float(betaincinv(successes, n - successes + 1, delta / 2))
    high = 1.0 if successes >= n else float(betaincinv(successes + 1, n - successes, 1 - delta / 2))
    return low, high


def clustered_interval(right: NDArray[np.bool_] | Floats, images: NDArray[np.int64]) -> tuple[float, float]:
    """The exact interval of a share of requests; several requests may have sent the same image.

    An image sent twice is right twice or wrong twice and says hardly more than one sent once. So the exact interval is
    taken at as many independent requests as would vary as much (Korn and Graubard, 1998); with every image sent once,
    that is Clopper and Pearson's.
    """
    n, share = len(right), float(right.mean())
    naive = share * (1.0 - share) / n
    if naive == 0.0:
        independent = float(len(np.unique(images)))
    else:
        independent = n / max(1.0, clustered_error(right.astype(np.float64), images) ** 2 / naive)
    return exact_interval(share * independent, independent)


def clustered_error(values: Floats, clusters: NDArray[np.int64]) -> float:
    """The standard error of a mean over requests; those of one cluster may depend on each other in any way."""
    _, members = np.unique(clusters, return_inverse=True)
    sums = np.bincount(members, weights=values - values.mean())
    return math.sqrt(float(sums @ sums)) / len(values)
