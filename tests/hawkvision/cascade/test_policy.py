"""Targets mapped to routes, and decisions under deadlines."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.certification.profile import Certificate, Pair, Profile, threshold_value
from hawkvision.cascade.decision import Accept, Escalate, Miss, decide
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import Route, without_guarantee
from hawkvision.core.clock import Deadline
from hawkvision.core.errors import ManifestError, TargetUnreachable
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Basis,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    OnMiss,
    Quality,
    Reason,
    StatusReason,
)
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.bets import Claim
from tests.hawkvision.cascade.synthetic import make_profile

PROFILE = make_profile()
POLICY = Policy(PROFILE, "small", "large")
A_EDGE, A_BEST = POLICY.edge_accuracy.value, POLICY.best_accuracy.value
THREE = make_profile(intermediate=True)


def route_at(threshold: float) -> Route:
    guarantee = AccuracyGuarantee(Quality.BALANCED, AccuracyStatus.CERTIFIED, Basis.SHIPPED, 0.02, delta=0.05, n=700)
    return Route(threshold, guarantee, 0.3)


def test_fast_never_escalates_and_best_always_does() -> None:
    assert POLICY.route(Quality.FAST).threshold == -math.inf
    assert POLICY.route(Quality.BEST).direct
    assert -math.inf < POLICY.route(Quality.BALANCED).threshold < math.inf


def test_every_quality_carries_its_certified_drop() -> None:
    fast, balanced, best = (POLICY.route(q).guarantee for q in Quality)
    assert fast.max_drop is not None
    assert balanced.max_drop is not None
    assert fast.max_drop > balanced.max_drop > 0.0
    assert best.max_drop == 0.0
    assert {fast.status, balanced.status, best.status} == {AccuracyStatus.CERTIFIED}


@pytest.mark.parametrize("profile", [PROFILE, THREE])
def test_a_guarantee_says_what_it_rests_on_and_what_watching_without_labels_holds_the_drop_to(profile: Profile) -> None:
    fast = Policy(profile, "small", "large").route(Quality.FAST).guarantee
    certificate = profile.pairs[0].conditions[0].fast
    assert (fast.basis, fast.n, fast.labels, fast.since, fast.until) == (
        Basis.SHIPPED, certificate.n, certificate.n, None, None,
    )  # fmt: skip
    assert fast.watched_max_drop == stated_drop(certificate.edge_disagreement) > certificate.observed_drop
    loose = Policy(profile, "small", "large", agreement_bounds_drop=False)
    assert {loose.route(q).guarantee.watched_max_drop for q in Quality} == {None}


def test_both_stages_below_the_reference_may_differ_from_it_as_often_as_was_certified() -> None:
    policy = Policy(THREE, "small", "large")
    certificates = THREE.pairs[0].conditions[0].certificates
    both = [c for c in certificates if c.intermediate_disagreement and c.basis != "profile"]
    for certificate in both:
        route = policy.route(MaxAccuracyDrop(stated_drop(certificate.max_drop)))
        assert certificate.intermediate_disagreement is not None
        watched = certificate.edge_disagreement + certificate.intermediate_disagreement
        assert route.guarantee.watched_max_drop == stated_drop(watched)
    assert both


@given(st.floats(0.0, 1.0))
def test_certified_drop_never_exceeds_what_was_asked(max_drop: float) -> None:
    guarantee = POLICY.route(MaxAccuracyDrop(max_drop)).guarantee
    assert guarantee.status is AccuracyStatus.CERTIFIED
    assert guarantee.max_drop is not None
    assert guarantee.max_drop <= max_drop


@given(st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_a_looser_target_never_escalates_more(first: float, second: float) -> None:
    strict, loose = sorted((first, second))
    assert POLICY.route(MaxAccuracyDrop(strict)).threshold >= POLICY.route(MaxAccuracyDrop(loose)).threshold


@given(st.floats(0.0, A_BEST))
def test_an_accuracy_is_routed_by_the_drop_that_it_allows_and_never_certified(accuracy: float) -> None:
    route = POLICY.route(MinAccuracy(accuracy))
    assert route.guarantee == without_guarantee(MinAccuracy(accuracy), StatusReason.MIN_ACCURACY)
    if accuracy <= A_EDGE:
        assert (route.threshold, route.claims) == (-math.inf, POLICY.route(Quality.FAST).claims)
    else:
        drops = [MaxAccuracyDrop(max(0.0, best - accuracy)) for best in (POLICY.best_accuracy.low, A_BEST)]
        assert route.threshold in [POLICY.route(drop).threshold for drop in drops]


def test_a_node_without_datacenter_refuses_what_only_the_datacenter_reaches() -> None:
    alone = Policy(PROFILE, "small", "large", alone=True)
    with pytest.raises(TargetUnreachable) as caught:
        alone.route(MinAccuracy(A_EDGE + 0.001))
    assert caught.value.maximum == A_EDGE


def test_accuracy_above_the_cascade_is_refused_with_the_maximum() -> None:
    with pytest.raises(TargetUnreachable, match="reference stage large") as caught:
        POLICY.route(MinAccuracy(min(1.0, A_BEST + 0.01)))
    assert caught.value.maximum == A_BEST


def test_confidence_target_compares_probabilities_and_guarantees_only_best_effort() -> None:
    route = POLICY.route(MinConfidence(0.9))
    assert route.by_confidence
    assert route.threshold == 0.9
    assert route.guarantee.status is AccuracyStatus.BEST_EFFORT


def test_unknown_pair_names_the_command_that_certifies_it() -> None:
    with pytest.raises(ManifestError, match=r"hawkvision calibrate --task \w+ --edge large --best small"):
        Policy(PROFILE, "large", "small")


NOW = 1_000.0
UNSURE = Escalate(Reason.LOW_CONFIDENCE)


@pytest.mark.parametrize(
    ("threshold", "score", "left_ms", "reachable", "on_miss", "expected"),
    [
        (0.7, 0.7, None, False, OnMiss.DEGRADE, Accept()),
        (0.7, 0.5, None, True, OnMiss.DEGRADE, UNSURE),
        (math.inf, 0.999, None, True, OnMiss.DEGRADE, Escalate(Reason.TARGET)),
        *((0.7, 0.1, 90.0, False, on_miss, Accept(degraded=True)) for on_miss in OnMiss),
        (0.7, 0.1, -1.0, True, OnMiss.DEGRADE, Accept(degraded=True)),
        (0.7, 0.1, -1.0, True, OnMiss.WAIT, UNSURE),
        (0.7, 0.1, -1.0, True, OnMiss.FAIL, Miss()),
    ],
)
def test_an_unsure_answer_is_escalated_if_there_is_time_and_a_datacenter(
    threshold: float, score: float, left_ms: float | None, reachable: bool, on_miss: OnMiss, expected: object
) -> None:
    cutoff = None if left_ms is None else Deadline.after_ms(left_ms, NOW)
    found = decide(route_at(threshold), score, cutoff=cutoff, now=NOW, reachable=reachable, on_miss=on_miss)
    assert found == expected


@pytest.mark.parametrize(
    ("left_ms", "reachable", "on_miss", "expected"),
    [
        (None, True, OnMiss.DEGRADE, Escalate(Reason.SUSPENDED)),
        (None, False, OnMiss.DEGRADE, Accept(degraded=True)),
        (-1.0, True, OnMiss.DEGRADE, Accept(degraded=True)),
        (-1.0, True, OnMiss.FAIL, Miss()),
    ],
)
def test_while_suspended_no_score_is_accepted_but_for_want_of_the_reference_stage(
    left_ms: float | None, reachable: bool, on_miss: OnMiss, expected: object
) -> None:
    cutoff = None if left_ms is None else Deadline.after_ms(left_ms, NOW)
    for route in (route_at(0.7), route_at(-math.inf)):
        assert (
            decide(route, 1.0, cutoff=cutoff, now=NOW, reachable=reachable, on_miss=on_miss, suspended=True) == expected
        )


def test_a_deadline_that_fits_escalates_until_its_cutoff() -> None:
    cutoff = Deadline.after_ms(75.0, NOW)
    decision = decide(route_at(0.7), 0.1, cutoff=cutoff, now=NOW, reachable=True, on_miss=OnMiss.DEGRADE)
    assert decision == Escalate(Reason.LOW_CONFIDENCE, cutoff)


def with_intermediate(policy: Policy) -> Certificate:
    """A certificate that asks the intermediate stage, with thresholds that can be compared with scores."""
    for certificate in policy.pair.conditions[0].certificates:
        bars = threshold_value(certificate.threshold), threshold_value(certificate.intermediate_threshold)
        if certificate.intermediate_disagreement is not None and all(map(math.isfinite, bars)):
            return certificate
    raise AssertionError("the synthetic cascade certifies no intermediate stage")


def test_a_certificate_with_an_intermediate_threshold_asks_the_intermediate_stage_first() -> None:
    policy = Policy(THREE, "small", "large")
    certificate = with_intermediate(policy)
    route = policy.route(MaxAccuracyDrop(stated_drop(certificate.max_drop)))
    assert route.intermediate is not None
    assert route.intermediate.stage == "medium"
    assert (route.threshold, route.intermediate.threshold) == (
        certificate.threshold,
        certificate.intermediate_threshold,
    )
    assert (route.escalation, route.to_best) == (certificate.escalation, certificate.to_best)
    assert route.to_best < route.escalation


def test_a_route_carries_what_the_certificate_says_of_each_stage() -> None:
    policy = Policy(THREE, "small", "large")
    certificate = with_intermediate(policy)
    route = policy.route(MaxAccuracyDrop(stated_drop(certificate.max_drop)))
    assert route.claims is not None
    edge_claims, intermediate_claims = route.claims.edge, route.claims.intermediate
    assert edge_claims is not None
    assert intermediate_claims is not None
    assert edge_claims.delta == certificate.delta
    logs = sum(c.intermediate_disagreement is not None for c in policy.pair.conditions[0].certificates)
    assert intermediate_claims.delta <= certificate.delta / logs, "each of these certificates has a log of its own"
    assert certificate.intermediate_disagreement is not None
    bars = threshold_value(certificate.threshold), threshold_value(certificate.intermediate_threshold)
    assert Claim(bars[0], certificate.edge_disagreement) in edge_claims.claims
    assert intermediate_claims.claims == (Claim(bars[1], certificate.intermediate_disagreement),)


def test_every_target_certified_below_the_reference_stage_is_monitored() -> None:
    watched = 0
    for policy in (POLICY, Policy(THREE, "small", "large")):
        for target in (*Quality, *(MaxAccuracyDrop(drop / 200) for drop in range(1, 200))):
            route = policy.route(target)
            gives_up = route.guarantee.max_drop is None or route.guarantee.max_drop > 0.0
            if route.guarantee.status is AccuracyStatus.CERTIFIED and gives_up:
                watched += 1
                assert route.claims is not None, target
                assert route.claims.edge is not None or route.claims.intermediate is not None
                if route.claims.edge is not None:
                    accepts = [claim.threshold for claim in route.claims.edge.claims]
                    assert route.threshold in accepts, target
    assert watched > 100


@pytest.mark.parametrize("target", [Quality.BEST, MinConfidence(0.7)])
def test_targets_that_no_certificate_stands_behind_are_not_watched(target: Quality | MinConfidence) -> None:
    assert POLICY.route(target).claims is None


@given(st.sampled_from([*Quality]), st.floats(0.0, 1.0))
def test_every_guarantee_of_every_target_is_whole(quality: Quality, value: float) -> None:
    """A held guarantee says what is held, how surely and on how many images, except where nothing can be lost."""
    for target in (quality, MaxAccuracyDrop(value), MinConfidence(value), MinAccuracy(min(value, A_BEST))):
        route = POLICY.route(target)
        guarantee = route.guarantee
        assert guarantee.target == target
        assert (guarantee.status is AccuracyStatus.CERTIFIED) == (guarantee.status_reason is None)
        if guarantee.status is AccuracyStatus.CERTIFIED and not (route.direct and guarantee.max_drop == 0.0):
            assert guarantee.max_drop is not None
            assert guarantee.delta is not None
            assert guarantee.n is not None


def test_a_cascade_that_certifies_nothing_guarantees_nothing_but_the_best_stage() -> None:
    pair: Pair = PROFILE.pairs[0]
    condition = pair.conditions[0]
    never_certified = tuple(
        msgspec.structs.replace(c, threshold="always", intermediate_threshold="always", escalation=1.0, to_best=1.0)
        for c in condition.certificates
    )
    bare = msgspec.structs.replace(
        PROFILE,
        pairs=(
            msgspec.structs.replace(
                pair, conditions=(msgspec.structs.replace(condition, certificates=never_certified),)
            ),
        ),
    )
    route = Policy(bare, "small", "large").route(MaxAccuracyDrop(0.05))
    assert (route.direct, route.guarantee.max_drop, route.claims) == (True, 0.0, None)


def with_first() -> Profile:
    """The synthetic cascade, whose edge stage is made of a stage that the profile knows by itself, and of others."""
    by_itself = msgspec.structs.replace(PROFILE.stage("small"), name="first", temperature=1.75)
    fast = msgspec.structs.replace(PROFILE.pair("small", "large").conditions[0].fast, max_drop=0.4)
    condition = msgspec.structs.replace(PROFILE.pair("small", "large").conditions[0], fast=fast)
    pair = msgspec.structs.replace(PROFILE.pair("small", "large"), edge="first", conditions=(condition,))
    return msgspec.structs.replace(PROFILE, stages=(*PROFILE.stages, by_itself), pairs=(*PROFILE.pairs, pair))


def test_the_first_member_of_an_edge_stage_answers_fast_alone_with_its_own_guarantee() -> None:
    policy = Policy(with_first(), "small", "large", first="first")
    route = policy.route(Quality.FAST)
    assert (route.first_only, route.temperature, route.threshold) == (True, 1.75, -math.inf)
    assert (route.guarantee.max_drop, route.guarantee.status) == (stated_drop(0.4), AccuracyStatus.CERTIFIED)
    assert not any(policy.route(each).first_only for each in (Quality.BALANCED, Quality.BEST, MaxAccuracyDrop(0.05)))


@pytest.mark.parametrize("first", [None, "small", "unknown"])
def test_fast_is_the_whole_stages_where_nothing_is_known_of_the_first_by_itself(first: str | None) -> None:
    fast = Policy(with_first(), "small", "large", first=first).route(Quality.FAST)
    assert fast == POLICY.route(Quality.FAST)
    assert not fast.first_only
