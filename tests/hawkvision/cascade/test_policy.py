"""Targets mapped to routes, and decisions under deadlines."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.policy import ANSWER_MARGIN_MS, Accept, Escalate, Miss, Policy, Route, decide, weakened
from hawkvision.errors import ManifestError, TargetUnreachable
from hawkvision.types import (
    AccuracyPromise,
    Basis,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    OnMiss,
    PromiseStatus,
    Quality,
    Reason,
)
from tests.hawkvision.cascade.synthetic import make_profile

PROFILE = make_profile()
POLICY = Policy(PROFILE, "small", "large")
A_EDGE, A_BEST = POLICY.edge_accuracy.value, POLICY.best_accuracy.value


def route_at(threshold: float) -> Route:
    promise = AccuracyPromise(Quality.BALANCED, PromiseStatus.HELD, Basis.LABELLED, 0.02, 0.05, 700)
    return Route(threshold, promise, 0.3)


def test_synthetic_ladder_has_a_gap_to_close() -> None:
    assert A_BEST - A_EDGE > 0.1


def test_fast_never_escalates_and_best_always_does() -> None:
    assert POLICY.route(Quality.FAST).threshold == -math.inf
    assert POLICY.route(Quality.BEST).direct
    assert -math.inf < POLICY.route(Quality.BALANCED).threshold < math.inf


def test_every_quality_carries_its_certified_drop() -> None:
    fast, balanced, best = (POLICY.route(q).promise for q in Quality)
    assert fast.max_drop is not None
    assert balanced.max_drop is not None
    assert fast.max_drop > balanced.max_drop > 0.0
    assert best.max_drop == 0.0
    assert {fast.status, balanced.status, best.status} == {PromiseStatus.HELD}


@given(st.floats(0.0, 1.0))
def test_certified_drop_never_exceeds_what_was_asked(max_drop: float) -> None:
    promise = POLICY.route(MaxAccuracyDrop(max_drop)).promise
    assert promise.status is PromiseStatus.HELD
    assert promise.max_drop is not None
    assert promise.max_drop <= max_drop


@given(st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_a_looser_target_never_escalates_more(first: float, second: float) -> None:
    strict, loose = sorted((first, second))
    assert POLICY.route(MaxAccuracyDrop(strict)).threshold >= POLICY.route(MaxAccuracyDrop(loose)).threshold


def test_no_drop_at_all_goes_straight_to_the_best_rung() -> None:
    assert POLICY.route(MaxAccuracyDrop(0.0)).direct


def test_accuracy_the_edge_was_measured_to_have_is_answered_there() -> None:
    route = POLICY.route(MinAccuracy(A_EDGE - 0.001))
    assert route.threshold == -math.inf
    assert route.promise.status is PromiseStatus.BEST_EFFORT, (
        "measured, not certified, this close to the edge's accuracy"
    )
    assert POLICY.route(MinAccuracy(0.3)).promise.status is PromiseStatus.HELD


def test_accuracy_between_edge_and_best_uses_a_certificate() -> None:
    route = POLICY.route(MinAccuracy(A_BEST - 0.05))
    assert route.promise.basis is Basis.LABELLED
    assert route.promise.max_drop is not None
    assert route.promise.max_drop <= 0.05 + 1e-9
    assert 0.0 < route.escalation < 1.0


@given(st.floats(0.0, A_BEST))
def test_absolute_accuracy_is_held_only_from_the_lower_end_of_what_was_measured(accuracy: float) -> None:
    promise = POLICY.route(MinAccuracy(accuracy)).promise
    if promise.status is PromiseStatus.HELD:
        assert promise.delta is not None
        assert promise.max_drop is not None
        by_drop = accuracy <= POLICY.best_accuracy.low - promise.max_drop + 1e-6
        assert by_drop or accuracy <= POLICY.edge_accuracy.low
        assert promise.delta >= 0.025


def test_listed_accuracies_map_back_to_the_drop_they_were_listed_for() -> None:
    for certificate in POLICY.pair.conditions[0].certificates:
        listed = round(A_BEST - certificate.max_drop, 6)
        if listed > A_EDGE and certificate.threshold != "always":
            assert POLICY.route(MinAccuracy(listed)).promise.max_drop == certificate.max_drop


def test_a_node_without_datacenter_refuses_what_only_the_datacenter_reaches() -> None:
    alone = Policy(PROFILE, "small", "large", alone=True)
    with pytest.raises(TargetUnreachable) as caught:
        alone.route(MinAccuracy(A_EDGE + 0.001))
    assert caught.value.maximum == A_EDGE


def test_accuracy_above_the_ladder_is_refused_with_the_maximum() -> None:
    with pytest.raises(TargetUnreachable, match="best rung large") as caught:
        POLICY.route(MinAccuracy(min(1.0, A_BEST + 0.01)))
    assert caught.value.maximum == A_BEST


def test_confidence_target_compares_probabilities_and_promises_only_best_effort() -> None:
    route = POLICY.route(MinConfidence(0.9))
    assert route.by_confidence
    assert route.threshold == 0.9
    assert route.promise.status is PromiseStatus.BEST_EFFORT


def test_unknown_pair_names_the_command_that_certifies_it() -> None:
    with pytest.raises(ManifestError, match="hawkvision calibrate --edge large --best small"):
        Policy(PROFILE, "large", "small")


def test_sure_enough_is_accepted_whatever_the_link_does() -> None:
    decision = decide(route_at(0.7), 0.7, slack_ms=None, predicted_ms=None, on_miss=OnMiss.DEGRADE)
    assert decision == Accept()


def test_unsure_without_deadline_escalates_without_cutoff() -> None:
    decision = decide(route_at(0.7), 0.5, slack_ms=None, predicted_ms=50.0, on_miss=OnMiss.DEGRADE)
    assert decision == Escalate(Reason.LOW_CONFIDENCE)


def test_direct_route_says_that_the_target_is_the_reason() -> None:
    decision = decide(route_at(math.inf), 0.999, slack_ms=None, predicted_ms=50.0, on_miss=OnMiss.DEGRADE)
    assert decision == Escalate(Reason.TARGET)


def test_unreachable_datacenter_degrades_and_never_fails() -> None:
    for on_miss in OnMiss:
        assert decide(route_at(0.7), 0.1, slack_ms=90.0, predicted_ms=None, on_miss=on_miss) == Accept(degraded=True)


@pytest.mark.parametrize(
    ("on_miss", "expected"),
    [
        (OnMiss.DEGRADE, Accept(degraded=True)),
        (OnMiss.WAIT, Escalate(Reason.LOW_CONFIDENCE)),
        (OnMiss.FAIL, Miss()),
    ],
)
def test_deadline_that_does_not_fit_follows_on_miss(on_miss: OnMiss, expected: object) -> None:
    assert decide(route_at(0.7), 0.1, slack_ms=40.0, predicted_ms=60.0, on_miss=on_miss) == expected


def test_deadline_that_fits_escalates_until_just_before_it() -> None:
    decision = decide(route_at(0.7), 0.1, slack_ms=80.0, predicted_ms=60.0, on_miss=OnMiss.DEGRADE)
    assert decision == Escalate(Reason.LOW_CONFIDENCE, cutoff_ms=80.0 - ANSWER_MARGIN_MS)


def test_a_weakened_promise_keeps_the_target_and_claims_nothing() -> None:
    promise = weakened(route_at(0.5).promise)
    assert promise.target is Quality.BALANCED
    assert promise == AccuracyPromise(Quality.BALANCED, PromiseStatus.BEST_EFFORT, Basis.PROFILE)
