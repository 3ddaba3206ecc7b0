"""Baselines whose decision is a route: which tier answers, what the answer states, and what a deadline changes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edge.inference.edge_stage import ConditionalEnsemble, LoadedModel
from edge.monitoring.certificate_reload import stage_of
from hawkvision.cascade.certification.profile import threshold_value
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ConfigError, DeadlineMissed, TargetUnreachable
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.load import load_config
from hawkvision.core.trace_context import start_trace
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    ClassifyRequest,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    OnMiss,
    Quality,
    Reason,
    Received,
    Target,
    Tier,
)
from hawkvision.models.manifest import load_manifest, models_dir
from hawkvision.system.child_server import running
from tests.bench.policies.baselines import routes
from tests.bench.policies.baselines.plugin import RoutedBaseline, with_baselines
from tests.bench.policies.baselines.routes import BaselineRoutes, Registered, expected_escalation
from tests.bench.policies.baselines.settings import BaselineSettings
from tests.edge.bench import SPEC, SURE, UNSURE, GatedBackend, bench, known, run
from tests.edge.conftest import Caller
from tests.edge.peer import ANSWER_CLASS, Peer
from tests.hawkvision.cascade.synthetic import make_profile
from tests.images import encoded
from tests.waiting import until


def routed(policy: str, **settings: Any) -> RoutedBaseline:
    """A baseline with these settings."""
    return RoutedBaseline(EdgeConfig(policy=policy, features=(BaselineSettings(**settings),)))


CASCADE = Policy(make_profile(), "small", "large")
EDGE, BEST = CASCADE.edge_accuracy.value, CASCADE.best_accuracy.value
ROUTED: tuple[str, ...] = ("all-dc", "all-edge", "static", "split")


def asked(peer: Peer | None, lead: float, policy: str, threshold: float | None = None, **fields: Any) -> Answer:
    """The answer to one image under a policy; `lead` says how sure the edge is of it."""

    async def scenario() -> Answer:
        async with bench(peer, lead, baseline=routed(policy, static_threshold=threshold)) as it:
            return await it.ask(**fields)

    return run(scenario)


# ---------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("target", "required"),
    [
        (Quality.FAST, 0.75),
        (Quality.BALANCED, 0.93),
        (Quality.BEST, 0.95),
        (MaxAccuracyDrop(0.2), 0.75),
        (MinAccuracy(0.8), 0.8),
        (MinConfidence(0.9), 0.9),
    ],
)
def test_every_target_asks_for_a_registered_accuracy(target: Target, required: float) -> None:
    assert Registered(0.75, 0.95, 0.02).required(target) == required


def test_a_drop_that_is_exactly_the_gap_is_met_despite_rounding() -> None:
    assert not Registered(0.848346, 0.884191, 0.01).below_target(0.848346, MaxAccuracyDrop(0.884191 - 0.848346))
    assert Registered(0.848346, 0.884191, 0.01).below_target(0.848346, MaxAccuracyDrop(0.0358))


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


def test_static_takes_the_threshold_of_balanced_for_every_target() -> None:
    rule = routes.static(CASCADE, None)
    balanced = CASCADE.route(Quality.BALANCED)
    assert {rule(target).threshold for target in (*Quality, MaxAccuracyDrop(0.001))} == {balanced.threshold}
    assert rule(Quality.BEST).escalation == pytest.approx(balanced.escalation, abs=0.02)


def test_a_higher_threshold_is_never_expected_to_escalate_less() -> None:
    pair = CASCADE.pair
    tried = sorted({threshold_value(step.threshold) for step in pair.path})
    expected = [expected_escalation(pair, threshold) for threshold in tried]
    assert expected == sorted(expected)
    assert (expected_escalation(pair, -math.inf), expected_escalation(pair, math.inf)) == (0.0, 1.0)


@pytest.mark.parametrize("policy", ROUTED)
def test_more_accuracy_than_there_is_stays_unreachable(policy: str, large: Peer) -> None:
    with pytest.raises(TargetUnreachable):
        asked(large, SURE, policy, target=MinAccuracy(BEST + 0.001))


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


def test_static_accepts_from_its_threshold_on_and_states_why_it_escalates(large: Peer) -> None:
    low, high = (asked(large, UNSURE, "static", threshold, target=Quality.BEST) for threshold in (0.0, 1.0))
    assert (low.tier, low.reason) == (Tier.EDGE, None)
    assert (high.tier, high.reason, high.escalated) == (Tier.DATACENTER, Reason.LOW_CONFIDENCE, True)


def test_all_edge_marks_targets_that_its_model_misses_as_degraded() -> None:
    met, missed = (asked(None, SURE, "all-edge", target=target) for target in (Quality.FAST, Quality.BEST))
    assert (met.degraded, missed.degraded) == (False, True)


@pytest.mark.parametrize("policy", ["all-dc", "static", "split"])
def test_an_answer_that_is_late_comes_late_and_says_so(large: Peer, policy: str) -> None:
    large.delay_s = 0.3
    answer = asked(large, UNSURE, policy, target=Quality.BEST, deadline_ms=50.0)
    assert (answer.tier, answer.index, answer.degraded) == (Tier.DATACENTER, ANSWER_CLASS, False)
    assert answer.deadline_met is False


@pytest.mark.parametrize("policy", ["all-dc", "static", "split"])
def test_on_miss_fail_is_an_error_under_a_baseline_too(large: Peer, policy: str) -> None:
    large.delay_s = 0.3
    with pytest.raises(DeadlineMissed):
        asked(large, UNSURE, policy, target=Quality.BEST, deadline_ms=50.0, on_miss=OnMiss.FAIL)


@pytest.mark.parametrize("policy", ["all-dc", "static", "split"])
def test_the_edge_answers_degraded_if_the_datacenter_fails(large: Peer, policy: str) -> None:
    large.status = 500
    answer = asked(large, UNSURE, policy, target=Quality.BEST)
    assert (answer.tier, answer.model, answer.degraded, answer.escalated) == (Tier.EDGE, "small", True, True)


# -------------------------------------------------------------------------------------------- deadline fallback


def fallen_back(peer: Peer, lead: float, policy: str, **fields: Any) -> Answer:
    async def scenario() -> Answer:
        async with bench(peer, lead, baseline=routed(policy, deadline_fallback=True)) as it:
            return await it.ask(**{"target": Quality.BEST, **fields})

    return run(scenario)


@pytest.mark.parametrize("policy", ["all-dc", "static", "split"])
def test_with_a_fallback_the_edge_answers_degraded_just_before_the_deadline(large: Peer, policy: str) -> None:
    large.delay_s = 20.0
    answer = fallen_back(large, UNSURE, policy, deadline_ms=500.0)
    assert (answer.tier, answer.model, answer.degraded, answer.escalated) == (Tier.EDGE, "small", True, True)
    assert answer.timing_ms.total > 450.0, "just before the deadline: it learns nothing of the link"


@pytest.mark.parametrize("policy", ["all-dc", "static", "split"])
def test_a_fallback_waits_as_long_for_the_last_request_as_for_the_first(large: Peer, policy: str) -> None:
    """It learns nothing from late replies, and so uses the next one that is in time."""

    async def scenario() -> list[Answer]:
        async with bench(large, UNSURE, baseline=routed(policy, deadline_fallback=True)) as it:
            large.delay_s = 0.4
            late = [await it.ask(target=Quality.BEST, deadline_ms=100.0) for _ in range(12)]
            large.delay_s = 0.0
            return [*late, await it.ask(target=Quality.BEST, deadline_ms=5_000.0)]

    *late, last = run(scenario)
    assert {(answer.tier, answer.escalated) for answer in late} == {(Tier.EDGE, True)}
    assert min(answer.timing_ms.total for answer in late) > 90.0
    assert (last.tier, last.index) == (Tier.DATACENTER, ANSWER_CLASS)


@pytest.mark.parametrize("policy", ["all-dc", "static", "split"])
def test_with_a_fallback_the_datacenters_answer_counts_while_it_is_in_time(large: Peer, policy: str) -> None:
    answer = fallen_back(large, UNSURE, policy, deadline_ms=10_000.0)
    assert (answer.tier, answer.index, answer.degraded) == (Tier.DATACENTER, ANSWER_CLASS, False)


def test_a_fallback_does_not_apply_to_on_miss_wait_or_fail(large: Peer) -> None:
    large.delay_s = 0.3
    waited = fallen_back(large, UNSURE, "static", deadline_ms=50.0, on_miss=OnMiss.WAIT)
    assert (waited.tier, waited.deadline_met) == (Tier.DATACENTER, False)
    with pytest.raises(DeadlineMissed):
        fallen_back(large, UNSURE, "static", deadline_ms=50.0, on_miss=OnMiss.FAIL)


def test_all_edge_with_a_fallback_never_asks_the_datacenter(large: Peer) -> None:
    answer = fallen_back(large, UNSURE, "all-edge", deadline_ms=5_000.0)
    assert (answer.tier, answer.escalated, large.bodies) == (Tier.EDGE, False, [])


def test_a_baselines_edge_stage_runs_the_whole_ensemble_as_ours_does(large: Peer) -> None:
    second = GatedBackend(SURE)
    others = ConditionalEnsemble((LoadedModel("second", second, SPEC),), (1.0, 1.0), 1.0, 0.9)

    async def scenario() -> Answer:
        async with bench(large, UNSURE, baseline=routed("static"), others=others) as it:
            return await it.ask(target=Quality.FAST)

    assert run(scenario).tier is Tier.EDGE, "both together are sure"
    assert second.inferred == 1


@pytest.mark.parametrize("policy", ["hawkvision", "all-edge", "static", "split", "all-dc", "infaas"])
def test_every_policy_runs_the_same_edge_stage(policy: str) -> None:
    manifest = load_manifest("imagenet", models_dir())
    assert stage_of(EdgeConfig(policy=policy), manifest) == manifest.cascade.default_edge
    assert manifest.ensemble(manifest.cascade.default_edge) is not None


def test_a_baseline_has_no_streams_and_no_audits(large: Peer) -> None:
    async def scenario() -> tuple[int, int]:
        async with bench(large, SURE, baseline=routed("static"), audit_share=1.0) as it:
            await known(it.node)
            for _ in range(20):
                await it.ask(target=Quality.BALANCED, stream="a")
            return len(it.node.streams), len(large.bodies)

    assert run(scenario) == (0, 0)


def test_baselines_do_not_answer_a_partial_image_early(large: Peer) -> None:
    async def scenario() -> tuple[Answer | None, bool]:
        async with bench(large, SURE, baseline=routed("all-edge")) as it:
            request = ClassifyRequest(target=Quality.FAST)
            return await it.node.look_early(encoded(), request, it.clock.now(), start_trace(), Received(0.9, 80))

    assert run(scenario) == (None, False)


def test_baselines_treat_a_partial_image_as_a_whole_one(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, SURE, baseline=routed("split")) as it:
            fields: dict[str, Any] = {"target": Quality.FAST, "deadline_ms": 20_000.0, "on_miss": OnMiss.FAIL}
            return await it.ask(received=Received(0.1, 27), **fields)

    answer = run(scenario)
    assert (answer.tier, answer.received_fraction, answer.degraded) == (Tier.EDGE, 0.1, False)


# ------------------------------------------------------------------------------------------------------ settings


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"policy": "fastest"},
            r"edge.policy: expected one of hawkvision, all-dc, all-edge, infaas, split, static, got 'fastest'",
        ),
        ({"policy": "all-dc"}, "missing edge.datacenter_url"),
        ({"policy": "split"}, "missing edge.datacenter_url"),
        ({"static_threshold": "0.5"}, "edge.static_threshold belongs to edge.policy = 'static'"),
        (
            {"policy": "static", "resident_memory_mb": "5", "datacenter_url": "http://h"},
            "belongs to edge.policy = 'infaas'",
        ),
        ({"policy": "static", "static_threshold": "1.5"}, r"\$\.static_threshold"),
        ({"deadline_fallback": "true"}, "edge.deadline_fallback belongs to other policies than 'hawkvision'"),
        ({"policy": "infaas", "resident_memory_mb": "0"}, r"\$\.resident_memory_mb"),
        ({"policy": "infaas", "backend": "fpga-ref"}, "edge.backend = 'fpga-ref' runs the quantised variants only"),
    ],
)
def test_settings_that_contradict_the_policy_are_refused(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(EdgeConfig, overrides=settings, environ={})


def test_a_baseline_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of hawkvision, got 'static'; a package with an entry point"):
        load_config(EdgeConfig, overrides={"policy": "static"}, environ={})


def test_a_node_says_under_which_policy_it_runs(peer: Peer) -> None:
    peer.delay_s, peer.status, peer.garbage = 0.0, 200, False
    words = (
        "--port",
        "0",
        "--backend",
        "noop",
        "--datacenter-url",
        peer.url,
        "--policy",
        "static",
        "--static-threshold",
        "1",
    )
    with running("edge", *words, env=with_baselines()) as node:
        caller = Caller(node)
        listed = caller.get("/v1/targets").json
        answer = caller.classify(encoded(), "quality=fast").json
        counted = caller.get("/metrics").body.decode()
        caller.close()
        said = node.output
        run(lambda: until(lambda: "policy: static" in said()))
    assert listed["policy"] == "static"
    assert {entry["status"] for entry in listed["targets"]} == {"best_effort"}
    assert (answer["tier"], answer["reason"]) == ("datacenter", "low_confidence")
    assert 'hawkvision_escalations_total{reason="low_confidence",task="imagenet"} 1.0' in counted
