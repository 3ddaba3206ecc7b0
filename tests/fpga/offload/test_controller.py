"""The controller in a simulated world: finds the share, stays there, follows traffic, survives a dead FPGA."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from fpga.offload.controller import DEAD_BAND, FIRST_PROBE_S, STEP_DOWN, STEP_S, STEP_UP, OffloadCounts, ShareController
from fpga.offload.model import ByRate
from tests.fpga.offload.offload_world import MODEL, World, poisson

schedule = functools.cache(MODEL.schedule)


def world(seed: int = 0) -> World:
    return World(MODEL, schedule(), seed)


@pytest.mark.parametrize("rate_hz", [450.0, 800.0])
def test_share_comes_to_rest_where_it_was_planned(rate_hz: float) -> None:
    here = world()
    here.run(poisson(np.random.default_rng(1), (60, rate_hz)))
    shares = here.record.shares(20, 60)
    assert abs(shares - schedule().at(rate_hz)).max() < 0.12
    assert np.mean(abs(np.diff(shares)) > 0) < 0.2


def test_latencies_are_those_that_were_predicted() -> None:
    here = world(3)
    here.run(poisson(np.random.default_rng(3), (100, 800.0)))
    latency, on_fpga = here.record.between(20, 100)
    share = float(np.mean(here.record.shares(20, 100)))
    predicted = MODEL.forecast(800.0, share)
    assert on_fpga.mean() == pytest.approx(predicted.fpga_share, rel=0.05)
    assert np.quantile(latency, 0.5) == pytest.approx(predicted.p50_s, rel=0.1)
    assert np.quantile(latency, 0.99) == pytest.approx(predicted.p99_s, rel=0.15)


def test_rate_step_is_followed_both_ways() -> None:
    here = world()
    here.run(poisson(np.random.default_rng(2), (20, 200), (30, 800), (30, 200)))
    low, high, again = (here.record.shares(t, t + 10).mean() for t in (10, 40, 70))
    assert low == again == 1.0
    assert high == pytest.approx(schedule().at(800), abs=0.08)
    decided, _ = here.record.between(25, 50)
    assert np.mean(decided > MODEL.deadline_s) < 0.03


def test_slow_device_gets_less_and_a_mended_one_more_again() -> None:
    here, rng = world(), np.random.default_rng(4)
    arrivals = np.array(poisson(rng, (120, 400)))
    here.run(arrivals[arrivals < 40].tolist())
    here.run(arrivals[(arrivals >= 40) & (arrivals < 80)].tolist(), slowness=3.0)
    here.run(arrivals[arrivals >= 80].tolist())
    before, during, after = (here.record.shares(t, t + 15).mean() for t in (20, 60, 105))
    assert during < 0.5 * before
    assert after > 0.9 * before
    late, _ = here.record.between(60, 80)
    assert np.mean(late > MODEL.deadline_s) < 0.05


def test_dead_fpga_gets_nothing_but_probes_and_all_is_answered() -> None:
    here, arrivals = world(), np.array(poisson(np.random.default_rng(5), (60, 300)))
    here.run(arrivals[arrivals < 10].tolist())
    here.run(arrivals[(arrivals >= 10) & (arrivals < 30)].tolist(), dead=True)
    here.run(arrivals[arrivals >= 30].tolist())
    _, while_dead = here.record.between(10, 30)
    _, long_after = here.record.between(55, 60)
    assert not while_dead.any()
    assert long_after.mean() > 0.95
    assert len(here.record.latency) == len(arrivals)


def steady(share: float) -> ShareController:
    return ShareController(ByRate.always(share), 2e-3)


def test_share_moves_in_bounded_steps() -> None:
    controller = ShareController(ByRate((100.0, 200.0), (1.0, 0.0)), 2e-3)
    shares = [controller.step(OffloadCounts(25 if i < 40 else 50), i * STEP_S) for i in range(80)]
    steps = np.diff(shares)
    assert steps.max() <= STEP_UP + 1e-9
    assert steps.min() == pytest.approx(-STEP_DOWN)
    assert shares[39] == 1.0
    assert shares[-1] < DEAD_BAND


def steps(controller: ShareController, count: int, late: int, done: int = 0) -> list[float]:
    """The shares of so many steps, in each of which so many of 100 images were late; `done` steps came before."""
    seen = OffloadCounts(100, fpga=100, late=late)
    return [controller.step(seen, i * STEP_S) for i in range(done, done + count)]


def test_images_late_beyond_chance_shrink_the_share_and_punctual_ones_let_it_grow() -> None:
    controller = steady(1.0)
    assert steps(controller, 40, late=10)[-1] < 0.7
    assert steps(controller, 660, late=0, done=40)[-1] == 1.0


def test_growth_that_had_to_be_taken_back_is_tried_ever_later() -> None:
    controller, shares = steady(1.0), list[float]()
    for i in range(4_000):
        shares += steps(controller, 1, late=8 if controller.share > 0.8 else 0, done=i)
    turns = np.flatnonzero(np.diff(shares) < 0)
    assert np.diff(turns)[-1] > 8 * np.diff(turns)[np.diff(turns) > 1][0]
    assert min(shares[100:]) > 0.6


def test_one_late_image_in_a_hundred_changes_nothing() -> None:
    assert set(steps(steady(1.0), 500, late=1)[40:]) == {1.0}


def test_probes_of_a_failed_fpga_come_ever_later_but_come() -> None:
    controller = steady(1.0)
    controller.fail(0.0)
    probed = [t for t in np.arange(0, 200, 0.1).tolist() if controller.probe_due(t)]
    gaps = np.diff(probed)
    assert probed[0] == pytest.approx(FIRST_PROBE_S, abs=0.11)
    assert gaps.max() <= 30.2
    assert (np.diff(gaps) > -0.2).all()
