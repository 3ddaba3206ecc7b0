"""Intervals contain the truth about as often as they say, also where neighbours are alike."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.analysis.bootstrap import (
    Floats,
    Places,
    block_length,
    bootstrap,
    clustered_interval,
    draws,
    exact_interval,
    interval,
    occasions,
    quantiles,
)
from tests.fuzz.examples import examples

SERIES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60).map(np.array)


def waves(rng: np.random.Generator, n: int, alike: float) -> Floats:
    """A series around 0, each value `alike` times the one before plus something new."""
    found = np.empty(n)
    now = 0.0
    for place, new in enumerate(rng.normal(size=n).tolist()):
        now = alike * now + new
        found[place] = now
    return found


def quantile_of(series: Floats, share: float, places: Places) -> Floats:
    return quantiles(series[places], [share])


def coverage(alike: float, share: float, truth: float, block: int | None = None) -> float:
    """How often the interval of a quantile of 300 values contains the truth, in 100 seeded series."""
    hits = 0
    for seed in range(100):
        series = waves(np.random.default_rng([7, seed]), 300, alike)
        one = partial(quantile_of, series, share)
        low, high = interval(bootstrap(len(series), block or block_length(series), seed, one))
        hits += low <= truth <= high
    return hits / 100


def test_interval_of_a_median_contains_the_truth_19_times_of_20() -> None:
    assert 0.90 <= coverage(0.0, 0.5, 0.0) <= 0.99


def test_blocks_keep_the_interval_true_where_neighbours_are_alike_and_single_draws_do_not() -> None:
    assert coverage(0.8, 0.5, 0.0, block=1) < 0.65
    assert coverage(0.8, 0.5, 0.0) > 0.84


def test_block_is_short_for_unrelated_values_and_long_for_waves() -> None:
    rng = np.random.default_rng(1)
    assert block_length(rng.normal(size=2_000)) <= 5
    assert block_length(waves(rng, 2_000, 0.9)) > 20


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**32))
@settings(max_examples=examples(100))
def test_resample_is_as_long_as_the_run_and_made_of_its_neighbours(n: int, block: int, seed: int) -> None:
    places = next(draws(n, block, seed))[0]
    assert len(places) == n
    steps = np.diff(places) % n
    assert all(step == 1 % n for at, step in enumerate(steps.tolist(), 1) if at % block)


@given(SERIES, st.floats(0.001, 1.0))
def test_quantile_is_the_smallest_value_that_the_share_does_not_exceed(series: Floats, share: float) -> None:
    found = float(quantiles(series, [share])[0])
    assert (series <= found).mean() >= share - 1e-9
    assert (series < found).mean() < share


@pytest.mark.parametrize(("block", "expected"), [(1, 5), (2, 3), (3, 2), (9, 1)])
def test_values_within_a_block_are_one_occasion(block: int, expected: int) -> None:
    assert occasions(np.array([9.0, 9, 1, 9, 9, 1, 1, 1, 9]), 9.0, block) == expected
    assert occasions(np.ones(3), 2.0, block) == 0


def test_numbers_that_can_hardly_ever_be_computed_have_no_interval() -> None:
    assert all(math.isnan(end) for end in interval(np.array([1.0, math.nan, math.nan])))


def test_images_sent_twice_count_once() -> None:
    right = np.array([True] * 7 + [False] * 3)
    twice = clustered_interval(np.tile(right, 2), np.tile(np.arange(10), 2))
    assert twice == pytest.approx(exact_interval(7, 10))


def test_all_right_on_few_images_is_not_certain() -> None:
    low, high = clustered_interval(np.ones(100, np.bool_), np.arange(100) % 5)
    assert (low, high) == pytest.approx(exact_interval(5, 5))


@given(st.integers(0, 50), st.integers(1, 50), st.floats(1e-6, 0.5))
def test_exact_intervals_are_those_of_scipy(successes: int, more: int, delta: float) -> None:
    found = scipy.stats.binomtest(successes, successes + more).proportion_ci(1.0 - delta, method="exact")
    assert exact_interval(successes, successes + more, delta) == pytest.approx((found.low, found.high), abs=1e-6)
