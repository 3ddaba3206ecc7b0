"""The circuit breaker: its states, and when a probe is due."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hawkvision.network.circuit_breaker import GROWTH, LONGEST_INTERVAL_S, BreakerState, CircuitBreaker
from hawkvision.network.response_time import ResponseTimes

DEADLINE_MS = 100.0


def late(breaker: CircuitBreaker, now: float, *, probe: bool = False) -> None:
    breaker.times.given_up(breaker.times.sent(now - DEADLINE_MS * 1e-3), DEADLINE_MS, now, probe=probe)


def on_time(breaker: CircuitBreaker, now: float) -> None:
    breaker.times.answered(breaker.times.sent(now - 0.01), 10.0, now)


@pytest.fixture
def opened() -> CircuitBreaker:
    """At 3 s, after three misses, and one caller that was refused."""
    breaker = CircuitBreaker(ResponseTimes())
    for now in (1.0, 2.0, 3.0):
        assert breaker.admits(DEADLINE_MS, now)
        late(breaker, now)
    assert not breaker.admits(DEADLINE_MS, 3.0)
    return breaker


def test_misses_open_it_a_probe_half_opens_it_and_a_reply_closes_it(opened: CircuitBreaker) -> None:
    states = [opened.state(3.0)]
    assert opened.begin_probe(3.0)
    states.append(opened.state(3.0))
    on_time(opened, 3.1)
    opened.end_probe(3.1)
    states.append(opened.state(3.1))
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
    assert opened.admits(DEADLINE_MS, 3.1)


def test_missed_probes_repeat_one_at_a_time_at_growing_intervals(opened: CircuitBreaker) -> None:
    now, begun = 3.0, []
    while now < 1_000.0:
        if opened.begin_probe(now):
            assert not opened.begin_probe(now)
            begun.append(now)
            late(opened, now + DEADLINE_MS * 1e-3, probe=True)
            opened.end_probe(now + DEADLINE_MS * 1e-3)
            assert opened.state(now + DEADLINE_MS * 1e-3) is BreakerState.OPEN
        now += 0.005
    gaps = [then - at for at, then in pairwise(begun)]
    assert begun[0] == 3.0
    assert gaps[0] == pytest.approx(DEADLINE_MS * 1e-3, abs=0.01), "the first as soon as one is over"
    assert gaps[-1] == pytest.approx(LONGEST_INTERVAL_S, abs=0.01)
    assert all(earlier - 0.01 < later < GROWTH * earlier + 0.01 for earlier, later in pairwise(gaps))


def test_without_a_connection_it_is_open_and_needs_no_probe() -> None:
    breaker = CircuitBreaker(ResponseTimes())
    breaker.connected = False
    assert not breaker.admits(DEADLINE_MS, 1.0)
    assert breaker.state(1.0) is BreakerState.OPEN
    assert not breaker.begin_probe(1.0)
    breaker.connected = True
    assert breaker.state(1.0) is BreakerState.CLOSED


def test_it_is_closed_for_callers_with_much_more_time(opened: CircuitBreaker) -> None:
    assert opened.admits(5 * DEADLINE_MS, 3.0)
    assert opened.state(3.0) is BreakerState.CLOSED
    assert opened.longest_ms == 5 * DEADLINE_MS
    assert not opened.admits(DEADLINE_MS, 3.0)


def test_no_caller_waits_without_remaining_time() -> None:
    breaker = CircuitBreaker(ResponseTimes())
    assert breaker.admits(DEADLINE_MS, 0.0), "an unknown link is worth a wait"
    assert not breaker.admits(0.0, 0.0)
    assert not breaker.admits(-5.0, 0.0)
    assert breaker.longest_ms == DEADLINE_MS


def test_a_reply_to_a_request_from_before_a_failure_does_not_say_that_the_link_works_again() -> None:
    breaker = CircuitBreaker(ResponseTimes())
    breaker.failed(2.0)
    breaker.replied(1.0)
    assert breaker.state(2.0) is BreakerState.OPEN
    breaker.replied(2.5)
    assert breaker.state(3.0) is BreakerState.CLOSED
