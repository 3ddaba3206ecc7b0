"""The model of response times: what it says of links that are known, and the callers that it serves, in simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.network.response_time import MIN_ON_TIME_PROBABILITY, REMEMBERED, ResponseTimes
from tests.sim.response_time import Outcome, RoundTrip, simulate

DEADLINE_MS = 70.0


def taught(
    seen: Sequence[tuple[float, bool]], every_s: float = 1.0, p_min: float = MIN_ON_TIME_PROBABILITY
) -> ResponseTimes:
    """Round trips, and whether they were answered, one after the other; the last is over at `now`."""
    times = ResponseTimes(p_min)
    for number, (ms, answered) in enumerate(seen):
        now = every_s * (number + 1)
        (times.answered if answered else times.given_up)(times.sent(now - ms * 1e-3), ms, now)
    return times


def now_of(seen: Sequence[object], every_s: float = 1.0) -> float:
    return every_s * len(seen)


OBSERVATIONS = st.lists(st.tuples(st.floats(0.1, 500.0), st.booleans()), max_size=2 * REMEMBERED)


@given(OBSERVATIONS, st.floats(0.0, 1_000.0))
def test_probabilities_are_ones_and_waits_end_by_the_deadline(seen: list[tuple[float, bool]], within_ms: float) -> None:
    times = taught(seen)
    assert 0.0 <= times.on_time(within_ms, now_of(seen)) <= 1.0
    worth_ms = times.worth_ms(within_ms, now_of(seen))
    assert 0.0 <= worth_ms <= within_ms
    assert (worth_ms == 0.0) == (times.on_time(within_ms, now_of(seen)) < MIN_ON_TIME_PROBABILITY) or within_ms == 0.0


@pytest.mark.parametrize("of_four", [2, 3, 4])
def test_where_replies_on_time_and_late_ones_take_turns_it_is_their_share(of_four: int) -> None:
    seen = [*[(90.0, True)] * (4 - of_four), *[(30.0, True)] * of_four] * 16
    assert taught(seen, every_s=0.1).on_time(DEADLINE_MS, now_of(seen, 0.1)) == pytest.approx(of_four / 4, abs=0.1)


def test_who_gave_up_early_says_nothing_of_later_replies() -> None:
    """Of two callers one gives up after 20 ms; those that stay have their replies after 60."""
    seen = [(20.0, False), (60.0, True)] * 20
    assert taught(seen).on_time(DEADLINE_MS, now_of(seen)) > 0.9


def test_waiting_on_is_judged_by_those_who_waited_as_long() -> None:
    """One reply in four comes, and comes at once."""
    seen = [*([(DEADLINE_MS, False)] * 3), (5.0, True)] * 16
    times, now = taught(seen), now_of(seen)
    assert times.on_time(DEADLINE_MS, now) > 0.15
    assert times.worth_ms(DEADLINE_MS, now) == 5.0


def test_a_link_that_leaves_little_is_waited_for_to_the_end() -> None:
    seen = [(68.0, True), (69.5, True)] * 20
    assert taught(seen).worth_ms(DEADLINE_MS, now_of(seen)) == DEADLINE_MS


@pytest.mark.parametrize("before", [0, 1, 2, 5, 60])
def test_three_misses_in_a_row_end_the_waiting_over_a_new_link_and_over_a_good_one(before: int) -> None:
    good = [(30.0, True)] * before
    two, three = ([*good, *[(DEADLINE_MS, False)] * misses] for misses in (1, 3))
    assert taught(two).worth_ms(DEADLINE_MS, now_of(two)) > 0.0
    assert taught(three).worth_ms(DEADLINE_MS, now_of(three)) == 0.0


def test_a_miss_is_no_surprise_where_every_other_was() -> None:
    seen = [*[(30.0, True), (DEADLINE_MS, False)] * 20, *[(DEADLINE_MS, False)] * 3]
    assert taught(seen).worth_ms(DEADLINE_MS, now_of(seen)) == DEADLINE_MS


def test_one_reply_on_time_ends_a_run_of_misses() -> None:
    seen = [*[(30.0, True)] * 30, *[(DEADLINE_MS, False)] * 10, (30.0, True)]
    assert taught(seen).worth_ms(DEADLINE_MS, now_of(seen)) > 0.0


def test_what_was_late_for_some_is_unknown_to_those_with_twice_the_time() -> None:
    seen = [(DEADLINE_MS, False)] * 3
    times = taught(seen)
    assert times.worth_ms(1.9 * DEADLINE_MS, now_of(seen)) == 0.0
    assert times.worth_ms(2.1 * DEADLINE_MS, now_of(seen)) > 0.0


def test_with_a_probability_of_0_everybody_waits() -> None:
    seen = [(DEADLINE_MS, False)] * 50
    assert taught(seen, p_min=0.0).worth_ms(DEADLINE_MS, now_of(seen)) == DEADLINE_MS


def test_an_outage_is_forgotten_after_a_long_time_without_callers() -> None:
    seen = [(DEADLINE_MS, False)] * 3
    assert taught(seen).worth_ms(DEADLINE_MS, now_of(seen) + 3_600.0) > 0.0


def test_the_bound_is_that_of_rfc_6298() -> None:
    assert ResponseTimes().bound_ms() is None
    seen = [(40.0, True), (60.0, True)] * 30
    assert taught(seen).bound_ms() == pytest.approx(50.0 + 4.0 * 10.0, abs=2.0)


# ------------------------------------------------------------------------------------------------- simulations
# Links that only tests know: training profiles, none of which a benchmark reports on.


def share(on_time: float, quick_ms: float = 20.0, slow_ms: float = 65.0) -> RoundTrip:
    return lambda _, rng: rng.uniform(quick_ms, slow_ms) if rng.random() < on_time else math.inf


def outages(every_s: float, out_s: float) -> RoundTrip:
    return lambda now, rng: math.inf if now % every_s > every_s - out_s else rng.uniform(15.0, 50.0)


def over(link: RoundTrip, deadline_ms: float, rate_hz: float, seeds: int = 2) -> Outcome:
    """The sum over all seeds; of the misses in a row, the most."""
    found = [simulate(link, deadline_ms, rate_hz=rate_hz, callers=250, seed=seed) for seed in range(seeds)]
    return Outcome(
        callers=sum(each.callers for each in found),
        possible=sum(each.possible for each in found),
        both=sum(each.both for each in found),
        missed=sum(each.missed for each in found),
        missed_in_a_row=max(each.missed_in_a_row for each in found),
        probes=min(each.probes for each in found),
    )


def steady(*ms: float) -> RoundTrip:
    return lambda _, rng: rng.choice(ms)


def heavy_tail(median_ms: float, sigma: float) -> RoundTrip:
    return lambda _, rng: rng.lognormvariate(math.log(median_ms), sigma)


CALLERS = pytest.mark.parametrize(("deadline_ms", "rate_hz"), [(60.0, 1.0), (100.0, 10.0), (250.0, 30.0), (1e3, 5.0)])


def links_on_time(deadline_ms: float) -> list[RoundTrip]:
    """In 80 % of escalations or more."""
    d = deadline_ms
    two_humps: RoundTrip = lambda _, rng: rng.choice((0.1 * d, 0.85 * d, 0.1 * d, 0.85 * d, 3.0 * d, 0.2 * d))  # noqa: E731
    return [steady(0.83 * d, 0.88 * d), share(0.81, 0.3 * d, 0.9 * d), share(0.9, 0.7 * d, 0.9 * d), two_humps,
            heavy_tail(0.4 * d, 0.7)]  # fmt: skip


@CALLERS
def test_of_those_who_could_have_both_nearly_all_have(deadline_ms: float, rate_hz: float) -> None:
    for link in links_on_time(deadline_ms):
        found = over(link, deadline_ms, rate_hz)
        assert found.both >= 0.95 * found.possible > 0.7 * found.callers


@CALLERS
def test_three_callers_miss_on_a_link_that_is_never_on_time_and_probes_go_on(
    deadline_ms: float, rate_hz: float
) -> None:
    d = deadline_ms
    for link in (share(0.0), steady(1.1 * d, 4.0 * d)):
        found = over(link, deadline_ms, rate_hz)
        assert found.missed_in_a_row <= 3
        assert found.missed <= 6
        assert found.probes >= 5


@pytest.mark.parametrize(("every_s", "out_s"), [(25.0, 6.0), (20.0, 10.0), (10_000.0, 9_999.0)])
def test_three_callers_miss_in_each_outage_and_later_ones_are_admitted_again(every_s: float, out_s: float) -> None:
    """With fewer than one caller under way on average. If more are when an outage begins, all of them miss."""
    found = over(outages(every_s, out_s), DEADLINE_MS, 10.0, seeds=6)
    assert found.missed_in_a_row <= 3
    assert found.both >= 0.9 * found.possible


@CALLERS
@pytest.mark.parametrize(("on_time", "least"), [(0.2, 0.5), (0.3, 0.7), (0.5, 0.9), (0.7, 0.95)])
def test_between_most_of_those_who_could_have_both_have(
    on_time: float, least: float, deadline_ms: float, rate_hz: float
) -> None:
    found = over(share(on_time, 0.3 * deadline_ms, 0.9 * deadline_ms), deadline_ms, rate_hz)
    assert found.both >= least * found.possible


def test_requests_that_were_withdrawn_do_not_make_a_link_look_faster() -> None:
    """Replies take 50 or 150 ms in turns. Half of all requests are withdrawn after 100 ms, if they still wait."""
    times = ResponseTimes()
    for number in range(REMEMBERED):
        at, ms, withdrawn = 0.5 * number, (50.0, 150.0)[number % 2], number % 4 < 2
        request = times.sent(at)
        if withdrawn and ms > 100.0:
            times.cancelled(request, at + 0.1)
        else:
            times.answered(request, ms, at + ms * 1e-3)
    assert times.on_time(100.0, 0.5 * REMEMBERED) == pytest.approx(0.5, abs=0.07)


def test_withdrawing_a_request_that_has_ended_says_nothing() -> None:
    times = taught([(30.0, True)] * 8)
    request = times.sent(8.0)
    times.answered(request, 30.0, 8.03)
    before = times.on_time(DEADLINE_MS, 8.1)
    times.cancelled(request, 8.1)
    assert times.on_time(DEADLINE_MS, 8.1) == before


def test_leaving_later_loses_what_then_would_be_late() -> None:
    seen = [(60.0, True), *[(30.0, True)] * 3] * 16
    times, now = taught(seen), now_of(seen)
    assert times.gain(DEADLINE_MS, [30.0], now) == pytest.approx(0.25, abs=0.05)
    assert times.gain(DEADLINE_MS, [30.0, 20.0], now) == pytest.approx((0.25 + 1.0) / 2, abs=0.05)
    assert times.gain(DEADLINE_MS, [-10.0], now) == pytest.approx(times.on_time(DEADLINE_MS, now))
    assert times.gain(1_000.0, [900.0], now) == 0.0
    assert ResponseTimes().gain(DEADLINE_MS, [20.0], now) == 0.0, "of an unknown link nothing is expected"
