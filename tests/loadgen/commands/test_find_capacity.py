"""Capacity: the search, what a run means, searches of simulated servers, and some of a real one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.analysis.capacity import (
    STEP_DOWN,
    STEPS_DOWN,
    CapacityGoal,
    Confirmation,
    CountedAnswers,
    Failing,
    Probe,
    RateSearch,
    RateTrial,
    Standing,
    confirmation,
    counted,
    judge,
)
from loadgen.clients.engine import LoadJob, ServerAddress
from loadgen.commands.find_capacity import WARM_UP_S, Ask, CapacityOptions, find, job_of
from loadgen.commands.options import Setup
from loadgen.workload.dataset import Dataset
from loadgen.workload.record import RequestOutcome, TargetClass

# ------------------------------------------------------------------------------------------- the search


def searched(search: RateSearch, capacity: float, hiccup: int = -1) -> int:
    """Search a server that holds up to `capacity`, but for one hiccup among the probes; the number of probes."""
    probes = 0
    while (tried := search.next()) is not None:
        search.record(tried, tried.rate <= capacity and (tried.confirming or probes != hiccup))
        probes += not tried.confirming
    return probes


@given(st.floats(0.2, 1e5), st.floats(0.2, 1e4), st.floats(0.01, 0.5), st.integers(-1, 40))
def test_bracket_holds_the_capacity_whatever_hiccups(capacity: float, first: float, width: float, hiccup: int) -> None:
    search = RateSearch(first, width, 1e6, probes_left=200)
    searched(search, capacity, hiccup)
    assert search.low <= capacity < search.high
    assert search.high <= search.low * (1 + width) * (1 + 1e-9) or search.high < 0.2
    assert search.confirmed == (search.low or None)


@given(st.floats(0.2, 1e5), st.integers(1, 20))
def test_search_ends_after_its_probes(capacity: float, most: int) -> None:
    search = RateSearch(8.0, 0.001, 1e6, probes_left=most)
    assert searched(search, capacity) <= most
    assert search.low <= capacity < search.high


def test_no_rate_beyond_the_generators_own_is_tried() -> None:
    search = RateSearch(8.0, 0.05, 100.0, probes_left=50)
    assert searched(search, capacity=1e9) == 5  # 8, 16, 32, 64, 100
    assert (search.confirmed, search.high) == (100.0, math.inf)


def test_rate_counts_as_failed_only_the_second_time() -> None:
    search = RateSearch(8.0, 0.05, 1e6, probes_left=9)
    search.record(RateTrial(8.0), held=False)
    assert (search.next(), search.high) == (RateTrial(8.0, again=True), math.inf)
    search.record(RateTrial(8.0, again=True), held=False)
    assert (search.next(), search.high) == (RateTrial(4.0), 8.0)


def test_rate_that_only_probes_found_is_stepped_down_from_until_one_is_confirmed() -> None:
    search = RateSearch(8.0, 0.05, 1e6, probes_left=1)
    search.record(RateTrial(8.0), held=True)
    assert search.next() == RateTrial(8.0, confirming=True)
    search.record(RateTrial(8.0, confirming=True), held=False)
    assert search.next() == RateTrial(STEP_DOWN * 8.0, confirming=True)
    search.record(RateTrial(STEP_DOWN * 8.0, confirming=True), held=True)
    assert (search.next(), search.confirmed, search.high) == (None, STEP_DOWN * 8.0, 8.0)


def test_steps_down_end() -> None:
    search = RateSearch(8.0, 0.05, 1e6, probes_left=1)
    while (tried := search.next()) is not None:
        search.record(tried, held=not tried.confirming)
    assert (search.confirmed, len(search.refuted)) == (None, 1 + STEPS_DOWN)


# ------------------------------------------------------------------------------------------- one run


def outcomes(latency_ms: float, status: int, n: int, right: bool | None = None) -> list[RequestOutcome]:
    return [RequestOutcome(0.0, 0.001, latency_ms / 1e3, 0, image, status, right=right) for image in range(n)]


def answers(*parts: list[RequestOutcome], labelled: bool = False) -> CountedAnswers:
    return counted([each for part in parts for each in part], 0.0, 1.0, labelled=labelled)


def judged(
    got: CountedAnswers, p99_ms: float, min_accuracy: float | None = None, least: CountedAnswers | None = None
) -> Probe:
    return judge(RateTrial(1.0), got, CapacityGoal(p99_ms, min_accuracy), least)


def test_probe_holds_when_ninety_nine_of_a_hundred_are_in_time() -> None:
    assert judged(answers(outcomes(10, 200, 995), outcomes(500, 200, 5)), 20.0).held
    late = judged(answers(outcomes(10, 200, 980), outcomes(500, 200, 20)), 20.0)
    assert (late.held, late.failing) == (False, [Failing.P99])


def test_accuracy_is_of_all_requests() -> None:
    mixed = answers(outcomes(1, 200, 90, True), outcomes(1, 200, 9, False), outcomes(1, 429, 1), labelled=True)
    assert judged(mixed, 20.0).accuracy == 0.9


def test_no_outcomes_hold_nothing() -> None:
    assert not judged(answers(), 20.0).held
    assert not judged(answers(labelled=True), 20.0, 0.5).held


@pytest.mark.parametrize(
    ("right", "wanted", "standing", "held"),
    [
        (950, 0.90, Standing.SHOWN, True),
        (910, 0.90, Standing.KEPT, True),
        (890, 0.90, Standing.CHANCE, True),
        (850, 0.90, Standing.MISSED, False),
    ],
)
def test_accuracy_fails_a_rate_only_when_chance_does_not_explain_it(
    right: int, wanted: float, standing: Standing, held: bool
) -> None:
    got = answers(outcomes(1, 200, 1000, True)[:right], outcomes(1, 200, 1000, False)[right:], labelled=True)
    accuracy = got.accuracy()
    assert accuracy is not None
    assert CapacityGoal(20.0, wanted).standing(accuracy) is standing
    assert judged(got, 20.0, wanted).held is held


def test_images_lost_to_load_fail_a_rate_that_chance_would_excuse() -> None:
    unloaded = answers(outcomes(1, 200, 300, True)[:276], outcomes(1, 200, 300, False)[276:], labelled=True)
    loaded = answers(outcomes(1, 200, 300, True)[:264], outcomes(1, 200, 300, False)[264:], labelled=True)
    assert judged(loaded, 20.0, 0.9).held
    assert judged(loaded, 20.0, 0.9, least=unloaded).failing == [Failing.ACCURACY]
    assert judged(loaded, 20.0, 0.9, least=loaded).held  # as wrong without load: its images are to blame


def test_confirmation_says_how_sure_its_p99_is_and_that_its_time_was_cut() -> None:
    rng = np.random.default_rng(3)
    waits = rng.exponential(20.0, 700).tolist()
    got = counted(
        [RequestOutcome(at / 700, 0.0, at / 700 + ms / 1e3, 0, 0, 200) for at, ms in enumerate(waits)],
        0.0,
        1.0,
        labelled=False,
    )
    run = confirmation(7.0, got, CapacityGoal(100.0, None), 1000, seed=0)
    assert run.p99_low is not None
    assert run.p99_ms is not None
    assert run.p99_high is not None
    assert run.p99_low <= run.p99_ms <= run.p99_high
    assert run.p99_low <= 20.0 * math.log(100) <= run.p99_high
    assert (run.n, run.wanted, run.few, run.standing) == (700, 1000, True, None)


def test_p99_that_unanswered_requests_may_reach_has_no_end() -> None:
    run = confirmation(
        7.0, answers(outcomes(1, 200, 992), outcomes(1, 503, 8)), CapacityGoal(100.0, None), 1000, seed=0
    )
    assert (run.p99_ms, run.p99_high) == (1.0, None)


# ------------------------------------------------------------------------------------------- simulated servers

SERVICE_S = 0.02
SATURATION = 1.0 / SERVICE_S
BELOW, ABOVE = 1.5, 1.25
"""Factors within which the true capacity is found, whatever the seed: probably too low rather than too high."""


def setup_of(seed: int, targets: int = 1) -> Setup:
    dataset = Dataset("simulated", [b""] * 2000, tuple(range(2000)), (0,) * 2000)
    classes = [TargetClass({"n": str(n)}, 1 / targets) for n in range(targets)]
    return Setup(ServerAddress("http://simulated"), dataset, classes, 1, 512, seed)


def always(_: float, __: int) -> bool:
    return True


def queue(right: Callable[[float, int], bool] = always, service_s: float = SERVICE_S) -> Ask:
    """One worker, first come first served, each request as long as the other: M/D/1, saturated at 1 / `service_s`.

    `right` is given the rate and the image.
    """

    async def ask(job: LoadJob) -> tuple[list[RequestOutcome], bool]:
        rate = len(job.due) / job.duration_s
        free_s = 0.0
        found = []
        for due_s, image in zip(job.due, job.image, strict=True):
            free_s = max(free_s, due_s) + service_s
            found.append(RequestOutcome(due_s, due_s, free_s, 0, image, 200, right=right(rate, image)))
        return found, False

    return ask


def result(
    ask: Ask, p99_ms: float, min_accuracy: float | None = None, seed: int = 0
) -> tuple[RateSearch, list[Probe], Confirmation | None]:
    """The search, its runs, and the figures of the last that was to confirm a rate."""

    async def scenario() -> list[tuple[Probe, Confirmation | None]]:
        given = CapacityOptions(url="http://simulated", p99_ms=p99_ms, min_accuracy=min_accuracy)
        return [each async for each in find(search, setup_of(seed), given, ask)]

    search = RateSearch(8.0, 0.05, 1e4, 24)
    found = asyncio.run(scenario())
    confirmations = [each for _, each in found if each is not None]
    return search, [probe for probe, _ in found], confirmations[-1] if confirmations else None


def long_run_p99_ms(rate: float) -> float:
    """Of M/D/1, by a run so long that chance has no say (Lindley's recursion, as a running maximum)."""
    n = 400_000
    due = np.cumsum(np.random.default_rng(1).exponential(1 / rate, n))
    work = SERVICE_S * np.arange(1, n + 1)
    done = work + np.maximum.accumulate(due - (work - SERVICE_S))
    return float(np.quantile(done - due, 0.99) * 1e3)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("p99_ms", [60.0, 100.0, 250.0])
def test_capacity_of_a_queue_is_found_within_a_factor(seed: int, p99_ms: float) -> None:
    search, _, run = result(queue(), p99_ms, seed=seed)
    assert search.confirmed is not None
    assert long_run_p99_ms(search.confirmed / ABOVE) <= p99_ms
    assert search.confirmed * BELOW >= SATURATION or long_run_p99_ms(search.confirmed * BELOW) > p99_ms
    assert run is not None
    assert (run.rate, run.n >= 1000) == (search.confirmed, True)
    assert run.p99_ms is not None
    assert run.p99_ms <= p99_ms


@pytest.mark.parametrize("seed", range(8))
def test_rate_above_saturation_is_not_a_capacity_however_loose_the_p99(seed: int) -> None:
    search, _, _ = result(queue(), 60_000.0, seed=seed)
    assert search.confirmed is not None
    assert SATURATION / BELOW <= search.confirmed <= 1.05 * SATURATION


def test_server_that_is_too_slow_alone_has_no_capacity() -> None:
    search, probes, run = result(queue(), 19.0)
    assert (search.confirmed, search.low, run) == (None, 0.0, None)
    assert all(probe.failing[0] is Failing.P99 for probe in probes)


@pytest.mark.parametrize("seed", range(8))
def test_capacity_is_where_load_begins_to_cost_the_accuracy_wanted(seed: int) -> None:
    """From 20 requests per second on, ever more of the 92 % are answered wrong; at 30 it is 86 %."""

    def right(rate: float, image: int) -> bool:
        spared = np.random.default_rng(image).random()
        return bool(spared < 0.92 - max(0.0, rate - 20.0) * 0.006)

    search, probes, _ = result(queue(right, service_s=0.001), 1000.0, 0.89, seed)
    assert search.confirmed is not None
    assert 25.0 / 1.4 <= search.confirmed <= 25.0 * 1.4
    assert any(Failing.ACCURACY in probe.failing for probe in probes)


@pytest.mark.parametrize("seed", range(8))
def test_accuracy_that_chance_puts_below_the_goal_costs_no_capacity(seed: int) -> None:
    """A server whose true accuracy is the goal: half of all samples of its images are worse."""

    def right(_: float, image: int) -> bool:
        return bool(np.random.default_rng(image).random() < 0.85)

    search, _, run = result(queue(right), 100.0, 0.85, seed)
    without, _, _ = result(queue(), 100.0, seed=seed)
    assert run is not None
    assert run.standing in (Standing.KEPT, Standing.CHANCE)
    assert search.confirmed == without.confirmed


def test_slow_rates_are_confirmed_by_what_fits_the_time_and_say_so() -> None:
    search, _, run = result(queue(service_s=0.5), 2500.0, seed=1)
    assert search.confirmed is not None
    assert search.confirmed < 2.0
    assert run is not None
    assert (run.seconds, run.n < 1000, run.wanted) == (180.0, True, 1000)


def test_all_runs_send_the_same_images_for_the_same_targets() -> None:
    tries = [RateTrial(8.0), RateTrial(50.0), RateTrial(8.0, again=True), RateTrial(31.0, confirming=True)]
    sent = []
    for job in (job_of(each, 40.0, setup_of(seed=5, targets=3)) for each in tries):
        first = sum(due < WARM_UP_S for due in job.due)
        sent.append(list(zip(job.image[first:], job.target[first:], strict=True))[:300])
        assert job.due == sorted(job.due)
        assert len(job.due) == len(job.image) == len(job.target)
    assert all(each == sent[0] for each in sent)
    assert {target for _, target in sent[0]} == {0, 1, 2}


def test_repeats_and_confirming_runs_have_arrivals_of_their_own() -> None:
    tries = (RateTrial(8.0), 40.0), (RateTrial(8.0, again=True), 40.0), (RateTrial(10.0), 32.0)
    first, again, other = (job_of(tried, seconds, setup_of(seed=5)).due for tried, seconds in tries)
    assert not set(first) & set(again)
    scaled = [(due - WARM_UP_S) * 8.0 / 10.0 for due in first if due > WARM_UP_S]
    assert [due - WARM_UP_S for due in other if due > WARM_UP_S] == pytest.approx(scaled)


def test_interrupt_ends_the_search_and_what_is_known_stays() -> None:
    whole = queue()
    runs = iter(range(1000))

    async def ask(job: LoadJob) -> tuple[list[RequestOutcome], bool]:
        found, _ = await whole(job)
        return (found, False) if next(runs) < 2 else (found[:200], True)

    search, probes, _ = result(ask, 1000.0)
    assert [(probe.held, probe.interrupted) for probe in probes] == [(True, False)] * 2 + [(False, True)]
    assert (search.low, search.confirmed) == (16.0, None)
