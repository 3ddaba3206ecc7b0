"""Routes of images that crossed a lossy link: which condition counts, what is kept, and what is only tried."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.certification.profile import ReceivedCondition, threshold_value
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import without_guarantee
from hawkvision.core.errors import TargetUnreachable
from hawkvision.core.types import (
    WHOLE,
    AccuracyStatus,
    Basis,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Quality,
    Received,
    StatusReason,
    Target,
)
from hawkvision.guarantee.answered import stated_drop
from tests.hawkvision.cascade.synthetic import make_profile, make_received_profile, site_of

PROFILE = make_received_profile()
POLICY = Policy(PROFILE, "small", "large")
PAIR = PROFILE.pairs[0]
FRACTIONS = st.floats(0.0, 1.0)
RECEIVED = st.builds(Received, FRACTIONS, st.one_of(st.none(), st.integers(1, 100)))
TARGETS: st.SearchStrategy[Target] = st.one_of(
    st.builds(MaxAccuracyDrop, FRACTIONS),
    st.builds(MinAccuracy, st.floats(0.0, POLICY.best_accuracy.value)),
    st.builds(MinConfidence, FRACTIONS),
    st.sampled_from(Quality),
)


def condition(quality: int, fraction: float) -> ReceivedCondition:
    return next(c for c in PAIR.received if (c.min_quality, c.min_received_fraction) == (quality, fraction))


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (Received(1.0, 80), (80, 1.0)),
        (Received(1.0, 95), (80, 1.0)),
        (Received(0.999, None), (80, 0.75)),
        (Received(0.75, 80), (80, 0.75)),
        (Received(0.74, 80), (80, 0.0)),
        (Received(1.0, 79), (27, 1.0)),
        (Received(0.95, 27), (27, 0.6)),
        (Received(0.59, 27), None),
        (Received(1.0, 26), None),
    ],
)
def test_quality_is_rounded_down_to_a_class_and_then_the_fraction_to_a_band(
    received: Received, expected: tuple[int, float] | None
) -> None:
    found = PAIR.condition(received)
    assert (None if found is None else (found.min_quality, found.min_received_fraction)) == expected


@given(RECEIVED)
def test_the_condition_never_flatters_what_was_received(received: Received) -> None:
    found = PAIR.condition(received)
    assert found is None or found.min_received_fraction <= received.fraction
    assert found is None or received.quality is None or found.min_quality <= received.quality


@given(TARGETS)
def test_a_whole_image_is_routed_as_if_there_were_no_links(target: Target) -> None:
    assert POLICY.route(target, WHOLE) == Policy(make_profile(), "small", "large").route(target)


def test_a_kept_target_has_the_threshold_guarantee_and_temperature_of_its_condition() -> None:
    route, found = POLICY.route(MaxAccuracyDrop(stated_drop(0.05)), Received(0.8, 80)), condition(80, 0.75)
    kept = next(c for c in found.certificates if c.max_drop == 0.05)
    assert (route.threshold, route.temperature) == (threshold_value(kept.threshold), found.edge_temperature)
    guarantee = route.guarantee
    assert (guarantee.status, guarantee.basis, guarantee.max_drop, guarantee.delta, guarantee.n) == (
        AccuracyStatus.CERTIFIED, Basis.LABELLED, stated_drop(0.05), 0.05, kept.n,
    )  # fmt: skip
    assert not route.below_target
    assert route.controls is not None


def test_a_target_that_only_escalating_everything_keeps_claims_nothing_for_no_audit_sees_what_the_link_lost() -> None:
    found = condition(27, 0.6)
    route = POLICY.route(MaxAccuracyDrop(stated_drop(found.best.max_drop) + 1e-6), Received(0.65, 27))
    assert route.direct
    assert (route.below_target, route.guarantee.status, route.guarantee.status_reason) == (
        False, AccuracyStatus.BEST_EFFORT, StatusReason.UNMONITORED,
    )  # fmt: skip
    assert route.guarantee.max_drop is None


def test_a_target_that_nothing_keeps_is_short_and_accepts_what_costs_no_more_than_it_allows() -> None:
    route, found = POLICY.route(MaxAccuracyDrop(stated_drop(0.04)), Received(0.65, 27)), condition(27, 0.6)
    accepting = next(c for c in found.accept_certificates if c.max_drop == 0.04)
    assert route.threshold == threshold_value(accepting.threshold)
    assert route.below_target
    assert (route.guarantee.status, route.guarantee.max_drop, route.controls) == (
        AccuracyStatus.BEST_EFFORT,
        None,
        None,
    )


@given(TARGETS, RECEIVED)
def test_what_is_guaranteed_is_within_what_was_asked(target: Target, received: Received) -> None:
    route = POLICY.route(target, received)
    if isinstance(target, MaxAccuracyDrop) and route.guarantee.max_drop is not None:
        assert route.guarantee.max_drop <= target.value
    assert not (route.below_target and route.guarantee.status is AccuracyStatus.CERTIFIED)


@given(TARGETS, st.floats(0.0, 0.7499), st.integers(80, 100))
def test_the_edge_is_never_believed_in_the_lowest_band(target: Target, fraction: float, quality: int) -> None:
    route = POLICY.route(target, Received(fraction, quality))
    assert route.threshold == math.inf
    assert route.temperature == condition(80, 0.0).edge_temperature


@given(TARGETS)
def test_without_conditions_no_received_image_is_believed(target: Target) -> None:
    assert Policy(make_profile(), "small", "large").route(target, Received(0.99, 80)).direct


@given(FRACTIONS, FRACTIONS, RECEIVED)
def test_a_looser_target_is_kept_wherever_a_stricter_one_is(first: float, second: float, received: Received) -> None:
    strict, loose = (POLICY.route(MaxAccuracyDrop(drop), received) for drop in sorted((first, second)))
    assert strict.below_target or not loose.below_target
    if strict.below_target == loose.below_target:
        assert strict.threshold >= loose.threshold


def test_qualities_mean_what_they_mean_on_whole_images() -> None:
    received, found = Received(1.0, 80), condition(80, 1.0)
    assert found.fast is not None
    fast, balanced, best = (POLICY.route(quality, received) for quality in Quality)
    assert (fast.threshold, fast.guarantee.max_drop) == (-math.inf, stated_drop(found.fast.max_drop))
    assert balanced.guarantee.max_drop is not None
    assert balanced.guarantee.max_drop <= PAIR.conditions[0].balanced.max_drop
    assert best.direct
    assert best.below_target
    assert best.guarantee == without_guarantee(Quality.BEST, StatusReason.PARTIAL_IMAGE)


def test_absolute_targets_are_counted_from_whole_images_and_checked_where_they_were_received() -> None:
    found = condition(80, 0.75)
    easy = POLICY.route(MinAccuracy(found.edge_accuracy.low), Received(0.8, 80))
    assert (easy.threshold, easy.guarantee.status) == (-math.inf, AccuracyStatus.BEST_EFFORT)
    certain = POLICY.route(MinAccuracy(POLICY.best_accuracy.low - 0.06), Received(0.8, 80))
    assert certain.threshold == POLICY.route(MaxAccuracyDrop(0.06), Received(0.8, 80)).threshold
    assert POLICY.route(MinAccuracy(POLICY.best_accuracy.value), Received(0.8, 80)).below_target
    with pytest.raises(TargetUnreachable):
        POLICY.route(MinAccuracy(POLICY.best_accuracy.value + 0.001), Received(0.8, 80))


@given(FRACTIONS)
def test_a_confidence_is_compared_at_the_conditions_temperature(confidence: float) -> None:
    route = POLICY.route(MinConfidence(confidence), Received(1.0, 27))
    assert (route.threshold, route.by_confidence, route.below_target) == (confidence, True, False)
    assert route.temperature == condition(27, 1.0).edge_temperature
    assert 0.0 <= route.escalation <= 1.0


@given(TARGETS.filter(lambda target: not isinstance(target, MinAccuracy)), RECEIVED)
def test_a_sites_certificates_guarantee_nothing_of_received_images(target: Target, received: Received) -> None:
    there = Policy(PROFILE, "small", "large", site=site_of(PROFILE)).route(target, received)
    here = POLICY.route(target, received)
    if received != WHOLE:
        assert there.threshold == here.threshold
        assert (there.guarantee.status, there.guarantee.max_drop) == (AccuracyStatus.BEST_EFFORT, None)
        assert there.controls is None


def test_every_certified_target_is_monitored_in_every_condition() -> None:
    watched = 0
    for quality, fraction in ((80, 1.0), (80, 0.8), (27, 1.0), (27, 0.65)):
        for target in (*Quality, *(MaxAccuracyDrop(d / 100) for d in range(1, 60))):
            route = POLICY.route(target, Received(fraction, quality))
            if route.guarantee.status is AccuracyStatus.CERTIFIED:
                assert route.controls is not None, target
                assert route.controls.edge_claims is not None
                assert route.threshold in [claim.threshold for claim in route.controls.edge_claims.claims]
                watched += 1
    assert watched > 50
