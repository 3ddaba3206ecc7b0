"""The promises that rest on a middle rung: it is asked, believed and found out only as its certificate allows."""

from __future__ import annotations

import asyncio
import math

import pytest

from edge.serving.targets import describe_targets
from hawkvision.cascade.certification.profile import CERTIFIED_DROPS
from hawkvision.cascade.policy import Policy
from hawkvision.core.types import Answer, Basis, MaxAccuracyDrop, PromiseStatus, Quality, Reason, Tier, target_fields
from tests.edge.bench import SURE, UNSURE, audits, bench, known, many, run
from tests.edge.peer import ANSWER_CLASS, MIDDLE_CLASS, Peer
from tests.hawkvision.cascade.synthetic import SHA, make_profile
from tests.waiting import until


def target_whose_middle_threshold(low: float, high: float) -> MaxAccuracyDrop:
    """One of the synthetic ladder's certified drops."""
    policy = Policy(make_profile(middle=True), "small", "large")
    for target in map(MaxAccuracyDrop, CERTIFIED_DROPS):
        middle = policy.route(target).middle
        if middle is not None and low <= middle.threshold <= high:
            return target
    raise AssertionError(f"the synthetic ladder has no middle threshold between {low} and {high}")


ME = "127.0.0.1"
THREE_LEVELS = target_whose_middle_threshold(0.35, 0.85)
ALWAYS_MIDDLE = target_whose_middle_threshold(-math.inf, 0.0)


@pytest.fixture
def three(large: Peer) -> Peer:
    """`large`, with the middle rung that was certified."""
    large.middle, large.middle_fingerprint = "medium", SHA
    return large


def test_a_sure_middle_rung_answers_and_the_promise_is_held(three: Peer) -> None:
    three.middle_score = 0.9

    async def scenario() -> Answer:
        async with bench(three, UNSURE, middle=True) as it:
            await known(it.node)
            return await it.ask(target=THREE_LEVELS)

    answer = run(scenario)
    assert (answer.model, answer.index, answer.tier) == ("medium", MIDDLE_CLASS, Tier.DC)
    assert (answer.accuracy.status, answer.accuracy.max_drop) == (PromiseStatus.HELD, THREE_LEVELS.value)


def test_both_controllers_learn_when_the_best_rung_answers_after_the_middle_one(three: Peer) -> None:
    three.middle_score = 0.3

    async def scenario() -> tuple[Answer, int, int]:
        async with bench(three, UNSURE, middle=True) as it:
            await known(it.node)
            answer = await it.ask(target=THREE_LEVELS)
            watched = it.node.watched(it.node.policy.route(THREE_LEVELS), None, ME)
            edge, middle = watched.edge, watched.middle
            assert edge is not None
            assert middle is not None
            return answer, edge.control.state.escalations, middle.control.state.escalations

    answer, edge, middle = run(scenario)
    assert (answer.model, answer.accuracy.status, edge, middle) == ("large", PromiseStatus.HELD, 1, 1)


def test_a_middle_rung_that_is_wrong_where_it_is_sure_is_found_out_and_no_longer_believed(three: Peer) -> None:
    three.middle_score = 0.9

    async def scenario() -> tuple[Answer, float, int]:
        async with bench(three, UNSURE, middle=True, audit_share=0.2) as it:
            await known(it.node)
            watched = it.node.watched(it.node.policy.route(THREE_LEVELS), None, ME)
            assert watched.middle is not None
            while not watched.void:
                await many(it, 16, target=THREE_LEVELS)
            await until(lambda: not it.node.auditor._under_way)
            seen = watched.middle.control.state.requests
            answer = await it.ask(target=THREE_LEVELS)
            return answer, audits(it, "differ"), watched.middle.control.state.requests - seen

    answer, differing, seen = run(scenario)
    assert differing > 0
    assert (answer.model, answer.index, answer.accuracy.status) == ("large", ANSWER_CLASS, PromiseStatus.VOID)
    assert seen == 1, "it is watched still, so that its return can be noticed"


def test_another_middle_rung_than_the_certified_one_is_not_asked_and_voids_what_rests_on_it(three: Peer) -> None:
    three.middle_fingerprint, three.middle_score = "c" * 64, 0.9

    async def scenario() -> tuple[Answer, Answer]:
        async with bench(three, UNSURE, middle=True) as it:
            await known(it.node)
            return await it.ask(target=THREE_LEVELS), await it.ask(target=Quality.BEST)

    resting, best = run(scenario)
    assert (resting.model, resting.accuracy.status) == ("large", PromiseStatus.BEST_EFFORT)
    assert resting.accuracy.basis is Basis.UNCERTIFIED_VERSION
    assert (best.model, best.accuracy.status) == ("large", PromiseStatus.HELD)


def test_a_middle_rung_that_always_answers_does_so_only_while_the_promise_holds(three: Peer) -> None:
    three.middle_score = 0.0

    async def scenario() -> tuple[Answer, Answer]:
        async with bench(three, UNSURE, middle=True, audit_share=0.2) as it:
            await known(it.node)
            route = it.node.policy.route(ALWAYS_MIDDLE)
            assert route.middle is not None
            assert route.middle.threshold == -math.inf
            before = await it.ask(target=ALWAYS_MIDDLE)
            while not it.node.watched(route, None, ME).void:  # the best rung says otherwise
                await many(it, 16, target=ALWAYS_MIDDLE)
            return before, await it.ask(target=ALWAYS_MIDDLE)

    before, after = run(scenario)
    assert (before.model, before.accuracy.status) == ("medium", PromiseStatus.HELD)
    assert (after.model, after.accuracy.status) == ("large", PromiseStatus.VOID)


def test_a_middle_rung_is_not_asked_before_it_is_known_to_be_the_certified_one(three: Peer) -> None:
    three.middle_score, three.rungs_delay_s = 0.9, 1.0

    async def scenario() -> Answer:
        async with bench(three, UNSURE, middle=True) as it:
            return await it.ask(target=THREE_LEVELS)

    assert run(scenario).model == "large"


def test_a_busy_edges_pictures_go_to_the_best_rung_which_alone_is_certified_for_them(three: Peer) -> None:
    three.middle_score = 0.9

    async def scenario() -> Answer:
        async with bench(three, SURE, middle=True) as it:
            await known(it.node)
            await it.ask(target=Quality.BEST)
            queued = await it.occupy(20)
            answer = await it.ask(target=THREE_LEVELS, deadline_ms=1_500.0)
            it.backend.gate.set()
            await asyncio.gather(*queued)
            return answer

    answer = run(scenario)
    assert (answer.model, answer.reason, answer.accuracy.status) == ("large", Reason.EDGE_BUSY, PromiseStatus.HELD)


def test_targets_list_what_a_middle_rung_saves_and_what_latency_follows(three: Peer) -> None:
    three.middle_score = 0.9

    async def scenario() -> dict[str, object]:
        async with bench(three, UNSURE, middle=True) as it:
            await known(it.node)
            await many(it, 32, target=THREE_LEVELS)
            await it.ask(target=Quality.BEST)
            listed: list[dict[str, object]] = describe_targets(it.node)["targets"]
            return next(entry for entry in listed if entry["target"] == target_fields(THREE_LEVELS))

    listed = run(scenario)
    assert listed["middle"] == "medium"
    assert listed["to_best"] < listed["escalation"]  # type: ignore[operator]
    assert listed["expected_latency_ms"] > 0.0  # type: ignore[operator]
