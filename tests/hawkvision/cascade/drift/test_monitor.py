"""The log of audited outcomes: alarms that are rarely false, that no caller raises alone, that only evidence lifts."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.drift.monitor import (
    BLOCK,
    LEAST_RETURN,
    LOG,
    MOST_CALLERS,
    RECENT,
    Claim,
    Claims,
    Coverage,
    Monitor,
    MonitorState,
)

FAST = Claim(-math.inf, 0.05)
CLAIMS = Claims("profile", "edge", (FAST, Claim(0.3, 0.02), Claim(0.7, 0.005)), 0.05)


def feed(monitor: Monitor, rng: random.Random, outcomes: int, times: float, callers: tuple[str, ...] = ("a",)) -> int:
    """Outcomes of uniform scores whose disagreement is `times` what is claimed; how many there were until a change."""
    before = monitor.suspended
    for number in range(outcomes):
        score = rng.random()
        # P(score ≥ τ and differs): 0.05, 0.02 and 0.005 at the three thresholds.
        chance = 0.03 / 0.3 if score < 0.3 else 0.015 / 0.4 if score < 0.7 else 0.005 / 0.3
        monitor.record(score, rng.random() < times * chance, callers[number % len(callers)])
        if monitor.suspended != before:
            return number + 1
    return outcomes


def suspended(shared: bool = False) -> Monitor:
    monitor = Monitor(CLAIMS, shared=shared)
    monitor.suspend()
    return monitor


@pytest.mark.parametrize(("times", "within"), [(100.0, 40), (4.0, 400), (2.0, 2_500)])
def test_a_reference_that_disagrees_more_than_claimed_raises_the_alarm(times: float, within: int) -> None:
    for seed in range(5):
        monitor, rng = Monitor(CLAIMS, shared=False), random.Random(seed)
        feed(monitor, rng, 500, 0.5)
        assert not monitor.suspended
        assert feed(monitor, rng, within, times) < within, f"seed {seed}"


def test_traffic_on_the_very_bounds_raises_false_alarms_no_oftener_than_stated() -> None:
    alarms = 0
    for seed in range(60):
        monitor = Monitor(CLAIMS, shared=False)
        alarms += feed(monitor, random.Random(seed), 2_000, 1.0) < 2_000
    assert alarms <= 3  # 5 % of 60, in half as many outcomes as the bound is about


# --------------------------------------------------------------------------------------------------------- callers


@pytest.mark.parametrize("callers", [("mallory",), ("mallory", "marvin")])
def test_fewer_than_three_callers_raise_no_alarm_in_a_shared_log_whatever_they_send(callers: tuple[str, ...]) -> None:
    monitor, rng = Monitor(CLAIMS, shared=True), random.Random(1)
    feed(monitor, rng, 300, 0.3, tuple(f"camera {i}" for i in range(10)))
    for number in range(2_000):
        monitor.record(rng.random(), True, callers[number % len(callers)])
    assert not monitor.suspended


def test_three_callers_do() -> None:
    monitor = Monitor(CLAIMS, shared=True)
    assert feed(monitor, random.Random(1), 200, 100.0, ("a", "b", "c")) < 200


def test_callers_beyond_the_limit_count_as_one() -> None:
    monitor = Monitor(CLAIMS, shared=True)
    for number in range(MOST_CALLERS):
        for _ in range(4):
            monitor.record(0.9, False, f"camera {number}")
    for number in range(1_000):
        monitor.record(0.9, True, f"mallory {number}")
    assert not monitor.suspended
    assert len(monitor.state.callers) == MOST_CALLERS


def test_the_log_is_bounded() -> None:
    monitor = Monitor(CLAIMS, shared=True)
    for number in range(LOG + 1_000):
        monitor.record(0.5, False, str(number))
    assert len(monitor.state.outcomes) <= 2 * LOG
    assert len(monitor.state.callers) <= MOST_CALLERS
    assert len(msgspec.json.encode(monitor.state)) < 12_000


# ----------------------------------------------------------------------------------------------------- the return


def test_an_alarm_is_lifted_by_outcomes_that_show_the_claim_to_hold_and_by_a_stated_number_at_least() -> None:
    monitor = Monitor(CLAIMS, shared=False)
    assert feed(monitor, random.Random(2), 500, 100.0) < 500
    assert LEAST_RETURN <= feed(monitor, random.Random(3), LOG, 0.1) < LOG


def test_traffic_that_goes_on_disagreeing_stays_suspended() -> None:
    for seed in range(5):
        monitor = suspended()
        assert feed(monitor, random.Random(seed), LOG, 1.0) == LOG, f"seed {seed}"


def test_a_long_bad_spell_does_not_delay_the_return() -> None:
    short, long = suspended(), suspended()
    feed(long, random.Random(4), 1_000, 20.0)
    delays = [feed(monitor, random.Random(5), LOG, 0.05) for monitor in (short, long)]
    assert delays[1] <= 2 * delays[0]


@pytest.mark.parametrize("shared", [False, True])
def test_one_caller_of_three_does_not_lift_an_alarm_of_all(shared: bool) -> None:
    monitor = suspended(shared)
    for number in range(1_000):
        monitor.record(0.9, False, "mallory")
        if number in (0, 1):
            monitor.record(0.9, True, ("alice", "bob")[number])
    assert monitor.suspended is shared


# --------------------------------------------------------------------------------------------------------- state


def test_a_restored_monitor_goes_on_as_if_nothing_had_happened() -> None:
    first = Monitor(CLAIMS, shared=True)
    feed(first, random.Random(6), 300, 1.0, ("a", "b", "c"))
    second = Monitor(CLAIMS, shared=True)
    assert second.restore(msgspec.json.decode(msgspec.json.encode(first.state), type=MonitorState))
    for monitor in (first, second):
        feed(monitor, random.Random(7), 500, 8.0, ("a", "b", "c"))
    assert second.state == first.state
    assert first.state.alarms >= 1


@pytest.mark.parametrize(
    "state",
    [
        MonitorState("another"),
        MonitorState(CLAIMS.key, failed=3),
        MonitorState(CLAIMS.key, bytearray(b"\0")),
        MonitorState(CLAIMS.key, bytearray(b"\1\0")),
        MonitorState(CLAIMS.key, bytearray(b"\0\x09")),
    ],
)
def test_a_state_that_this_monitor_cannot_have_is_left_alone(state: MonitorState) -> None:
    monitor = Monitor(CLAIMS, shared=True)
    assert not monitor.restore(state)
    assert monitor.state == MonitorState(CLAIMS.key)


# ------------------------------------------------------------------------------------------------------ coverage


@given(st.lists(st.sampled_from([Coverage.NOT_DUE, Coverage.COMPLETED, Coverage.MISSED]), max_size=1_500))
def test_coverage_is_of_the_last_answers(outcomes: list[int]) -> None:
    coverage = Coverage()
    for outcome in outcomes:
        coverage.add(outcome)
    recent = np.array(outcomes[-RECENT:])
    due, completed = int((recent != Coverage.NOT_DUE).sum()), int((recent == Coverage.COMPLETED).sum())
    assert (coverage.due, coverage.completed) == (due, completed)
    assert coverage.enough == (2 * completed >= due)


# ---------------------------------------------------------------------------------------- answers that differ in part


def feed_fractions(monitor: Monitor, rng: random.Random, outcomes: int, times: float) -> int:
    """As `feed`, but an answer that differs does so by a fraction, and oftener, so that the mean is the same."""
    before = monitor.suspended
    for number in range(outcomes):
        score = rng.random()
        chance = 0.03 / 0.3 if score < 0.3 else 0.015 / 0.4 if score < 0.7 else 0.005 / 0.3
        differs = rng.random() < min(1.0, 2.0 * times * chance)
        monitor.record(score, rng.random() if differs else 0.0)
        if monitor.suspended != before:
            return number + 1
    return outcomes


def test_disagreements_in_part_on_the_very_bounds_raise_false_alarms_no_oftener_than_stated() -> None:
    alarms = sum(
        feed_fractions(Monitor(CLAIMS, shared=False), random.Random(seed), 1_500, 1.0) < 1_500 for seed in range(40)
    )
    assert alarms <= 2  # 5 % of 40


def test_more_disagreement_in_part_than_claimed_raises_the_alarm() -> None:
    for seed in range(4):
        monitor, rng = Monitor(CLAIMS, shared=False), random.Random(seed)
        feed_fractions(monitor, rng, 300, 0.5)
        assert not monitor.suspended
        assert feed_fractions(monitor, rng, 600, 4.0) < 600, f"seed {seed}"


def test_small_disagreements_restore_a_guarantee_and_those_at_the_limit_do_not() -> None:
    monitor = Monitor(Claims("p", "edge", (Claim(-math.inf, 0.3),), 0.05), shared=False)
    monitor.suspend()
    for _ in range(400):
        monitor.record(0.5, 0.3)
    assert monitor.suspended
    for _ in range(400):
        monitor.record(0.5, 0.02)
    assert not monitor.suspended


def test_a_log_of_fractions_survives_a_restart_and_a_damaged_one_is_refused() -> None:
    monitor = Monitor(CLAIMS, shared=True)
    for number, disagreement in enumerate((0.0, 1.0, 0.25, 0.0, 0.75)):
        monitor.record(0.5, disagreement, f"caller {number}")
    kept = msgspec.json.decode(msgspec.json.encode(monitor.state), type=MonitorState)
    again = Monitor(CLAIMS, shared=True)
    assert again.restore(kept)
    assert again.state == monitor.state
    assert again.state.disagreements == 2.0
    bets = monitor._alarm_bets
    np.testing.assert_array_equal(again._evidence(*bets, math.inf), monitor._evidence(*bets, math.inf))
    kept.fractions.append(0)
    assert not Monitor(CLAIMS, shared=True).restore(kept)


def test_logs_stay_bounded_and_their_fractions_stay_beside_their_outcomes() -> None:
    monitor, rng = Monitor(Claims("p", "edge", (Claim(-math.inf, 0.5),), 0.05), shared=False), random.Random(1)
    for _ in range(LOG + 3 * BLOCK):
        monitor.record(rng.random(), 0.4 * rng.random())
    assert len(monitor.state.fractions) == len(monitor.state.outcomes) <= 2 * LOG
