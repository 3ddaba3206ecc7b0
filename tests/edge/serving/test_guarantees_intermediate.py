"""The guarantees that rest on an intermediate stage: it is asked, believed and found out only as its certificate
allows."""

from __future__ import annotations

import asyncio
import math

import pytest

from edge.serving.targets_listing import ListedTarget, describe_targets
from hawkvision.cascade.certification.profile import CERTIFIED_DROPS
from hawkvision.cascade.policy import Policy
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    MaxAccuracyDrop,
    Quality,
    Reason,
    StatusReason,
    Tier,
)
from tests.edge.bench import SURE, UNSURE, audits, bench, known, many, outcomes, run
from tests.edge.peer import ANSWER_CLASS, INTERMEDIATE_CLASS, Peer
from tests.hawkvision.cascade.synthetic import SHA, make_profile
from tests.waiting import until


def target_whose_intermediate_threshold(low: float, high: float) -> MaxAccuracyDrop:
    """One of the synthetic cascade's certified drops."""
    policy = Policy(make_profile(intermediate=True), "small", "large")
    for target in map(MaxAccuracyDrop, CERTIFIED_DROPS):
        intermediate = policy.route(target).intermediate
        if intermediate is not None and low <= intermediate.threshold <= high:
            return target
    raise AssertionError(f"the synthetic cascade has no middle threshold between {low} and {high}")


ME = "127.0.0.1"
THREE_LEVELS = target_whose_intermediate_threshold(0.35, 0.85)
ALWAYS_INTERMEDIATE = target_whose_intermediate_threshold(-math.inf, 0.0)


@pytest.fixture
def three(large: Peer) -> Peer:
    """`large`, with the intermediate stage that was certified."""
    large.intermediate, large.intermediate_fingerprint = "medium", SHA
    return large


def test_a_sure_intermediate_stage_answers_and_the_guarantee_is_held(three: Peer) -> None:
    three.intermediate_score = 0.9

    async def scenario() -> Answer:
        async with bench(three, UNSURE, intermediate=True) as it:
            await known(it.node)
            return await it.ask(target=THREE_LEVELS)

    answer = run(scenario)
    assert (answer.model, answer.index, answer.tier) == ("medium", INTERMEDIATE_CLASS, Tier.DATACENTER)
    assert (answer.accuracy.status, answer.accuracy.max_drop) == (AccuracyStatus.CERTIFIED, THREE_LEVELS.value)


def test_both_stages_logs_learn_when_the_best_stage_answers_after_the_intermediate_one(three: Peer) -> None:
    three.intermediate_score = 0.3

    async def scenario() -> tuple[Answer, int]:
        async with bench(three, UNSURE, intermediate=True, audit_share=1.0) as it:
            await known(it.node)
            return await it.ask(target=THREE_LEVELS), outcomes(it)

    answer, learned = run(scenario)
    assert (answer.model, answer.accuracy.status) == ("large", AccuracyStatus.CERTIFIED)
    assert learned == 4, "of two stages, in the caller's own logs and in the node's"


def test_an_intermediate_stage_that_is_wrong_where_it_is_sure_is_found_out_and_no_longer_believed(three: Peer) -> None:
    three.intermediate_score = 0.9

    async def scenario() -> tuple[Answer, float, int]:
        async with bench(three, UNSURE, intermediate=True, audit_share=1.0) as it:
            await known(it.node)
            watched = it.node.guarantees.watched(it.node.policy.route(THREE_LEVELS), None, ME)
            while not watched.suspended:
                await many(it, 4, target=THREE_LEVELS)
            await until(lambda: not it.node.auditor.pending)
            seen = outcomes(it)
            answer = await it.ask(target=THREE_LEVELS)
            return answer, audits(it, "differ"), outcomes(it) - seen

    answer, differing, seen = run(scenario)
    assert differing > 0
    assert (answer.model, answer.index, answer.accuracy.status) == ("large", ANSWER_CLASS, AccuracyStatus.SUSPENDED)
    assert seen == 2, "it is watched still, so that its return can be noticed"


def test_another_intermediate_stage_than_the_certified_one_is_not_asked_and_voids_what_rests_on_it(three: Peer) -> None:
    three.intermediate_fingerprint, three.intermediate_score = "c" * 64, 0.9

    async def scenario() -> tuple[Answer, Answer]:
        async with bench(three, UNSURE, intermediate=True) as it:
            await known(it.node)
            return await it.ask(target=THREE_LEVELS), await it.ask(target=Quality.BEST)

    resting, best = run(scenario)
    assert (resting.model, resting.accuracy.status) == ("large", AccuracyStatus.BEST_EFFORT)
    assert resting.accuracy.status_reason is StatusReason.UNCERTIFIED_VERSION
    assert (best.model, best.accuracy.status) == ("large", AccuracyStatus.CERTIFIED)


def test_an_intermediate_stage_that_always_answers_does_so_only_while_the_guarantee_holds(three: Peer) -> None:
    three.intermediate_score = 0.0

    async def scenario() -> tuple[Answer, Answer]:
        async with bench(three, UNSURE, intermediate=True, audit_share=0.2) as it:
            await known(it.node)
            route = it.node.policy.route(ALWAYS_INTERMEDIATE)
            assert route.intermediate is not None
            assert route.intermediate.threshold == -math.inf
            before = await it.ask(target=ALWAYS_INTERMEDIATE)
            while not it.node.guarantees.watched(route, None, ME).suspended:  # the reference stage says otherwise
                await many(it, 16, target=ALWAYS_INTERMEDIATE)
            return before, await it.ask(target=ALWAYS_INTERMEDIATE)

    before, after = run(scenario)
    assert (before.model, before.accuracy.status) == ("medium", AccuracyStatus.CERTIFIED)
    assert (after.model, after.accuracy.status) == ("large", AccuracyStatus.SUSPENDED)


def test_an_intermediate_stage_is_not_asked_before_it_is_known_to_be_the_certified_one(three: Peer) -> None:
    three.intermediate_score, three.stages_delay_s = 0.9, 1.0

    async def scenario() -> Answer:
        async with bench(three, UNSURE, intermediate=True) as it:
            return await it.ask(target=THREE_LEVELS)

    assert run(scenario).model == "large"


def test_a_busy_edges_images_go_to_the_best_stage_which_alone_is_certified_for_them(three: Peer) -> None:
    three.intermediate_score = 0.9

    async def scenario() -> Answer:
        async with bench(three, SURE, intermediate=True) as it:
            await known(it.node)
            await it.ask(target=Quality.BEST)
            queued = await it.occupy(20)
            answer = await it.ask(target=THREE_LEVELS, deadline_ms=1_500.0)
            it.backend.gate.set()
            await asyncio.gather(*queued)
            return answer

    answer = run(scenario)
    assert (answer.model, answer.reason, answer.accuracy.status) == (
        "large",
        Reason.EDGE_BUSY,
        AccuracyStatus.CERTIFIED,
    )


def test_targets_list_what_an_intermediate_stage_saves_and_what_latency_follows(three: Peer) -> None:
    three.intermediate_score = 0.9

    async def scenario() -> ListedTarget:
        async with bench(three, UNSURE, intermediate=True) as it:
            await known(it.node)
            await many(it, 32, target=THREE_LEVELS)
            await it.ask(target=Quality.BEST)
            listed = describe_targets(it.node).targets
            return next(entry for entry in listed if entry.accuracy.target.max_accuracy_drop == THREE_LEVELS.value)

    listed = run(scenario)
    assert listed.intermediate == "medium"
    assert listed.to_best < listed.escalation
    assert listed.expected_latency_ms is not None
    assert listed.expected_latency_ms > 0.0
