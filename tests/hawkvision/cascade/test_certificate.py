"""The exact paired test against brute force, and the guarantee of the thresholds it keeps."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multinomial

from hawkvision.cascade.certificate import (
    NUISANCE_BETA,
    _lower_tail,
    certify,
    drop_upper_bound,
    paired_exact_p,
    sweep,
    threshold_grid,
)


def enumerate_outcomes(n: int) -> tuple[np.ndarray, np.ndarray]:
    lost, gained = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    possible = lost + gained <= n
    return lost[possible], gained[possible]


def trinomial(lost: np.ndarray, gained: np.ndarray, n: int, rate: float, drop: float) -> np.ndarray:
    p_lost, p_gained = (rate + drop) / 2, (rate - drop) / 2
    cells = np.column_stack([lost, gained, n - lost - gained])
    pmf: np.ndarray = multinomial.pmf(cells, n, [p_lost, p_gained, max(0.0, 1 - p_lost - p_gained)])
    return pmf


@pytest.mark.parametrize(("n", "rate", "drop"), [(7, 0.4, 0.1), (25, 0.2, 0.2), (40, 0.9, 0.05), (30, 1.0, 0.3)])
def test_tail_equals_the_sum_over_all_outcomes(n: int, rate: float, drop: float) -> None:
    lost, gained = enumerate_outcomes(n)
    pmf = trinomial(lost, gained, n, rate, drop)
    for observed in range(-n, n + 1, 3):
        expected = pmf[lost - gained <= observed].sum()
        assert _lower_tail(observed, n, rate, drop) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(("n", "drop", "delta"), [(30, 0.12, 0.05), (40, 0.1, 0.05), (40, 0.2, 0.1), (60, 0.06, 0.05)])
def test_never_rejects_a_true_null_more_often_than_delta(n: int, drop: float, delta: float) -> None:
    """Brute force over every outcome and a fine grid of discordance rates that the test itself does not use."""
    lost, gained = enumerate_outcomes(n)
    rejected = np.array([paired_exact_p(int(b), int(c), n, drop) <= delta for b, c in zip(lost, gained, strict=True)])
    assert rejected.any(), "the test must be able to reject at this size"
    size = max(trinomial(lost, gained, n, q, drop)[rejected].sum() for q in np.linspace(drop, 1.0, 97))
    assert size <= delta


@given(st.integers(1, 60), st.data())
@settings(max_examples=60, deadline=None)
def test_p_value_grows_with_losses_and_shrinks_with_the_allowed_drop(n: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, n))
    gained = data.draw(st.integers(0, n - lost))
    drop = data.draw(st.floats(0.01, 0.9))
    p = paired_exact_p(lost, gained, n, drop)
    assert NUISANCE_BETA <= p <= 1.0
    if lost + gained < n:
        assert paired_exact_p(lost + 1, gained, n, drop) >= p - 0.02
    assert paired_exact_p(lost, gained, n, min(1.0, drop + 0.05)) <= p + 1e-9


@pytest.mark.parametrize(
    ("lost", "gained", "n", "drop"), [(-1, 0, 5, 0.1), (3, 3, 5, 0.1), (0, 0, 0, 0.1), (0, 0, 5, 0.0), (0, 0, 5, 1.5)]
)
def test_impossible_counts_and_drops_are_refused(lost: int, gained: int, n: int, drop: float) -> None:
    with pytest.raises(ValueError, match=r"lost \+ gained|max_drop"):
        paired_exact_p(lost, gained, n, drop)


def draw_traffic(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A cascade whose truth is known: the edge is right with its score, the best rung right with 0.9."""
    scores = rng.random(n)
    edge_right = rng.random(n) < 0.5 + 0.5 * scores
    best_right = np.where(rng.random(n) < 0.8, edge_right | (rng.random(n) < 0.7), rng.random(n) < 0.9)
    return scores, edge_right, best_right


def test_certified_drop_holds_on_fresh_traffic_in_all_but_delta_of_the_samples() -> None:
    rng = np.random.default_rng(20261121)
    population = draw_traffic(rng, 400_000)
    grid = threshold_grid(draw_traffic(rng, 2_000)[0], points=60)
    truth = {t.value: t.drop for t, _, _ in sweep(*population, grid)}
    epsilon, delta, runs = 0.03, 0.05, 150
    violations, kept_values = 0, set()
    for _ in range(runs):
        kept = certify(*draw_traffic(rng, 600), grid, epsilon, delta)
        kept_values.add(kept.value)
        violations += truth[kept.value] > epsilon
    # 5 % of 150 plus two standard errors.
    assert violations <= runs * delta + 2 * math.sqrt(runs * delta * (1 - delta))
    assert min(kept_values) < math.inf


def test_everything_is_escalated_when_nothing_may_be_given_up() -> None:
    scores, edge, best = draw_traffic(np.random.default_rng(1), 500)
    kept = certify(scores, edge, best, threshold_grid(scores), max_drop=0.0)
    assert (kept.value, kept.escalation, kept.drop) == (math.inf, 1.0, 0.0)


def test_too_few_pictures_certify_nothing() -> None:
    scores, edge, best = draw_traffic(np.random.default_rng(2), 50)
    assert certify(scores, edge, best, threshold_grid(scores), max_drop=0.02).value == math.inf


def test_search_stops_at_the_first_failure_even_if_later_thresholds_would_pass() -> None:
    # The edge loses badly on its surest half and wins on the rest: overall fine, but the order was fixed before.
    n = 400
    scores = np.linspace(1.0, 0.0, n)
    edge = np.concatenate([np.zeros(n // 2, bool), np.ones(n // 2, bool)])
    best = ~edge
    assert certify(scores, edge, best, threshold_grid(scores), max_drop=0.2).value > 0.8


def test_a_larger_allowed_drop_never_escalates_more() -> None:
    scores, edge, best = draw_traffic(np.random.default_rng(3), 1_000)
    grid = threshold_grid(scores)
    escalations = [certify(scores, edge, best, grid, drop).escalation for drop in (0.01, 0.02, 0.04, 0.08, 0.16)]
    assert escalations == sorted(escalations, reverse=True)
    assert escalations[0] > escalations[-1]


def test_sweep_counts_what_a_direct_computation_counts() -> None:
    rng = np.random.default_rng(4)
    scores, edge, best = draw_traffic(rng, 300)
    scores = np.round(scores, 1)  # many ties
    grid = np.array([np.inf, 0.95, 0.9, 0.5, 0.45, -np.inf])
    for threshold, lost, gained in sweep(scores, edge, best, grid):
        accepted = scores >= threshold.value
        assert lost == int((accepted & best & ~edge).sum())
        assert gained == int((accepted & edge & ~best).sum())
        assert threshold.escalation == pytest.approx(1 - accepted.mean())
        assert threshold.drop == pytest.approx((lost - gained) / 300)


def test_grid_descends_from_infinity_and_needs_no_labels() -> None:
    grid = threshold_grid(np.repeat([0.2, 0.7], 50))
    assert grid[0] == np.inf
    assert grid[-1] == -np.inf
    assert np.all(np.diff(grid) < 0)


def test_misshapen_input_is_refused() -> None:
    scores, edge, best = draw_traffic(np.random.default_rng(5), 10)
    with pytest.raises(ValueError, match="same length"):
        certify(scores[:-1], edge, best, threshold_grid(scores), 0.1)
    with pytest.raises(ValueError, match="descend"):
        certify(scores, edge, best, np.array([0.1, 0.2]), 0.1)


def test_upper_bound_on_the_drop_is_the_edge_of_what_is_certified() -> None:
    bound = drop_upper_bound(lost=60, gained=20, n=700)
    assert 40 / 700 < bound < 0.12
    assert paired_exact_p(60, 20, 700, bound) <= 0.05
    assert paired_exact_p(60, 20, 700, bound - 2e-4) > 0.05


@pytest.mark.parametrize("n", [100, 680, 5_000, 100_000])
@pytest.mark.parametrize("mean", [0.01, 0.1, 0.5, 1.0, 3.0, 10.0, 50.0])
def test_mass_left_out_of_the_tails_is_as_small_as_stated(n: int, mean: float) -> None:
    assert 1.0 - _lower_tail(n, n, rate=mean / n, drop=mean / n / 2) < 2e-11
