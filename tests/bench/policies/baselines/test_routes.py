"""Baselines whose decision is a route: which tier answers, what the answer states, and what a deadline changes."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ConfigError
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
from tests.bench.policies.baselines.plugin import ThresholdBaseline, with_baselines
from tests.bench.policies.baselines.routes import BaselineRoutes
from tests.bench.policies.baselines.settings import BaselineSettings, read_thresholds, write_thresholds
from tests.edge.bench import SURE, UNSURE, bench, run
from tests.edge.conftest import Caller
from tests.edge.peer import Peer
from tests.hawkvision.cascade.synthetic import make_profile
from tests.images import encoded
from tests.waiting import until

CASCADE = Policy(make_profile(), "small", "large")
BEST = CASCADE.best_accuracy.value
TUNED: routes.Thresholds = ((0.0, math.inf), (0.01, 0.9), (0.05, 0.4))
ALL_DC: routes.Thresholds = ((0.0, math.inf),)
ALL_EDGE: routes.Thresholds = ((0.0, -math.inf),)


def asked(peer: Peer, lead: float, tuned: routes.Thresholds, **fields: Any) -> Answer:
    """The answer to one image with these thresholds; `lead` says how sure the edge is of it."""
    settings = BaselineSettings(thresholds=write_thresholds(dict(tuned)))
    baseline = ThresholdBaseline(EdgeConfig(policy="threshold", features=(settings,)))

    async def scenario() -> Answer:
        async with bench(peer, lead, baseline=baseline) as it:
            return await it.ask(**fields)

    return run(scenario)


# ---------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("target", "threshold"),
    [
        (Quality.BEST, math.inf),
        (MaxAccuracyDrop(0.009), math.inf),
        (MaxAccuracyDrop(0.01), 0.9),
        (MinAccuracy(BEST - 0.01), 0.9),
        (MaxAccuracyDrop(0.06), 0.4),
        (Quality.FAST, 0.4),
    ],
)
def test_a_target_has_the_lowest_threshold_of_the_drops_that_it_allows(target: Target, threshold: float) -> None:
    rule = functools.partial(routes.threshold, tuned=TUNED)
    route = BaselineRoutes(make_profile(), "small", "large", rule=rule).route(target)
    assert route.threshold == threshold
    assert (route.escalation == 1.0) is (threshold == math.inf)


def test_thresholds_are_read_as_the_very_same_numbers() -> None:
    found = {0.0: math.inf, 0.01: 0.1 + 0.2, 0.3: -math.inf}
    assert dict(read_thresholds(write_thresholds(found))) == found


@pytest.mark.parametrize("text", ["", "0.5", "0.1=high", "0.1=0.5=0.6", "0.1=nan"])
def test_other_thresholds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"edge\.thresholds: expected DROP=SCORE,DROP=SCORE,…, got "):
        read_thresholds(text)


# ------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("tuned", "target", "easy", "hard"),
    [
        (ALL_DC, Quality.FAST, Tier.DATACENTER, Tier.DATACENTER),
        (ALL_EDGE, Quality.BEST, Tier.EDGE, Tier.EDGE),
        (TUNED, MaxAccuracyDrop(0.05), Tier.EDGE, Tier.DATACENTER),
        (TUNED, Quality.BEST, Tier.DATACENTER, Tier.DATACENTER),
    ],
)
def test_where_easy_and_hard_images_are_answered(
    large: Peer, tuned: routes.Thresholds, target: Target, easy: Tier, hard: Tier
) -> None:
    answers = [asked(large, lead, tuned, target=target) for lead in (SURE, UNSURE)]
    assert [answer.tier for answer in answers] == [easy, hard]
    assert {answer.accuracy.status for answer in answers} == {AccuracyStatus.BEST_EFFORT}, "nothing is certified"
    assert {answer.model for answer in answers} <= {"small", "large"}


# -------------------------------------------------------------------------------------------- deadline fallback


@pytest.mark.parametrize("target", [Quality.BEST, MaxAccuracyDrop(0.05)])
def test_the_edge_answers_degraded_just_before_the_deadline(large: Peer, target: Target) -> None:
    large.delay_s = 20.0
    answer = asked(large, UNSURE, TUNED, target=target, deadline_ms=500.0)
    assert (answer.tier, answer.model, answer.degraded, answer.escalated) == (Tier.EDGE, "small", True, True)
    assert answer.timing_ms.total > 450.0, "just before the deadline: it learns nothing of the link"


# ------------------------------------------------------------------------------------------------------ settings


def test_a_node_says_under_which_policy_it_runs(peer: Peer) -> None:
    peer.delay_s, peer.status, peer.garbage = 0.0, 200, False
    words = f"--port 0 --backend noop --datacenter-url {peer.url} --policy threshold --thresholds 0=1".split()
    with running("edge", *words, env=with_baselines()) as node:
        caller = Caller(node)
        listed = caller.get("/v1/targets").json
        answer = caller.classify(encoded(), "quality=best").json
        counted = caller.get("/metrics").body.decode()
        caller.close()
        said = node.output
        run(lambda: until(lambda: "policy: threshold" in said()))
    assert listed["policy"] == "threshold"
    assert {entry["accuracy"]["status"] for entry in listed["targets"]} == {"best_effort"}
    assert (answer["tier"], answer["reason"]) == ("datacenter", "low_confidence")
    assert 'hawkvision_escalations_total{reason="low_confidence",task="imagenet"} 1.0' in counted
