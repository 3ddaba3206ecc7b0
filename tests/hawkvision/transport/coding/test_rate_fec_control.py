"""What is chosen for a link, and the theory that it is chosen by."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.transport.coding import rate_fec_control
from hawkvision.transport.coding.rate_fec_control import (
    FINE,
    PLAIN_FRAGMENTS,
    QUALITIES,
    SIZES,
    choose,
    loss_distributions,
)
from hawkvision.transport.congestion.loss_meter import LossEstimate


def incomplete_probability(loss: float, burst: float, spare_ratio: float | None) -> float:
    """Probability that a typical image does not arrive whole."""
    plan = choose(LossEstimate(loss, burst, known=True), spare_ratio)
    k = round(PLAIN_FRAGMENTS * SIZES[QUALITIES.index(plan.quality)])
    n = k + math.ceil(k * plan.parity - 1e-9)
    return float(loss_distributions(n, loss, burst)[n][n - k + 1 :].sum())


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
@pytest.mark.parametrize("spare_ratio", [None, 1.5, 3.0])
def test_independent_losses_leave_fewer_than_one_image_in_a_hundred_incomplete(
    loss: float, spare_ratio: float | None
) -> None:
    assert incomplete_probability(loss, 1.0, spare_ratio) < 0.01


@pytest.mark.parametrize(("k", "n"), [(1, 1), (18, 21), (40, 40), (200, 255)])
def test_the_share_of_incomplete_images_follows_from_the_loss(k: int, n: int) -> None:
    found = rate_fec_control.incomplete_probability(k, n, LossEstimate(0.1, 2.0, known=True))
    assert found == pytest.approx(loss_distributions(n, 0.1, 2.0)[n][n - k + 1 :].sum())
    no_better = [
        rate_fec_control.incomplete_probability(k, n, LossEstimate(loss, 1.0, known=True)) for loss in (0.0, 0.01)
    ]
    assert no_better[0] == no_better[1]


def test_spare_bandwidth_buys_parity_and_a_fine_quality() -> None:
    for loss in (0.05, 0.2, 0.3):
        assert choose(LossEstimate(loss, 1.0, known=True), 4.0).quality >= FINE
        assert incomplete_probability(loss, 1.0, 4.0) < 0.005


def test_room_for_it_buys_the_best_quality_and_no_worse_protection() -> None:
    narrow, wide = (choose(LossEstimate(0.02, 1.0, known=True), spare_ratio) for spare_ratio in (1.0, 2.0))
    assert (narrow.quality, wide.quality) == (FINE, QUALITIES[0])
    assert incomplete_probability(0.02, 1.0, 2.0) < 0.01


def test_more_loss_never_raises_quality() -> None:
    chosen = [choose(LossEstimate(loss / 100, 1.0, known=True), 1.0).quality for loss in range(0, 60, 5)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] == FINE
    assert chosen[-1] <= 30


def test_bursts_are_met_with_more_parity() -> None:
    single, bursts = (choose(LossEstimate(0.1, burst, known=True), 4.0) for burst in (1.0, 6.0))
    assert bursts.parity > single.parity


def test_bursts_without_bandwidth_to_spare_are_met_with_a_base_image() -> None:
    assert choose(LossEstimate(0.1, 6.0, known=True), 1.0).base
    assert not choose(LossEstimate(0.1, 1.0, known=True), 1.0).base


def test_an_unknown_link_is_neither_trusted_nor_feared() -> None:
    blind = choose(LossEstimate(0.0, 1.0, known=False), None)
    good, bad = (choose(LossEstimate(loss, 2.0, known=True), None) for loss in (0.0, 0.5))
    assert bad.quality < blind.quality <= good.quality
    assert blind.base
    assert not good.base


@given(st.floats(0, 1), st.floats(1, 1000), st.booleans(), st.none() | st.floats(0, 50), st.integers(1, 255))
def test_every_state_has_a_plan(loss: float, burst: float, known: bool, spare: float | None, fragments: int) -> None:
    plan = choose(LossEstimate(loss, burst, known), spare, fragments)
    assert plan.quality in QUALITIES
    assert 0 <= plan.parity <= 255


@given(st.integers(1, 40), st.floats(0.01, 0.9))
def test_short_runs_are_independent_losses(n: int, loss: float) -> None:
    binomial = [math.comb(n, m) * loss**m * (1 - loss) ** (n - m) for m in range(n + 1)]
    assert np.allclose(loss_distributions(n, loss, 1.0)[n], binomial, atol=1e-9)


@given(st.integers(1, 40), st.floats(0.01, 0.9), st.floats(1, 50))
def test_bursts_do_not_change_how_much_is_lost_on_average(n: int, loss: float, burst: float) -> None:
    found = loss_distributions(n, loss, burst)[n]
    assert found.sum() == pytest.approx(1.0)
    assert (found * np.arange(n + 1)).sum() == pytest.approx(n * loss)


def test_bursts_follow_gilbert_s_chain() -> None:
    rng, burst, loss, n = np.random.default_rng(5), 4.0, 0.2, 12
    recover, fail = 1 / burst, loss / (1 - loss) / burst
    state, counts = rng.random(20_000) < loss, np.zeros(20_000, int)
    for _ in range(n):
        counts += state
        draws = rng.random(20_000)
        state = np.where(state, draws >= recover, draws < fail)
    assert np.abs(np.bincount(counts, minlength=n + 1) / 20_000 - loss_distributions(n, loss, burst)[n]).max() < 0.01
