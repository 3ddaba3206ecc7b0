"""Tails and bounds of binomial proportions, and the assignment of classes, without SciPy, which edge nodes lack."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HALVINGS: Final = 60
"""Of the interval in which a bound is sought; a float has 53 digits."""


@lru_cache(maxsize=8)
def _log_factorials(n: int) -> Floats:
    """The logarithms of 0! to n! (n + 1,)."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])


def pmf(k: NDArray[np.int64], n: int | NDArray[np.int64], p: Floats) -> Floats:
    """The probability of k successes in n, each of probability p in (0, 1], for arrays; 0 for k = −1.

    To nine digits for n up to 100,000.
    """
    factorials, some = _log_factorials(int(np.max(n))), np.maximum(k, 0)
    below = np.minimum(p, 1.0 - 1e-16)  # of 1 itself the logarithm below has none
    logs = factorials[n] - factorials[some] - factorials[n - some] + some * np.log(p) + (n - some) * np.log1p(-below)
    return np.where(k < 0, 0.0, np.exp(logs))


def at_most(k: int, n: int, p: float) -> float:
    """The probability of at most k successes in n, each of probability p."""
    if k < 0 or k >= n:
        return float(k >= n)
    if not 0.0 < p < 1.0:
        return float(p <= 0.0)
    successes, factorials = np.arange(k + 1), _log_factorials(n)
    choose = factorials[n] - factorials[: k + 1] - factorials[n - successes]
    logs = choose + successes * math.log(p) + (n - successes) * math.log1p(-p)
    largest = float(logs.max())
    return min(1.0, math.exp(largest) * float(np.exp(logs - largest).sum()))


def at_least(k: int, n: int, p: float) -> float:
    """The probability of at least k successes in n, each of probability p."""
    return at_most(n - k, n, 1.0 - p)


@lru_cache(maxsize=4096)
def proportion_upper(k: int, n: int, delta: float) -> float:
    """The exact upper bound of a proportion at level 1 − delta (Clopper and Pearson, 1934), from k successes in n."""
    if k >= n:
        return 1.0
    low, high = k / n, 1.0
    for _ in range(HALVINGS):
        p = (low + high) / 2
        low, high = (p, high) if at_most(k, n, p) > delta else (low, p)
    return high


def clopper_pearson(successes: int, n: int, delta: float = 0.05) -> tuple[float, float]:
    """The exact two-sided interval of a proportion, at confidence 1 - delta (Clopper and Pearson, 1934)."""
    return 1.0 - proportion_upper(n - successes, n, delta / 2), proportion_upper(successes, n, delta / 2)


def best_assignment(worth: Floats) -> NDArray[np.intp]:
    """The column of each row (n,) that makes the sum of a square matrix (n, n) largest, each column once.

    Shortest augmenting paths (Jonker and Volgenant, Computing 1987), row by row.
    """
    n = len(worth)
    cost = worth.max(initial=0.0) - worth
    of_row, of_column = np.zeros(n), np.zeros(n)
    taken_by = np.full(n, -1)
    for first in range(n):
        length, before, done = np.full(n, np.inf), np.full(n, -1), np.zeros(n, np.bool_)
        row, column, least = first, -1, 0.0
        while True:
            through = least + cost[row] - of_row[row] - of_column
            shorter = ~done & (through < length)
            length[shorter], before[shorter] = through[shorter], column
            column = int(np.where(done, np.inf, length).argmin())
            least, row = float(length[column]), int(taken_by[column])
            if row < 0:
                break
            done[column] = True
        of_row[first] += least
        of_row[taken_by[done]] += least - length[done]
        of_column[done] -= least - length[done]
        while column >= 0:
            previous = int(before[column])
            taken_by[column] = first if previous < 0 else taken_by[previous]
            column = previous
    found = np.empty(n, np.intp)
    found[taken_by] = np.arange(n)
    return found
