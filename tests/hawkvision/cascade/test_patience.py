"""Waits end when hardly any answer that takes so long comes in time, and not before."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.link import LinkEstimate
from hawkvision.cascade.patience import GIVE_UP_BELOW, REMEMBERED, REMEMBERED_S, Patience, hope_for_rest

CUTOFF_MS = 90.0
QUICK_MS = (30.0, 35.0, 40.0, 50.0)


def after(answered: list[float], late: list[float], give_up_below: float = GIVE_UP_BELOW) -> Patience:
    patience = Patience(give_up_below)
    for ms in answered:
        patience.answered(ms, 0.0)
    for ms in late:
        patience.late(ms, 0.0)
    return patience


def test_who_knows_nothing_waits() -> None:
    assert Patience().worth_ms(CUTOFF_MS, 0.0) == CUTOFF_MS


def test_who_saw_only_late_answers_waits_for_doubt_is_not_its_affair() -> None:
    assert after([], [CUTOFF_MS] * 20).worth_ms(CUTOFF_MS, 0.0) == CUTOFF_MS


def test_where_answers_come_early_or_not_at_all_nobody_waits_beyond_the_early_ones() -> None:
    assert after([*QUICK_MS] * 5, [CUTOFF_MS] * 20).worth_ms(CUTOFF_MS, 0.0) <= QUICK_MS[-1]


def test_an_answer_that_came_after_the_cutoff_is_as_late_as_none() -> None:
    assert after([*([*QUICK_MS] * 5), *([CUTOFF_MS + 1] * 20)], []).worth_ms(CUTOFF_MS, 0.0) <= QUICK_MS[-1]


def test_where_answers_keep_coming_until_the_cutoff_everybody_waits_for_nearly_as_long() -> None:
    assert after([float(ms) for ms in range(30, 90)], [CUTOFF_MS] * 4).worth_ms(CUTOFF_MS, 0.0) > CUTOFF_MS - 3.0


def test_few_late_answers_are_no_evidence() -> None:
    assert after([*QUICK_MS], [CUTOFF_MS]).worth_ms(CUTOFF_MS, 0.0) == CUTOFF_MS


def test_those_who_could_not_wait_for_long_tell_nothing_about_longer_waits() -> None:
    assert after([*QUICK_MS] * 5, [CUTOFF_MS / 2] * 20).worth_ms(CUTOFF_MS, 0.0) == CUTOFF_MS


def test_no_hope_is_too_little_for_those_who_wait_in_any_case() -> None:
    assert after([*QUICK_MS] * 5, [CUTOFF_MS] * 40, give_up_below=0.0).worth_ms(CUTOFF_MS, 0.0) == CUTOFF_MS


def test_another_way_begins_with_full_patience() -> None:
    patience = after([*QUICK_MS] * 5, [CUTOFF_MS] * 20)
    patience.forget()
    assert patience.worth_ms(CUTOFF_MS, 0.0) == CUTOFF_MS


def test_what_a_link_was_like_a_minute_ago_says_nothing() -> None:
    patience = after([*QUICK_MS] * 5, [CUTOFF_MS] * 20)
    assert patience.worth_ms(CUTOFF_MS, REMEMBERED_S - 1.0) < CUTOFF_MS
    assert patience.worth_ms(CUTOFF_MS, REMEMBERED_S + 1.0) == CUTOFF_MS


def test_a_link_that_is_good_again_is_waited_for_again() -> None:
    patience = after([*QUICK_MS] * 5, [CUTOFF_MS] * 20)
    for number in range(REMEMBERED):
        patience.answered(30.0 + 50.0 * number / REMEMBERED, 0.0)  # nothing is late any more
    assert patience.worth_ms(CUTOFF_MS, 0.0) == CUTOFF_MS


@given(
    st.lists(st.tuples(st.floats(0.0, 200.0), st.booleans()), max_size=2 * REMEMBERED),
    st.floats(1.0, 150.0),
    st.floats(0.0, 0.99),
)
def test_a_wait_is_cut_only_where_hope_is_below_the_bar(
    waits: list[tuple[float, bool]], cutoff_ms: float, bar: float
) -> None:
    patience = Patience(bar)
    for ms, answered in waits:
        (patience.answered if answered else patience.late)(ms, 0.0)
    worth_ms = patience.worth_ms(cutoff_ms, 0.0)
    assert 0.0 <= worth_ms <= cutoff_ms
    if worth_ms < cutoff_ms:
        last = waits[-REMEMBERED:]
        came = sum(answered and worth_ms < ms <= cutoff_ms for ms, answered in last)
        late = sum(ms > cutoff_ms if answered else ms >= 0.8 * cutoff_ms for ms, answered in last)
        assert came <= bar * (came + late + 1.0)


def test_on_a_link_with_a_long_tail_most_of_what_is_given_up_would_have_been_late() -> None:
    rng, patience = random.Random(7), Patience()
    given_up, in_vain, saved_ms = 0, 0, 0.0
    for _ in range(5_000):
        held = rng.random() < 0.2
        round_trip_ms = 200.0 if held else rng.lognormvariate(3.9, 0.25)  # about 50 ms; one in five is held up
        worth_ms = patience.worth_ms(CUTOFF_MS, 0.0)
        if round_trip_ms > worth_ms < CUTOFF_MS:
            given_up += 1
            in_vain += round_trip_ms > CUTOFF_MS
            saved_ms += min(round_trip_ms, CUTOFF_MS) - worth_ms
        if round_trip_ms <= CUTOFF_MS:
            patience.answered(round_trip_ms, 0.0)
        else:
            patience.late(CUTOFF_MS, 0.0)
    assert given_up > 500
    assert in_vain > 0.75 * given_up
    assert saved_ms / given_up > 5.0


def test_the_rest_of_an_answer_must_be_more_likely_in_time_than_the_first_of_it() -> None:
    link = LinkEstimate()
    for patience in (link.patience, link.patience_for_rest):
        for ms in [20.0] * 6 + [25.0] * 4:
            patience.answered(ms, 0.0)
        for _ in range(8):
            patience.late(CUTOFF_MS, 0.0)
    assert link.patience.worth_ms(CUTOFF_MS, 0.0) == 25.0  # one in three of those still awaited came: enough for that
    assert link.patience_for_rest.worth_ms(CUTOFF_MS, 0.0) == 20.0


@given(st.floats(0.0, 0.99))
def test_whoever_waits_in_any_case_waits_for_the_rest_and_hope_stays_a_share(give_up_below: float) -> None:
    hope = hope_for_rest(give_up_below)
    assert give_up_below <= hope < 1.0
    assert (hope == 0.0) == (give_up_below == 0.0)
    link = LinkEstimate()
    link.set_give_up_below(give_up_below)
    assert link.patience_for_rest.give_up_below == hope
