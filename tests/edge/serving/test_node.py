"""One node in this process, on a backend that works only when told to: deadlines, busy edges, callers that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edge.escalation.client import DatacenterClient
from hawkvision.cascade.cutoff import FIRST_OVERRUN_MS
from hawkvision.core.errors import DeadlineMissed, Overloaded
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    DegradedReason,
    MaxAccuracyDrop,
    OnMiss,
    Quality,
    Reason,
    StatusReason,
    Tier,
)
from hawkvision.servers.bodies import CallerGone
from tests.edge.bench import SURE, UNSURE, Bench, bench, hardly_ever_later_than, known, misses, run
from tests.edge.peer import Peer
from tests.waiting import until


def test_sure_answers_stay_and_unsure_ones_go(large: Peer) -> None:
    async def scenario() -> tuple[Answer, Answer]:
        async with bench(large, SURE) as sure, bench(large, UNSURE) as unsure:
            await known(sure.node)
            return await sure.ask(), await unsure.ask()

    stayed, went = run(scenario)
    assert (stayed.tier, stayed.index, stayed.accuracy.status) == (Tier.EDGE, 3, AccuracyStatus.CERTIFIED)
    assert (went.tier, went.reason, went.escalated) == (Tier.DATACENTER, Reason.LOW_CONFIDENCE, True)


def test_a_busy_edge_sends_what_it_could_not_answer_in_time(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, SURE) as it:
            await it.ask(target=Quality.BEST)  # the link is known to be quick
            queued = await it.occupy(20)
            answer = await it.ask(target=Quality.BALANCED, deadline_ms=1_500.0)
            with pytest.raises(Overloaded):
                await it.ask(target=Quality.FAST, deadline_ms=1_500.0)  # which never escalates
            it.backend.gate.set()
            await asyncio.gather(*queued)
            return answer

    answer = run(scenario)
    assert (answer.tier, answer.reason, answer.escalated, answer.degraded) == (
        Tier.DATACENTER,
        Reason.EDGE_BUSY,
        True,
        False,
    )


def test_a_busy_edge_whose_datacenter_fails_answers_itself_and_says_that_it_asked(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, SURE, audit_share=0.001) as it:
            await it.ask(target=Quality.BEST)
            queued = await it.occupy(20)
            large.delay_s = 30.0
            asked = asyncio.create_task(it.ask(target=Quality.BALANCED, deadline_ms=1_000.0))
            await until(lambda: len(large.bodies) >= 2)
            it.backend.gate.set()
            await asyncio.gather(*queued)
            return await asked

    answer = run(scenario)
    assert (answer.tier, answer.reason, answer.escalated) == (Tier.EDGE, Reason.EDGE_BUSY, True)
    assert len(large.bodies) == 2


def test_fail_is_told_at_the_deadline_not_when_the_queue_is_done(large: Peer) -> None:
    async def scenario() -> bool:
        async with bench(None, SURE) as it:
            it.backend.gate.clear()
            with pytest.raises(DeadlineMissed, match="deadline_ms=100"):
                await it.ask(target=Quality.FAST, deadline_ms=100.0, on_miss=OnMiss.FAIL)
            return it.backend.gate.is_set()

    assert run(scenario) is False, "the error came while the worker was still busy"


@pytest.mark.parametrize("target", [Quality.BEST, MaxAccuracyDrop(0.01)])
def test_fail_never_passes_off_an_edge_answer_when_the_datacenter_is_late(large: Peer, target: Any) -> None:
    large.delay_s = 30.0

    async def scenario() -> list[str]:
        async with bench(large, UNSURE) as it:
            outcomes = await asyncio.gather(
                *(it.ask(target=target, deadline_ms=400.0, on_miss=OnMiss.FAIL) for _ in range(8)),
                return_exceptions=True,
            )
            return [type(outcome).__name__ for outcome in outcomes]

    assert run(scenario) == ["DeadlineMissed"] * 8


def test_a_late_datacenter_is_cut_off_before_the_deadline(large: Peer) -> None:
    large.delay_s = 30.0

    async def scenario() -> tuple[Answer, int]:
        async with bench(large, UNSURE) as it:
            answer = await it.ask(target=Quality.BEST, deadline_ms=1_500.0)
            return answer, sum(each != FIRST_OVERRUN_MS for each in it.node.context.cutoffs._overruns_ms)

    answer, learned = run(scenario)
    assert (answer.tier, answer.degraded_reason, answer.reason) == (Tier.EDGE, DegradedReason.NO_REPLY, Reason.TARGET)
    assert answer.timing_ms.total > 1_000, "it waited for the datacenter as long as it could"
    assert answer.timing_ms.total < 10_000, "and not for the 30 s that the datacenter would have taken"
    assert learned == 1, "the margin before deadlines follows how late this wait ended"


def test_nobody_waits_for_a_caller_that_hung_up(large: Peer) -> None:
    large.delay_s = 30.0

    async def scenario() -> int:
        async with bench(large, UNSURE) as it:
            gone = asyncio.Event()
            asked = asyncio.create_task(it.ask(gone.wait, target=Quality.BEST))
            await until(lambda: len(large.bodies) > 0)
            gone.set()
            with pytest.raises(CallerGone):
                await asked
            assert it.node.datacenter is not None
            return it.node.datacenter._pending

    assert run(scenario) == 0


def test_escalations_under_way_are_bounded_and_the_rest_degrade(large: Peer) -> None:
    large.delay_s = 0.5

    async def scenario() -> list[Answer]:
        async with bench(large, UNSURE, connections=1) as it:
            return list(await asyncio.gather(*(it.ask(target=Quality.BEST) for _ in range(12))))

    answers = run(scenario)
    assert sum(answer.tier is Tier.DATACENTER for answer in answers) == 5
    assert sum(answer.degraded for answer in answers) == 7


def test_answers_of_a_datacenter_that_runs_other_models_are_not_certified(large: Peer) -> None:
    large.fingerprint = "b" * 64

    async def scenario() -> tuple[Answer, Answer]:
        async with bench(large, SURE) as it:
            await known(it.node)
            return await it.ask(), await it.ask(target=Quality.BEST)

    statuses = {(answer.accuracy.status, answer.accuracy.status_reason) for answer in run(scenario)}
    assert statuses == {(AccuracyStatus.BEST_EFFORT, StatusReason.UNCERTIFIED_VERSION)}


def test_answers_of_the_certified_datacenter_are_held_once_it_has_said_so(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, SURE) as it:
            await known(it.node)
            return await it.ask(target=Quality.BEST)

    assert run(scenario).accuracy.status is AccuracyStatus.CERTIFIED


@pytest.mark.parametrize(
    "reply",
    [
        {"top_k": []},
        {"top_k": [(10, 0.9)]},
        {"top_k": [(-1, 0.9)]},
        {"top_k": [(3, 7.0)]},
        {"model": "somebody-else"},
    ],
)
def test_replies_that_cannot_be_true_are_not_believed(large: Peer, reply: dict[str, Any]) -> None:
    for name, value in reply.items():
        setattr(large, name, value)

    async def scenario() -> Answer:
        async with bench(large, UNSURE) as it:
            return await it.ask(target=Quality.BEST)

    answer = run(scenario)
    assert (answer.tier, answer.degraded, answer.index) == (
        Tier.EDGE,
        True,
        3 if answer.confidence > 0.5 else answer.index,
    )
    assert answer.model == "small"


def test_a_hung_datacenter_is_marked_down_and_costs_only_the_first_caller(
    large: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.factory.DATACENTER_TIMEOUT_S", 0.2)

    async def scenario() -> bool:
        async with bench(large, UNSURE) as it:
            await known(it.node)
            large.delay_s = 30.0
            assert (await it.ask(target=Quality.BEST)).degraded_reason is DegradedReason.NO_REPLY
            assert (await it.ask(target=Quality.BEST)).degraded_reason is DegradedReason.UNREACHABLE
            assert it.node.datacenter is not None
            return it.node.datacenter.up

    assert run(scenario) is False


LATE_MS = 2_000.0


async def doubted(it: Bench) -> DatacenterClient:
    """Ten seconds ago, three escalations in a row got no reply in time."""
    datacenter = it.node.datacenter
    assert datacenter is not None
    misses(datacenter.link.times, LATE_MS, it.clock.now() - 10.0)
    assert not datacenter.admits(LATE_MS)
    return datacenter


@pytest.mark.parametrize("target", [Quality.BEST, MaxAccuracyDrop(0.01)])
def test_where_tries_were_late_callers_are_answered_at_once_and_the_link_is_tried_behind_their_backs(
    large: Peer, target: Any
) -> None:
    large.delay_s = 30.0

    async def scenario() -> list[Answer]:
        async with bench(large, UNSURE) as it:
            await doubted(it)
            answers = [await it.ask(target=target, deadline_ms=LATE_MS) for _ in range(8)]
            await until(lambda: len(large.bodies) > 0)
            assert it.counted("escalations_total", reason="trial") == 1
            return answers

    answers = run(scenario)
    assert {(a.tier, a.escalated, a.degraded) for a in answers} == {(Tier.EDGE, False, True)}
    assert len(large.bodies) == 1, "one at a time, and given up with the node"


def test_who_could_have_both_accuracy_and_deadline_gets_both_however_little_is_left(large: Peer) -> None:
    large.delay_s = 0.8

    async def scenario() -> list[Answer]:
        async with bench(large, UNSURE) as it:
            await known(it.node)
            return [await it.ask(target=Quality.BEST, deadline_ms=1_600.0) for _ in range(3)]

    answers = run(scenario)
    assert {(answer.tier, answer.degraded, answer.deadline_met) for answer in answers} == {
        (Tier.DATACENTER, False, True)
    }


def test_three_requests_wait_for_a_link_that_is_always_late_and_none_after_them(large: Peer) -> None:
    large.delay_s = 30.0

    async def scenario() -> tuple[list[Answer], float]:
        async with bench(large, UNSURE) as it:
            await known(it.node)
            answers = [await it.ask(target=Quality.BEST, deadline_ms=150.0) for _ in range(12)]
            return answers, it.counted("circuit_breaker", state="half_open")

    answers, half_open = run(scenario)
    assert [answer.escalated for answer in answers] == [True] * 3 + [False] * 9
    assert {(answer.tier, answer.degraded) for answer in answers} == {(Tier.EDGE, True)}
    assert answers[-1].degraded_reason is DegradedReason.NO_TIME
    assert half_open in (0.0, 1.0)
    assert 4 <= len(large.bodies) <= 6, "from then on, copies are sent at growing intervals"


def test_tries_in_time_end_the_doubt(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, UNSURE) as it:
            datacenter = await doubted(it)
            for _ in range(10):
                answer = await it.ask(target=Quality.BEST, deadline_ms=LATE_MS)
                if answer.tier is Tier.DATACENTER:
                    break
                await until(lambda: datacenter._pending == 0)
            return answer

    assert run(scenario).tier is Tier.DATACENTER


def test_a_request_with_more_time_than_the_missed_waits_is_still_escalated(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, UNSURE) as it:
            await doubted(it)
            return await it.ask(target=Quality.BEST, deadline_ms=10 * LATE_MS)

    assert run(scenario).tier is Tier.DATACENTER


def test_who_waits_for_any_time_is_not_put_off(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, UNSURE) as it:
            await doubted(it)
            return await it.ask(target=Quality.BEST, deadline_ms=LATE_MS, on_miss=OnMiss.WAIT)

    assert run(scenario).tier is Tier.DATACENTER


@pytest.mark.parametrize("target", [Quality.BEST, MaxAccuracyDrop(0.01)])
def test_who_wants_to_be_told_is_told_at_once_and_the_link_is_tried(large: Peer, target: Any) -> None:
    async def scenario() -> Answer:
        async with bench(large, UNSURE) as it:
            datacenter = await doubted(it)
            with pytest.raises(DeadlineMissed):
                await it.ask(target=target, deadline_ms=LATE_MS, on_miss=OnMiss.FAIL)
            await until(lambda: it.counted("escalations_total", reason="trial") == 1 and datacenter._pending == 0)
            return await it.ask(target=target, deadline_ms=LATE_MS, on_miss=OnMiss.FAIL)

    assert run(scenario).tier is Tier.DATACENTER


def test_a_busy_edge_still_asks_a_doubtful_datacenter(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, SURE) as it:
            await doubted(it)
            queued = await it.occupy(20)
            asked = asyncio.create_task(it.ask(target=Quality.BEST, deadline_ms=LATE_MS))
            await until(asked.done)
            it.backend.gate.set()
            await asyncio.gather(*queued)
            return asked.result()

    assert run(scenario).tier is Tier.DATACENTER


def test_refusals_of_a_busy_datacenter_make_no_doubt(large: Peer) -> None:
    large.status = 429

    async def scenario() -> bool:
        async with bench(large, UNSURE) as it:
            for _ in range(12):
                await it.ask(target=Quality.BEST, deadline_ms=20_000.0)
            assert it.node.datacenter is not None
            return not it.node.datacenter.admits(20_000.0)

    assert run(scenario) is False
    assert len(large.bodies) >= 10


async def impatient(it: Bench, early_ms: float = 1.0) -> DatacenterClient:
    """The last answers came after `early_ms` or far too late."""
    datacenter = it.node.datacenter
    assert datacenter is not None
    hardly_ever_later_than(datacenter.link.times, early_ms, it.clock.now())
    return datacenter


def test_who_waits_for_what_hardly_ever_comes_gets_the_edges_answer_early_and_the_escalation_goes_on(
    large: Peer,
) -> None:
    large.delay_s = 2.0

    async def scenario() -> tuple[Answer, float]:
        async with bench(large, UNSURE) as it:
            datacenter = await impatient(it)
            answer = await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=8_000.0)
            assert datacenter._pending == 1, "it has not ended with the wait"
            await until(lambda: datacenter._pending == 0)
            assert it.counted("escalations_abandoned_total") == it.counted("escalation_failures_total") == 1
            return answer, datacenter.link.times.worth_ms(8_000.0, it.clock.now())

    answer, worth_ms = run(scenario)
    assert (answer.tier, answer.escalated, answer.degraded) == (Tier.EDGE, True, True)
    assert answer.timing_ms.total < 2_000.0
    assert worth_ms > 1_900.0, "two seconds are worth a wait, now that an answer took so long"


@pytest.mark.parametrize("on_miss", [OnMiss.FAIL, OnMiss.WAIT])
def test_who_waits_or_wants_to_be_told_waits_to_the_end(large: Peer, on_miss: OnMiss) -> None:
    large.delay_s = 0.3

    async def scenario() -> Answer:
        async with bench(large, UNSURE) as it:
            await impatient(it)
            return await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=8_000.0, on_miss=on_miss)

    assert run(scenario).tier is Tier.DATACENTER


def test_the_response_time_model_learns_from_every_reply_with_a_deadline_or_without(large: Peer) -> None:
    async def scenario() -> list[int]:
        async with bench(large, UNSURE) as it:
            datacenter = it.node.datacenter
            assert datacenter is not None
            await it.ask(target=MaxAccuracyDrop(0.01))
            await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=8_000.0, on_miss=OnMiss.WAIT)
            others = len(datacenter.link.times._observations)
            await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=8_000.0)
            await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=8_000.0, on_miss=OnMiss.FAIL)
            return [others, len(datacenter.link.times._observations)]

    assert run(scenario) == [2, 4]


def test_what_was_given_up_counts_among_the_escalations_under_way_and_ends_with_the_node(large: Peer) -> None:
    large.delay_s = 30.0

    async def scenario() -> tuple[list[Answer], int]:
        async with bench(large, UNSURE, connections=1) as it:
            datacenter = await impatient(it)
            answers = [await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=8_000.0) for _ in range(8)]
            return answers, datacenter._pending

    answers, pending = run(scenario)
    assert {answer.tier for answer in answers} == {Tier.EDGE}
    assert pending == 5


def test_a_caller_that_hangs_up_ends_its_escalation_even_where_waits_are_cut(large: Peer) -> None:
    large.delay_s = 30.0

    async def scenario() -> int:
        async with bench(large, UNSURE) as it:
            datacenter, gone = await impatient(it, early_ms=5_000.0), asyncio.Event()
            assert datacenter.link.times.worth_ms(8_000.0, it.clock.now()) == 5_000.0
            asked = asyncio.create_task(it.ask(gone.wait, target=MaxAccuracyDrop(0.01), deadline_ms=8_000.0))
            await until(lambda: len(large.bodies) > 0)
            gone.set()
            with pytest.raises(CallerGone):
                await asked
            return datacenter._pending

    assert run(scenario) == 0
