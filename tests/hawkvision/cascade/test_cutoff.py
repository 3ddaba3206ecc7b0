"""The margin before a deadline follows how late the waits end."""

from __future__ import annotations

import random

import pytest

from hawkvision.cascade.cutoff import FIRST_OVERRUN_MS, KEPT, MOST, OUTSIDE_MS, Cutoffs
from hawkvision.core.clock import Deadline

NOW = 1_000.0


def margin_ms(cutoffs: Cutoffs, deadline_ms: float) -> float:
    return deadline_ms - cutoffs.before(deadline_ms, NOW).remaining_ms(NOW)


def wait(cutoffs: Cutoffs, overrun_ms: float) -> bool:
    """One wait that ends so long after its cutoff, and whether its answer is late for a deadline of 100 ms."""
    cutoff = cutoffs.before(100.0, NOW)
    ended = cutoff.at + overrun_ms * 1e-3
    cutoffs.waited(cutoff, ended)
    return ended + OUTSIDE_MS * 1e-3 > NOW + 0.1


def test_before_the_first_wait_the_margin_is_a_guess() -> None:
    assert margin_ms(Cutoffs(), 100.0) == pytest.approx(FIRST_OVERRUN_MS + OUTSIDE_MS)


@pytest.mark.parametrize("mean_ms", [0.2, 2.0, 5.0])
def test_a_few_percent_of_the_waits_end_late_whatever_the_timer_is_like(mean_ms: float) -> None:
    cutoffs, chance = Cutoffs(), random.Random(7)
    late = [wait(cutoffs, chance.expovariate(1.0 / mean_ms)) for _ in range(2_000 + KEPT)]
    assert 0.005 < sum(late[KEPT:]) / 2_000 < 0.04


def test_one_wait_that_ends_very_late_changes_little() -> None:
    cutoffs = Cutoffs()
    for _ in range(KEPT):
        wait(cutoffs, 1.0)
    wait(cutoffs, 60.0)
    assert margin_ms(cutoffs, 100.0) == pytest.approx(1.0 + OUTSIDE_MS)


def test_a_wait_that_ends_before_its_cutoff_says_nothing() -> None:
    cutoffs = Cutoffs()
    for _ in range(KEPT):
        cutoffs.waited(Deadline(NOW), NOW - 0.03)
    assert margin_ms(cutoffs, 100.0) == pytest.approx(FIRST_OVERRUN_MS + OUTSIDE_MS)


@pytest.mark.parametrize("deadline_ms", [2.0, 20.0, 100.0])
def test_however_late_timers_are_most_of_the_deadline_is_for_the_datacenter(deadline_ms: float) -> None:
    cutoffs = Cutoffs()
    for _ in range(KEPT):
        wait(cutoffs, 500.0)
    assert margin_ms(cutoffs, deadline_ms) == pytest.approx(MOST * deadline_ms)
