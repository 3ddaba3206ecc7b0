"""Baselines whose decision is a route: which tier answers, what the answer states, and what a deadline changes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hawkvision.cascade.policy import Policy
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    MaxAccuracyDrop,
    MinAccuracy,
    Quality,
    Target,
    Tier,
)
from hawkvision.system.child_server import running
from tests.bench.policies.baselines import routes
from tests.bench.policies.baselines.plugin import RoutedBaseline, with_baselines
from tests.bench.policies.baselines.routes import BaselineRoutes
from tests.bench.policies.baselines.settings import BaselineSettings
from tests.edge.bench import SURE, UNSURE, bench, run
from tests.edge.conftest import Caller
from tests.edge.peer import Peer
from tests.hawkvision.cascade.synthetic import make_profile
from tests.images import encoded
from tests.waiting import until


def routed(policy: str, deadline_fallback: bool) -> RoutedBaseline:
    return RoutedBaseline(EdgeConfig(policy=policy, features=(BaselineSettings(deadline_fallback=deadline_fallback),)))


CASCADE = Policy(make_profile(), "small", "large")
EDGE, BEST = CASCADE.edge_accuracy.value, CASCADE.best_accuracy.value
ROUTED: tuple[str, ...] = ("all-dc", "all-edge", "static", "split")


def asked(peer: Peer | None, lead: float, policy: str, *, deadline_fallback: bool = False, **fields: Any) -> Answer:
    """The answer to one image under a policy; `lead` says how sure the edge is of it."""

    async def scenario() -> Answer:
        async with bench(peer, lead, baseline=routed(policy, deadline_fallback)) as it:
            return await it.ask(**fields)

    return run(scenario)


# ---------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("target", "at_edge"),
    [
        (Quality.FAST, True),
        (Quality.BALANCED, False),
        (Quality.BEST, False),
        (MinAccuracy(EDGE), True),
        (MinAccuracy(EDGE + 0.001), False),
        (MaxAccuracyDrop(BEST - EDGE + 0.001), True),
        (MaxAccuracyDrop(BEST - EDGE - 0.001), False),
    ],
)
def test_split_keeps_what_the_edge_is_accurate_enough_for(target: Target, at_edge: bool) -> None:
    route = BaselineRoutes(make_profile(), "small", "large", rule=routes.split).route(target)
    assert (route.threshold, route.escalation) == ((-math.inf, 0.0) if at_edge else (math.inf, 1.0))


# ------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("policy", "target", "easy", "hard"),
    [
        ("all-dc", Quality.FAST, Tier.DATACENTER, Tier.DATACENTER),
        ("all-edge", Quality.BEST, Tier.EDGE, Tier.EDGE),
        ("split", Quality.FAST, Tier.EDGE, Tier.EDGE),
        ("split", Quality.BALANCED, Tier.DATACENTER, Tier.DATACENTER),
        ("static", Quality.FAST, Tier.EDGE, Tier.DATACENTER),
        ("static", Quality.BEST, Tier.EDGE, Tier.DATACENTER),
    ],
)
def test_where_easy_and_hard_images_are_answered(
    large: Peer, policy: str, target: Target, easy: Tier, hard: Tier
) -> None:
    answers = [asked(large, lead, policy, target=target) for lead in (SURE, UNSURE)]
    assert [answer.tier for answer in answers] == [easy, hard]
    assert {answer.accuracy.status for answer in answers} == {AccuracyStatus.BEST_EFFORT}, "nothing is certified"
    assert {answer.model for answer in answers} <= {"small", "large"}


# -------------------------------------------------------------------------------------------- deadline fallback


@pytest.mark.parametrize("policy", ["all-dc", "static", "split"])
def test_with_a_fallback_the_edge_answers_degraded_just_before_the_deadline(large: Peer, policy: str) -> None:
    large.delay_s = 20.0
    answer = asked(large, UNSURE, policy, target=Quality.BEST, deadline_ms=500.0, deadline_fallback=True)
    assert (answer.tier, answer.model, answer.degraded, answer.escalated) == (Tier.EDGE, "small", True, True)
    assert answer.timing_ms.total > 450.0, "just before the deadline: it learns nothing of the link"


# ------------------------------------------------------------------------------------------------------ settings


def test_a_node_says_under_which_policy_it_runs(peer: Peer) -> None:
    peer.delay_s, peer.status, peer.garbage = 0.0, 200, False
    words = f"--port 0 --backend noop --datacenter-url {peer.url} --policy static --static-threshold 1".split()
    with running("edge", *words, env=with_baselines()) as node:
        caller = Caller(node)
        listed = caller.get("/v1/targets").json
        answer = caller.classify(encoded(), "quality=fast").json
        counted = caller.get("/metrics").body.decode()
        caller.close()
        said = node.output
        run(lambda: until(lambda: "policy: static" in said()))
    assert listed["policy"] == "static"
    assert {entry["accuracy"]["status"] for entry in listed["targets"]} == {"best_effort"}
    assert (answer["tier"], answer["reason"]) == ("datacenter", "low_confidence")
    assert 'hawkvision_escalations_total{reason="low_confidence",task="imagenet"} 1.0' in counted
