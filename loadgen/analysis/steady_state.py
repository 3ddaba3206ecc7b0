"""Whether a server was in a steady state: whether the second half of a run looked like the first.

Waiting times of neighbours in a queue are alike, and a test for independent samples would call every queue unsteady. So
each half is cut into `BLOCKS` blocks of equal time, each represented by its median, and the medians are compared by the
exact, two-sided rank test of Mann and Whitney (1947). The halves must also differ by `CLEARLY` and `NOTICEABLE_S`.

Medians do not see a queue that few requests wait in. So the backlog is compared too: requests that are due and not
answered, on average over each block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.workload.record import RequestOutcome

BLOCKS: Final = 10
"""Per half. The smallest attainable p-value is 2 / C(20, 10) = 1.1e-5."""
LEAST_PER_BLOCK: Final = 5
SIGNIFICANT: Final = 0.01
CLEARLY: Final = 1.2
"""Ratio of the halves' medians that is more than the noise of shared machines."""
NOTICEABLE_S: Final = 0.001
"""Difference of the halves' medians that is more than a machine's own: a server that answers in one millisecond takes a
fifth longer while something else runs beside it for a second."""
ONE_REQUEST: Final = 1.0
"""By which a backlog must have grown: a server that is nearly idle has none."""


def is_steady(outcomes: Sequence[RequestOutcome], start_s: float, end_s: float) -> bool | None:
    """Whether latencies of requests due from `start_s` to `end_s` stayed as they were; unanswered ones took for ever.

    None if any block has fewer than `LEAST_PER_BLOCK` requests.
    """
    if end_s <= start_s:
        return None
    due = np.array([each.due_s for each in outcomes], np.float64)
    latency = np.array([each.latency_s if each.answered else math.inf for each in outcomes], np.float64)
    within = (due >= start_s) & (due < end_s)
    block = ((due[within] - start_s) / (end_s - start_s) * 2 * BLOCKS).astype(np.intp)
    if np.bincount(block, minlength=2 * BLOCKS).min() < LEAST_PER_BLOCK:
        return None
    medians = np.array([_median(latency[within][block == number]) for number in range(2 * BLOCKS)])
    first, second = medians[:BLOCKS], medians[BLOCKS:]
    p = _chance(first, second, "two-sided")
    low, high = sorted((_median(first), _median(second)))
    return p >= SIGNIFICANT or not (high > CLEARLY * low and high > low + NOTICEABLE_S)


def is_growing(outcomes: Sequence[RequestOutcome], start_s: float, end_s: float) -> bool | None:
    """Whether ever more requests waited at once from `start_s` to `end_s`: more come than are answered.

    None if that is no time, or there are fewer than `LEAST_PER_BLOCK` requests per block.
    """
    due = np.array([each.due_s for each in outcomes], np.float64)
    done = np.array([each.done_s for each in outcomes], np.float64)
    if end_s <= start_s or ((due >= start_s) & (due < end_s)).sum() < 2 * BLOCKS * LEAST_PER_BLOCK:
        return None
    edges = np.linspace(start_s, end_s, 2 * BLOCKS + 1)
    waiting = np.array(
        [np.clip(np.minimum(done, to) - np.maximum(due, since), 0.0, None).sum() for since, to in pairwise(edges)]
    ) / np.diff(edges)
    first, second = waiting[:BLOCKS], waiting[BLOCKS:]
    p = _chance(first, second, "less")
    low, high = float(first.mean()), float(second.mean())
    return p < SIGNIFICANT and high > CLEARLY * low and high > low + ONE_REQUEST


def _chance(first: NDArray[np.float64], second: NDArray[np.float64], side: Literal["less", "two-sided"]) -> float:
    """The p-value of the rank test."""
    from scipy.stats import mannwhitneyu  # takes a second to import, and short runs do without

    return float(mannwhitneyu(first, second, alternative=side, method="exact").pvalue)


def _median(values: NDArray[np.float64]) -> float:
    """The upper median: an observed value, for infinities have no mean."""
    return float(np.sort(values)[len(values) // 2])
