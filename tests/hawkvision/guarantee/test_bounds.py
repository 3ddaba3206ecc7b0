"""The tests of one threshold against brute force over all outcomes, exhaustive enumeration, simulation and SciPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import beta, binom, multinomial

from hawkvision.guarantee.bounds import (
    NUISANCE_BETA,
    NUISANCE_POINTS,
    _discordant,
    _lower_tails,
    _most_lost,
    _score,
    deviations,
    drop_upper_bound,
    log_wealth,
    mean_drop_upper_bound,
    mean_interval,
    mean_upper_bound,
    paired_betting_p,
    paired_exact_p,
)
from tests.fuzz.examples import examples

Counts = NDArray[np.int64]


def enumerate_outcomes(n: int) -> tuple[Counts, Counts]:
    lost, gained = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    possible = lost + gained <= n
    return lost[possible], gained[possible]


def trinomial(lost: Counts, gained: Counts, n: int, rate: float, drop: float) -> NDArray[np.float64]:
    p_lost, p_gained = (rate + drop) / 2, (rate - drop) / 2
    cells = np.column_stack([lost, gained, n - lost - gained])
    return np.asarray(multinomial.pmf(cells, n, [p_lost, p_gained, max(0.0, 1 - p_lost - p_gained)]))


def bet(losses: NDArray[Any], drop: float, delta: float = 0.05) -> float:
    """With stakes that know how large each loss or gain was, and not which."""
    return paired_betting_p(losses, np.abs(losses), drop, delta)


def draw_losses(rng: np.random.Generator, n: int, rate: float, drop: float) -> NDArray[np.int8]:
    """Images on the boundary of H0: E ℓ = drop, P(ℓ ≠ 0) = rate."""
    place = rng.random(n)
    return np.where(place < (rate + drop) / 2, 1, np.where(place < rate, -1, 0)).astype(np.int8)


@pytest.mark.parametrize(("n", "drop", "delta"), [(30, 0.12, 0.05), (40, 0.1, 0.05), (40, 0.2, 0.1), (60, 0.06, 0.05)])
def test_exact_test_never_rejects_a_true_null_more_often_than_delta(n: int, drop: float, delta: float) -> None:
    """Brute force over every outcome and a fine grid of discordance rates that the test itself does not use."""
    lost, gained = enumerate_outcomes(n)
    rejected = np.array([paired_exact_p(int(b), int(c), n, drop) <= delta for b, c in zip(lost, gained, strict=True)])
    assert rejected.any(), "the test must be able to reject at this size"
    size = max(trinomial(lost, gained, n, q, drop)[rejected].sum() for q in np.linspace(drop, 1.0, 97))
    assert size <= delta


@pytest.mark.parametrize("drop", [0.15, 0.25])
def test_exact_test_is_no_more_often_wrong_inside_the_null_than_on_its_boundary(drop: float) -> None:
    n, delta = 30, 0.05
    lost, gained = enumerate_outcomes(n)
    rejected = np.array([paired_exact_p(int(b), int(c), n, 0.12) <= delta for b, c in zip(lost, gained, strict=True)])
    for rate in np.linspace(drop, 1.0, 12):
        inside = trinomial(lost, gained, n, rate, drop)[rejected].sum()
        assert inside <= trinomial(lost, gained, n, rate, 0.12)[rejected].sum() + 1e-12


@pytest.mark.parametrize(
    ("lost", "gained", "n", "drop"),
    [(0, 0, 200, 0.02), (3, 1, 500, 0.02), (30, 20, 700, 0.08), (3, 9, 60, 0.1), (30, 12, 2_000, 0.02)],
)
def test_no_discordance_rate_between_the_points_of_the_search_is_worse(
    lost: int, gained: int, n: int, drop: float
) -> None:
    high = beta.ppf(1 - NUISANCE_BETA, lost + gained + 1, n - lost - gained)
    rates = np.linspace(drop, max(high, drop), 32 * (NUISANCE_POINTS - 1) + 1)
    observed = float(_score(np.array([lost - gained]), np.array([lost + gained]), n, drop)[0])
    worst = float(_lower_tails(observed, n, rates, drop).max())
    assert paired_exact_p(lost, gained, n, drop) - NUISANCE_BETA == pytest.approx(worst, abs=5e-4)


def test_a_drop_that_is_observed_in_full_is_no_evidence() -> None:
    assert paired_exact_p(40, 20, 200, 0.1) == 1.0
    assert paired_exact_p(50, 20, 200, 0.1) == 1.0
    assert paired_exact_p(39, 20, 200, 0.1) < 1.0


@given(st.integers(1, 80), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_exact_p_value_never_falls_as_a_loss_rises_and_what_certifies_a_drop_certifies_larger_ones(
    n: int, data: st.DataObject
) -> None:
    differing = data.draw(st.integers(0, n))
    lost = data.draw(st.integers(0, differing))
    gained = data.draw(st.integers(0, differing - lost))
    drop = data.draw(st.floats(0.01, 0.9))
    p = paired_exact_p(lost, gained, n, drop, differing=differing)
    assert NUISANCE_BETA <= p <= 1.0
    if lost + gained < differing:
        assert paired_exact_p(lost + 1, gained, n, drop, differing=differing) >= p - 1e-12
    if gained:
        assert paired_exact_p(lost, gained - 1, n, drop, differing=differing) >= p - 1e-12
    for level in (0.01, 0.05, 0.1):
        if p <= level:
            assert paired_exact_p(lost, gained, n, min(1.0, drop + 0.05), differing=differing) <= level


@pytest.mark.parametrize("n", [1, 2, 7, 20, 45])
@pytest.mark.parametrize("drop", [0.003, 0.05, 0.3, 0.8])
def test_outcomes_are_ordered_by_every_single_loss(n: int, drop: float) -> None:
    """All outcomes: the score rises as an image that agreed loses, and as one that gained agrees."""
    lost, gained = enumerate_outcomes(n)
    score = {(b, c): t for b, c, t in zip(lost, gained, _score(lost - gained, lost + gained, n, drop), strict=True)}
    for (b, c), t in score.items():
        assert all(score.get(worse, t) >= t - 1e-12 for worse in ((b + 1, c), (b, c - 1)))


@pytest.mark.parametrize(("n", "drop"), [(1, 0.5), (4, 0.9), (6, 0.3), (8, 0.5), (8, 0.8)])
def test_betting_is_valid_over_all_sequences_at_every_level(n: int, drop: float) -> None:
    """All 3^n outcomes, each with its probability under a fine grid of boundary distributions: P(p ≤ t) ≤ t."""
    sequences = np.array(list(itertools.product((-1, 0, 1), repeat=n)), np.int8)
    p = np.array([paired_betting_p(sequence, np.abs(sequence), drop) for sequence in sequences])
    lost, gained = (sequences == 1).sum(axis=1), (sequences == -1).sum(axis=1)
    levels = np.unique(p)[:-1][:: max(1, len(np.unique(p)) // 60)]
    assert len(levels)
    for rate in np.linspace(drop, 1.0, 41):
        p_lost, p_gained = (rate + drop) / 2, (rate - drop) / 2
        weights = p_lost**lost * p_gained**gained * max(0.0, 1.0 - rate) ** (n - lost - gained)
        assert weights.sum() == pytest.approx(1.0)
        assert all(weights[p <= level].sum() <= level + 1e-12 for level in levels)


def test_betting_is_valid_for_dependent_images_as_long_as_each_is_as_bad_given_the_past() -> None:
    """Ville's inequality asks no independence: here the discordance of each image follows from the one before."""
    rng = np.random.default_rng(7)
    runs, drop, rejected = 600, 0.1, 0
    for _ in range(runs):
        losses = np.zeros(200, np.int8)
        for i in range(1, 200):
            rate = 0.9 if losses[i - 1] else 0.15
            losses[i] = draw_losses(rng, 1, rate, drop)[0]
        rejected += bet(losses[1:], drop) <= 0.05
    assert rejected <= runs * 0.05 + 2 * math.sqrt(runs * 0.05 * 0.95)


def test_betting_certifies_a_small_drop_and_not_a_large_one() -> None:
    rng = np.random.default_rng(3)
    assert bet(draw_losses(rng, 2_000, 0.05, 0.005), 0.03) < 0.01
    assert bet(draw_losses(rng, 2_000, 0.1, 0.06), 0.03) > 0.5


def test_a_drop_of_one_can_be_bet_on() -> None:
    assert bet(np.zeros(20, np.int8), 1.0) < 1e-6
    assert bet(np.ones(20, np.int8), 1.0) == 1.0


LOSS = st.floats(-1.0, 1.0)


@given(st.lists(st.tuples(LOSS, LOSS, st.floats(0.0, 1.0)), min_size=1, max_size=60), st.floats(0.001, 1.0))
@settings(deadline=None)
def test_betting_p_value_is_a_probability_and_never_falls_as_losses_rise(
    values: list[tuple[float, float, float]], drop: float
) -> None:
    one, other, differing = np.array(values).T
    p = paired_betting_p(np.minimum(one, other), differing, drop)
    assert 0.0 < p <= paired_betting_p(np.maximum(one, other), differing, drop) + 1e-12 <= 1.0 + 1e-12


def test_upper_bound_on_the_drop_is_the_edge_of_what_is_certified() -> None:
    bound = drop_upper_bound(lost=60, gained=20, n=700)
    assert 40 / 700 < bound < 0.12
    assert paired_exact_p(60, 20, 700, bound) <= 0.05
    assert paired_exact_p(60, 20, 700, bound - 2e-4) > 0.05


def test_upper_bound_on_the_drop_covers_the_truth_in_all_but_delta_of_the_samples() -> None:
    """By enumeration: the probability of all outcomes whose bound lies below the true drop."""
    n, drop = 18, 0.2
    lost, gained = enumerate_outcomes(n)
    bounds = np.array([drop_upper_bound(int(b), int(c), n) for b, c in zip(lost, gained, strict=True)])
    assert (bounds < 1.0).any()
    for rate in np.linspace(drop, 1.0, 15):
        assert trinomial(lost, gained, n, rate, drop)[bounds < drop].sum() <= 0.05


# ------------------------------------------------------------------------------------------------- bounded losses


def draw_fractions(rng: np.random.Generator, n: int, mean: float) -> NDArray[np.float64]:
    """Values in [0, 1] with this mean: often 0, else anything."""
    shape = rng.beta(0.6, 1.4, n)
    return np.where(rng.random(n) < mean / 0.3, shape, 0.0) if mean <= 0.3 else rng.beta(mean, 1.0 - mean, n)


@pytest.mark.parametrize(("n", "mean"), [(40, 0.02), (150, 0.1), (150, 0.5), (400, 0.9)])
def test_betting_on_fractions_rejects_a_true_mean_no_oftener_than_stated(n: int, mean: float) -> None:
    rng, runs, delta = np.random.default_rng(20261127), 600, 0.05
    rejected = 0
    for _ in range(runs):
        x = draw_fractions(rng, n, mean)
        rejected += bool(log_wealth(x, mean, delta, deviations(x)) >= math.log(1.0 / delta))
    assert rejected <= runs * delta + 2 * math.sqrt(runs * delta * (1 - delta))


@pytest.mark.parametrize(("n", "drop"), [(46, 0.1), (250, 0.03), (250, 0.3)])
def test_fractional_losses_are_certified_wrongly_no_oftener_than_stated(n: int, drop: float) -> None:
    """Losses of F1 and the like: most answers lose nothing, some more than the reference stage, some less."""
    rng, runs, delta = np.random.default_rng(7), 500, 0.05
    rejected = 0
    for _ in range(runs):
        lost, gained = draw_fractions(rng, n, min(0.9, drop + 0.05)), draw_fractions(rng, n, 0.05)
        losses = np.clip(lost - gained, -1.0, 1.0)
        losses += drop - (min(0.9, drop + 0.05) - 0.05)  # the mean is the limit
        rejected += bet(np.clip(losses, -1.0, 1.0), drop, delta) <= delta
    assert rejected <= runs * delta + 2 * math.sqrt(runs * delta * (1 - delta))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60))
@settings(deadline=None, max_examples=examples(200))
def test_an_interval_by_betting_contains_the_observed_mean_and_a_larger_level_widens_it(values: list[float]) -> None:
    x = np.array(values)
    low, high = mean_interval(x, 0.05)
    assert 0.0 <= low <= float(x.mean()) + 1e-9
    assert float(x.mean()) - 1e-9 <= high <= 1.0
    wide = mean_interval(x, 0.005)
    assert wide[0] <= low + 1e-9
    assert wide[1] >= high - 1e-9


@pytest.mark.parametrize("mean", [0.05, 0.4, 0.95])
def test_intervals_by_betting_miss_the_mean_no_oftener_than_stated(mean: float) -> None:
    rng, runs, delta = np.random.default_rng(5), 150, 0.1
    missed = 0
    for _ in range(runs):
        low, high = mean_interval(draw_fractions(rng, 120, mean), delta)
        missed += not low <= mean <= high
    assert missed <= runs * delta + 2 * math.sqrt(runs * delta * (1 - delta))


def test_bounds_shrink_with_the_number_of_images_and_none_is_below_what_no_loss_at_all_can_show() -> None:
    rng = np.random.default_rng(3)
    drawn = [draw_fractions(rng, n, 0.02) for n in (50, 500, 5_000)]
    found = [mean_drop_upper_bound(x - 0.02, x, 0.05) for x in drawn]
    assert found == sorted(found, reverse=True)
    for n in (20, 46, 300):
        assert mean_drop_upper_bound(np.zeros(n), np.zeros(n), 0.05) > 1.0 - 0.05 ** (1.0 / n), (
            "else it would beat every valid test"
        )


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: paired_exact_p(-1, 0, 5, 0.1), "lost"),
        (lambda: paired_exact_p(3, 3, 5, 0.1), "gained"),
        (lambda: paired_exact_p(0, 0, 0, 0.1), "lost"),
        (lambda: paired_exact_p(0, 0, 5, 1.5), "max_drop"),
        (lambda: paired_exact_p(2, 1, 5, 0.1, differing=2), "differing"),
        (lambda: bet(np.zeros(0, np.int8), 0.1), "at least one loss"),
        (lambda: bet(np.zeros(2, np.int8), 0.0), "max_drop"),
        (lambda: bet(np.array([0.2, 1.1]), 0.5), "out of range"),
        (lambda: mean_upper_bound(np.array([-0.1]), 0.05), "out of range"),
        (lambda: mean_upper_bound(np.array([math.nan]), 0.05), "out of range"),
    ],
)
def test_impossible_counts_drops_and_values_are_refused(ask: Callable[[], float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ask()


@pytest.mark.parametrize(("n", "rate", "drop"), [(7, 0.4, 0.1), (25, 0.2, 0.2), (40, 0.9, 0.05), (30, 1.0, 0.3)])
def test_tail_equals_the_sum_over_all_outcomes_that_are_no_worse(n: int, rate: float, drop: float) -> None:
    lost, gained = enumerate_outcomes(n)
    pmf, score = trinomial(lost, gained, n, rate, drop), _score(lost - gained, lost + gained, n, drop)
    for observed in np.unique(score[score < 0])[::17]:
        expected = pmf[score <= observed + 1e-9].sum()
        assert _lower_tails(float(observed), n, np.array([rate]), drop)[0] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(("n", "drop"), [(60, 0.06), (60, 0.15), (40, 0.1)])
def test_exact_test_uses_its_level_up_whatever_the_discordance(n: int, drop: float) -> None:
    """What ordering by the score is for: by the difference alone the size is below 1.5 % at most rates."""
    lost, gained = enumerate_outcomes(n)
    rejected = np.array([paired_exact_p(int(b), int(c), n, drop) <= 0.05 for b, c in zip(lost, gained, strict=True)])
    sizes = [trinomial(lost, gained, n, q, drop)[rejected].sum() for q in np.linspace(drop, 0.6, 30)]
    assert np.mean(sizes) > 0.035


@given(st.integers(1, 3_000), st.floats(1e-4, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=examples(200), deadline=None)
def test_tails_are_those_that_scipy_sums(n: int, drop: float, discordant: float, lost: float) -> None:
    both = round(discordant * n)
    observed = float(_score(np.array([2 * round(lost * both) - both]), np.array([both]), n, drop)[0])
    rates = np.linspace(drop, 1.0, 5)
    counts, weights = _discordant(n, rates)
    share = np.minimum(1.0, (rates + drop) / (2 * rates))[:, None]
    summed = (weights * binom.cdf(_most_lost(observed, counts, n, drop), counts, share)).sum(axis=1)
    if observed < 0.0:
        assert _lower_tails(observed, n, rates, drop) == pytest.approx(summed, abs=1e-9)


@pytest.mark.parametrize("n", [100, 680, 5_000, 100_000])
@pytest.mark.parametrize("mean", [0.01, 0.1, 0.5, 1.0, 3.0, 10.0, 50.0])
def test_mass_left_out_of_the_tails_is_as_small_as_stated(n: int, mean: float) -> None:
    counts, _ = _discordant(n, np.array([mean / n]))
    assert 1.0 - binom.pmf(counts, n, mean / n).sum() < 2e-11


@pytest.mark.parametrize(("rate", "drop"), [(0.05, 0.05), (0.2, 0.05), (0.9, 0.3)])
def test_betting_wins_against_a_true_null_no_more_often_than_ville_allows(rate: float, drop: float) -> None:
    rng = np.random.default_rng(20261121)
    runs, delta = 800, 0.05
    rejected = sum(bet(draw_losses(rng, 300, rate, drop), drop) <= delta for _ in range(runs))
    assert rejected <= runs * delta + 2 * math.sqrt(runs * delta * (1 - delta))
