"""The model: what a share costs, and the cheapest share that keeps the deadline."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fpga.offload.model import RATES, SHARES, ByRate
from fpga.offload.queueing import ServiceTime
from tests.fpga.offload.offload_world import MODEL, MS


def test_idle_fpga_takes_all_that_costs_the_cpu_more() -> None:
    assert MODEL.best_share(300) == 1.0
    forecast = MODEL.forecast(300, 1.0)
    assert forecast.cpu_load == pytest.approx(300 * 0.2 * MS, rel=1e-3)
    assert forecast.fpga_load == pytest.approx(300 * 2 * MS, rel=1e-3)


def test_cpu_seconds_are_those_of_the_rate_at_which_images_come() -> None:
    model = replace(MODEL, host=ByRate((10.0, 50.0), (1.0 * MS, 0.5 * MS)), work=ByRate((10.0, 50.0), (4 * MS, 3 * MS)))
    assert model.forecast(30.0, 0.5).cpu_load == pytest.approx(30 * (0.75 + 3.5) / 2 * MS, rel=1e-3)
    assert model.forecast(1.0, 0.5).cpu_load == pytest.approx(1 * (1.0 + 4.0) / 2 * MS, rel=1e-3)
    assert model.forecast(100.0, 0.5).cpu_load == pytest.approx(100 * (0.5 + 3.0) / 2 * MS, rel=1e-3)


def test_cheap_cpu_keeps_what_would_cost_more_to_send() -> None:
    cheap = replace(MODEL, cpu=ServiceTime.spread(0.05 * MS, 0.2), work=ByRate.always(0.05 * MS))
    assert cheap.best_share(300) == 0.0


def test_rate_above_the_fpga_is_shared() -> None:
    share = MODEL.best_share(700)
    assert 0.4 < share < 500 / 700
    assert MODEL.forecast(700, share).p99_s <= MODEL.deadline_s
    assert MODEL.forecast(700, 1.0).p99_s > MODEL.deadline_s


@pytest.mark.parametrize("rate_hz", [100.0, 450.0, 800.0])
def test_best_share_is_the_cheapest_of_all_that_keep_the_deadline(rate_hz: float) -> None:
    found = {share: MODEL.forecast(rate_hz, share) for share in SHARES}
    kept = [each.cpu_load for each in found.values() if each.p99_s <= MODEL.deadline_s and each.cpu_load < MODEL.cores]
    assert found[MODEL.best_share(rate_hz)].cpu_load == min(kept)


def test_unreachable_deadline_gives_the_share_that_comes_nearest() -> None:
    hasty = replace(MODEL, deadline_s=1 * MS)
    nearest = min(hasty.forecast(300, share).p99_s for share in SHARES)
    assert hasty.forecast(300, hasty.best_share(300)).p99_s == nearest
    assert math.isfinite(nearest)


def test_schedule_gives_less_to_the_fpga_as_the_rate_grows_beyond_it() -> None:
    schedule = MODEL.schedule()
    assert len(schedule.rates_hz) == len(RATES)
    assert schedule.at(1) == schedule.at(250) == 1.0
    assert 1.0 > schedule.at(600) > schedule.at(900) > 0
    assert schedule.at(1e6) == schedule.values[-1]
