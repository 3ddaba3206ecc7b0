"""Routes of images that crossed a lossy link: which condition counts, and which threshold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.certification.profile import ReceivedCondition, threshold_value
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import without_guarantee
from hawkvision.core.errors import TargetUnreachable
from hawkvision.core.types import (
    WHOLE,
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


@pytest.mark.parametrize(
    ("drop", "place", "received", "below_target"),
    [
        (0.05, (80, 0.75), Received(0.8, 80), False),
        (0.3, (27, 0.6), Received(0.65, 27), False),
        (0.04, (27, 0.6), Received(0.65, 27), True),
        (0.0, (27, 0.6), Received(0.65, 27), True),
    ],
)
def test_a_drop_is_routed_by_the_largest_that_was_measured_below_it(
    drop: float, place: tuple[int, float], received: Received, below_target: bool
) -> None:
    """Against the original if it can be met so, else beyond what the link lost."""
    route, found = POLICY.route(MaxAccuracyDrop(drop), received), condition(*place)
    usable = [each for each in (found.beyond_link if below_target else found.thresholds) if each.max_drop <= drop]
    expected = threshold_value(usable[-1].threshold) if usable else math.inf
    assert (route.threshold, route.below_target) == (expected, below_target)
    assert route.temperature == found.edge_temperature


def test_a_target_that_only_escalating_everything_meets_is_escalated() -> None:
    route = POLICY.route(MaxAccuracyDrop(condition(27, 0.6).thresholds[0].max_drop + 1e-6), Received(0.65, 27))
    assert (route.direct, route.below_target) == (True, False)


@given(TARGETS, RECEIVED.filter(lambda received: received != WHOLE))
def test_nothing_is_certified_of_a_received_image(target: Target, received: Received) -> None:
    for policy in (POLICY, Policy(PROFILE, "small", "large", site=site_of(PROFILE))):
        if isinstance(target, MinAccuracy) and target.value > policy.best_accuracy.value:
            continue
        route = policy.route(target, received)
        assert route.guarantee == without_guarantee(target, StatusReason.PARTIAL_IMAGE)
        assert route.claims is None


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
    fast, balanced, best = (POLICY.route(quality, received) for quality in Quality)
    assert (fast.threshold, fast.below_target) == (-math.inf, False)
    assert balanced == replace(
        POLICY.route(MaxAccuracyDrop(stated_drop(PAIR.conditions[0].balanced.max_drop)), received),
        guarantee=balanced.guarantee,
    )
    assert (best.direct, best.below_target, best.temperature) == (True, True, found.edge_temperature)


def test_absolute_targets_are_counted_from_whole_images_and_checked_where_they_were_received() -> None:
    found, received = condition(80, 0.75), Received(0.8, 80)
    assert POLICY.route(MinAccuracy(found.edge_accuracy), received).threshold == -math.inf
    certain = POLICY.route(MinAccuracy(POLICY.best_accuracy.low - 0.06), received)
    assert certain.threshold == POLICY.route(MaxAccuracyDrop(0.06), received).threshold
    assert POLICY.route(MinAccuracy(POLICY.best_accuracy.value), received).below_target
    with pytest.raises(TargetUnreachable):
        POLICY.route(MinAccuracy(POLICY.best_accuracy.value + 0.001), received)


@given(FRACTIONS)
def test_a_confidence_is_compared_at_the_conditions_temperature(confidence: float) -> None:
    route = POLICY.route(MinConfidence(confidence), Received(1.0, 27))
    assert (route.threshold, route.by_confidence, route.below_target) == (confidence, True, False)
    assert route.temperature == condition(27, 1.0).edge_temperature
    assert 0.0 <= route.escalation <= 1.0


def test_a_part_of_an_image_helps_only_while_the_reference_stage_reads_it_better_than_the_edge_the_whole() -> None:
    policy = Policy(make_received_profile(), "small", "large")
    gap = policy.best_accuracy.value - policy.edge_accuracy.value
    for received in (Received(0.8, 80), Received(0.1, 80)):
        condition = policy.pair.condition(received)
        assert condition is not None
        expected = condition.thresholds[0].max_drop < gap
        assert policy.datacenter_is_better(WHOLE, received) is expected
    assert policy.datacenter_is_better(WHOLE, Received(0.1, 80)) is False
    assert policy.datacenter_is_better(Received(0.1, 80), Received(0.8, 80)) is True, "the edge had less"
    assert Policy(make_profile(), "small", "large").datacenter_is_better(WHOLE, Received(0.8, 80)) is None
