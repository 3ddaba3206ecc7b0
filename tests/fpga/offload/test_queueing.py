"""Queueing formulas, held against simulation and against what is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpga.offload.queueing import (
    NO_WAITING,
    ServiceTime,
    one_server,
    quantile,
    several_servers,
)
from tests.fpga.offload.offload_world import queue_waits
from tests.fuzz.examples import examples

MS = 1e-3


def percentile(rate_hz: float, service: ServiceTime, servers: int, places: int | None, probability: float) -> float:
    waiting = several_servers(rate_hz, service, servers) if places is None else one_server(rate_hz, service, places)
    return quantile([(1.0, 0.0, waiting, ServiceTime.constant(0.0))], probability)


@pytest.mark.parametrize(
    ("rate_hz", "service", "servers", "places"),
    [
        (80, ServiceTime.constant(10 * MS), 1, None),
        (80, ServiceTime.spread(10 * MS, 0.5), 1, None),
        (120, ServiceTime.constant(10 * MS), 1, 8),
        (300, ServiceTime.constant(10 * MS), 1, 64),
        (10_000, ServiceTime.constant(10 * MS), 1, 8),
        (170, ServiceTime.constant(10 * MS), 2, None),
        (160, ServiceTime.spread(10 * MS, 0.5), 2, None),
        (320, ServiceTime.spread(10 * MS, 0.3), 4, None),
    ],
)
def test_waits_are_those_of_a_simulated_queue(
    rate_hz: float, service: ServiceTime, servers: int, places: int | None
) -> None:
    waits, taken = queue_waits(rate_hz, service, servers, places)
    close = 0.05 if servers == 1 else 0.1  # several servers are an approximation
    for probability in (0.9, 0.99):
        found = percentile(rate_hz, service, servers, places, probability)
        assert found == pytest.approx(np.quantile(waits, probability), rel=close)
    waiting = several_servers(rate_hz, service, servers) if places is None else one_server(rate_hz, service, places)
    assert waiting.mean_s == pytest.approx(waits.mean(), rel=close)
    assert waiting.taken == pytest.approx(taken, abs=0.005)


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0])
def test_mean_wait_is_that_of_pollaczek_and_khinchine(load: float, variation: float) -> None:
    service = ServiceTime.spread(4 * MS, variation)
    expected = load * service.mean_s * (1 + service.variation**2) / (2 * (1 - load))
    assert one_server(load / service.mean_s, service).mean_s == pytest.approx(expected, rel=0.01)


def test_single_place_loses_what_erlang_says() -> None:
    assert one_server(150, ServiceTime.constant(10 * MS), 1).taken == pytest.approx(1 / (1 + 1.5), rel=0.001)
    assert one_server(150, ServiceTime.constant(10 * MS), 1).mean_s == pytest.approx(0, abs=10 * MS / 8)


def test_overloaded_queue_never_answers_but_a_bounded_one_does() -> None:
    service = ServiceTime.constant(10 * MS)
    assert percentile(101, service, 1, None, 0.5) == math.inf
    assert percentile(250, service, 2, None, 0.5) == math.inf
    assert percentile(1000, service, 1, 4, 0.99) <= 3.1 * 10 * MS


def test_work_far_beyond_one_is_computed_without_overflow() -> None:
    waiting = one_server(4_000, ServiceTime.constant(1 * MS), 200)
    assert waiting.taken == pytest.approx(1 / 4, rel=0.001)
    assert np.isfinite(waiting.below).all()


def test_mixture_lies_between_its_parts_and_is_weighted() -> None:
    fast, slow = ServiceTime.constant(1 * MS), ServiceTime.constant(9 * MS)
    for share, probability, expected in ((0.97, 0.5, 1 * MS), (0.97, 0.99, 9 * MS), (0.995, 0.99, 1 * MS)):
        ways = [(share, 0.0, NO_WAITING, fast), (1 - share, 0.0, NO_WAITING, slow)]
        assert quantile(ways, probability) == pytest.approx(expected)


@given(st.floats(0.01, 3.0), st.floats(0.0, 1.5), st.integers(1, 40))
@settings(max_examples=examples(200), deadline=None)
def test_distributions_of_waits_rise_to_one_at_most(load: float, variation: float, places: int) -> None:
    service = ServiceTime.spread(1 * MS, variation)
    waiting = one_server(load / service.mean_s, service, places)
    assert (np.diff(waiting.below) >= -1e-12).all()
    assert waiting.below[-1] == pytest.approx(1.0)
    assert 0 < waiting.taken <= 1 + 1e-9
