"""The round-trip estimate learns, forgets and never starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.link import (
    HALF_LIFE_S,
    MOST_BUSY_MS,
    PRIOR_MS,
    ROOM,
    STEADY,
    TRIAL_ROOM,
    LinkEstimate,
)


def predicted(link: LinkEstimate, now: float) -> float:
    value = link.predict_ms(now)
    assert value is not None
    return value


def test_converges_to_a_steady_round_trip() -> None:
    link = LinkEstimate()
    for tick in range(200):
        link.succeeded(20.0, now=tick * 0.05)
    assert 20.0 <= predicted(link, 10.0) < 25.0


def test_what_is_expected_lies_below_what_is_hardly_exceeded_and_between_what_was_seen() -> None:
    link = LinkEstimate()
    for number in range(200):
        link.succeeded(60.0 if number % 2 else 120.0, number * 0.1)
    expected, predicted = link.expect_ms(20.0), link.predict_ms(20.0)
    assert expected is not None
    assert predicted is not None
    assert 60.0 < expected < 120.0 < predicted
    link.failed()
    assert link.expect_ms(20.0) is None


def test_a_link_that_keeps_no_deadline_is_tried_a_few_times_and_then_every_other_second() -> None:
    link, tried = LinkEstimate(), []
    for step in range(600):  # a minute; whoever tries waits for 80 ms in vain
        now = step * 0.1
        expected = link.expect_ms(now)
        if expected is not None and expected <= 80.0:
            tried.append(now)
            link.late(80.0, now)
    assert sum(now < 0.5 for now in tried) >= 3
    assert 15 <= sum(now >= 10.0 for now in tried) <= 60


def late_in_turn(link: LinkEstimate, waits_ms: list[float], now: float = 0.0) -> float:
    """Waits in vain, one after the other; when the last ended."""
    for wait_ms in waits_ms:
        now += wait_ms * 1e-3 + 0.001
        link.late(wait_ms, now)
    return now


def test_doubt_comes_with_late_tries_in_a_row_and_goes_with_several_in_time_and_not_by_itself() -> None:
    link = LinkEstimate()
    for _ in range(20):
        link.succeeded(20.0, 0.0)
    now = late_in_turn(link, [80.0] * 4)
    assert not link.doubts(80.0)
    now = late_in_turn(link, [80.0], now) + 1_000.0
    assert link.expect_ms(now) is not None
    assert link.doubts(80.0)
    needed = 0
    while link.doubts(80.0):
        link.succeeded(20.0, now)
        needed += 1
    assert 3 <= needed <= 6


def test_a_link_that_was_never_in_time_is_doubted_after_two_late_tries_and_one_that_was_after_more() -> None:
    link = LinkEstimate()
    now = late_in_turn(link, [80.0])
    assert not link.doubts(80.0)
    now = late_in_turn(link, [80.0], now)
    assert link.doubts(80.0)
    link.changed()
    link.succeeded(20.0, now)
    now = late_in_turn(link, [80.0] * 2, now)
    assert not link.doubts(80.0)
    late_in_turn(link, [80.0], now)
    assert link.doubts(80.0)


def test_doubt_is_about_waits_no_longer_than_those_in_vain() -> None:
    link = LinkEstimate()
    now = late_in_turn(link, [45.0] * 8)
    assert link.doubts(45.0)
    assert not link.doubts(90.0)
    for _ in range(20):
        link.succeeded(80.0, now)  # somebody with more time had it
    assert link.doubts(45.0)
    assert late_in_turn(link, [90.0], now)
    assert link.doubts(90.0)


def test_who_gave_up_waited_in_vain_whatever_came_afterwards() -> None:
    link = LinkEstimate()
    for ended in (0.1, 0.3):
        assert not link.doubts(80.0)
        link.gave_up(80.0, ended)
        link.succeeded(85.0, ended + 0.005, awaited=False)
    assert link.doubts(80.0)
    assert link.trial_ms == TRIAL_ROOM * 80.0
    assert link.mean_ms > PRIOR_MS, "the round trip was learned all the same"


def answered_in_turn(link: LinkEstimate, count: int, after_ms: float, within_ms: float, now: float = 0.0) -> float:
    """Answers that came after so long, one after the other; when the last did."""
    for _ in range(count):
        now += after_ms * 1e-3 + 0.001
        link.succeeded(after_ms, now, within_ms=within_ms)
    return now


def test_a_link_whose_answers_are_nearly_late_is_doubted_like_one_whose_answers_are_late() -> None:
    link = LinkEstimate()
    now = answered_in_turn(link, 1, 95.0, within_ms=100.0)
    assert not link.doubts(100.0)
    now = answered_in_turn(link, 1, 95.0, within_ms=100.0, now=now)
    assert link.doubts(100.0)
    assert not link.doubts(200.0), "whoever has more time has room"
    assert link.trial_ms == TRIAL_ROOM * 100.0
    answered_in_turn(link, 5, ROOM * 100.0, within_ms=100.0, now=now)
    assert not link.doubts(100.0)


def test_an_answer_with_room_to_spare_speaks_for_the_link_however_slow_it_is() -> None:
    link = LinkEstimate()
    answered_in_turn(link, 50, ROOM * 1_000.0, within_ms=1_000.0)
    assert not link.doubts(1_000.0)


SLOW_MS = 85.0
"""Too late to speak for a link that is given 100 ms, and early enough for a trial."""


def test_a_slow_link_that_keeps_every_deadline_is_trusted_in_the_end_until_it_does_not() -> None:
    link = LinkEstimate()
    now = answered_in_turn(link, STEADY - 1, SLOW_MS, within_ms=100.0)
    assert link.doubts(100.0)
    now = answered_in_turn(link, 1, SLOW_MS, within_ms=100.0, now=now)
    assert not link.doubts(100.0)
    now = answered_in_turn(link, 20, SLOW_MS, within_ms=100.0, now=now)
    assert not link.doubts(100.0)
    now = late_in_turn(link, [100.0], now)
    assert link.doubts(100.0)
    answered_in_turn(link, STEADY, SLOW_MS, within_ms=100.0, now=now)
    assert not link.doubts(100.0)


def test_where_one_in_ten_is_late_slow_answers_do_not_end_the_doubt() -> None:
    link, now = LinkEstimate(), 0.0
    for _ in range(20):
        now = late_in_turn(link, [100.0], now)
        now = answered_in_turn(link, STEADY - 1, SLOW_MS, within_ms=100.0, now=now)
    assert link.doubts(100.0)


def test_a_trial_that_would_be_too_late_for_who_has_a_little_less_time_ends_no_doubt() -> None:
    link = LinkEstimate()
    now = late_in_turn(link, [100.0] * 2)
    now = answered_in_turn(link, 2 * STEADY, TRIAL_ROOM * 100.0 + 1.0, within_ms=100.0, now=now)
    assert link.doubts(100.0)
    answered_in_turn(link, STEADY, TRIAL_ROOM * 100.0, within_ms=100.0, now=now)
    assert not link.doubts(100.0)


@pytest.mark.parametrize(("give_up_below", "doubted"), [(0.25, True), (0.0, False)])
def test_whoever_waits_until_the_deadline_in_any_case_needs_no_room(give_up_below: float, doubted: bool) -> None:
    link = LinkEstimate()
    link.set_give_up_below(give_up_below)
    answered_in_turn(link, 5, 95.0, within_ms=100.0)
    assert link.doubts(100.0) is doubted


def test_answers_that_were_nearly_late_together_count_as_one() -> None:
    link = LinkEstimate()
    for number in range(STEADY - 1):
        link.succeeded(95.0, 1.0 + 0.001 * number, within_ms=100.0)
    assert not link.doubts(100.0)


def test_what_came_of_a_wait_that_was_given_up_counts_once() -> None:
    link = LinkEstimate()
    link.gave_up(80.0, 0.1)
    link.late(92.0, 0.112, awaited=False)
    assert not link.doubts(80.0)
    assert link.trial_ms == TRIAL_ROOM * 80.0


def test_tries_that_were_late_together_count_as_one() -> None:
    link = LinkEstimate()
    for number in range(20):
        link.late(80.0, 0.001 * number)
    assert not link.doubts(80.0)


def test_a_busy_tier_lengthens_the_prediction_within_bounds_and_makes_no_doubt() -> None:
    link = LinkEstimate()
    before = predicted(link, 0.0)
    link.busy(0.0)
    assert predicted(link, 0.0) > before
    for _ in range(1_000):
        link.busy(0.0)
    assert link.mean_ms <= MOST_BUSY_MS
    assert not link.doubts(1.0)


def test_another_way_begins_without_doubt() -> None:
    link = LinkEstimate()
    late_in_turn(link, [80.0] * 8)
    link.changed()
    assert not link.doubts(1.0)


def test_one_bad_spell_does_not_starve_the_estimate() -> None:
    link = LinkEstimate()
    for tick in range(20):
        link.succeeded(5_000.0, now=tick * 0.1)
    assert predicted(link, 2.0) > 1_000.0
    # Nobody uploads any more, so nothing is learned; time alone must let the next request try.
    assert predicted(link, 2.0 + 12 * HALF_LIFE_S) < 3 * PRIOR_MS


def test_idle_time_does_not_make_a_good_link_look_worse() -> None:
    link = LinkEstimate()
    for tick in range(200):
        link.succeeded(5.0, now=tick * 0.01)
    assert predicted(link, 1_000.0) <= predicted(link, 2.0) + 1e-9


def test_asking_for_a_prediction_changes_nothing() -> None:
    link = LinkEstimate()
    link.succeeded(80.0, now=0.0)
    assert [predicted(link, 1.0) for _ in range(100)] == [predicted(link, 1.0)] * 100


def test_a_failed_link_is_left_alone_until_a_probe_gets_through() -> None:
    link = LinkEstimate()
    link.failed()
    assert link.predict_ms(1e6) is None
    link.restored()
    assert link.predict_ms(1e6) is not None


def test_a_late_answer_raises_the_prediction() -> None:
    link = LinkEstimate()
    before = predicted(link, 0.0)
    link.late(waited_ms=400.0, now=0.0)
    assert predicted(link, 0.0) > before


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 100), st.booleans()), max_size=50))
def test_any_history_leaves_a_finite_prediction(history: list[tuple[float, float, bool]]) -> None:
    link, now = LinkEstimate(), 0.0
    for round_trip_ms, pause, late in history:
        now += pause
        (link.late if late else link.succeeded)(round_trip_ms, now)
    assert 0.0 <= predicted(link, now) < 1e7
