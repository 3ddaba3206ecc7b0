"""The controller of one stream: thresholds that follow disagreement, alarms that are rarely false, debts repaid."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.online import (
    AUDIT_SHARE,
    GAIN,
    LARGEST_DEBT,
    LEAST_AUDITED,
    LEAST_VOID,
    State,
    StreamControl,
    Terms,
)

KNOTS = tuple(i / 64 for i in range(65))
CERTIFIED = 0.4
DISAGREEMENTS = tuple(0.3 * (1 - s) ** 2 for s in KNOTS)
# Scores are uniform, so that accepted answers differ in ∫ 0.3 (1 − s)² ds = 0.1 (1 − τ)³ of the requests.
TRUE_DISAGREEMENT = 0.1 * (1 - CERTIFIED) ** 3
LARGEST_ESTIMATE = 1 / (AUDIT_SHARE * LEAST_AUDITED)
TERMS = Terms(
    key="certificate",
    threshold=CERTIFIED,
    max_drop=0.011,
    disagreement=TRUE_DISAGREEMENT,
    difficulty=CERTIFIED,
    scores=KNOTS,
    disagreements=DISAGREEMENTS,
    drops=tuple(d / 2 for d in DISAGREEMENTS),
    delta=0.05,
)
USUAL = replace(TERMS, disagreement=1.3 * TRUE_DISAGREEMENT, difficulty=1.1 * CERTIFIED)
"""Bounds as certificates have them, somewhat above what is true."""


class Traffic(NamedTuple):
    """`differing` multiplies the disagreement that the profile predicts; `harder` > 1 lowers scores."""

    differing: float = 1.0
    harder: float = 1.0


AS_CERTIFIED = Traffic()


class Counts(NamedTuple):
    accepted: int
    audited: int
    differing: int


def drive(control: StreamControl, rng: random.Random, requests: int, traffic: Traffic = AS_CERTIFIED) -> Counts:
    """As an edge node does, with a best rung that always answers."""
    accepted = audited = differing = 0
    for _ in range(requests):
        score = rng.random() ** traffic.harder
        differs = rng.random() < traffic.differing * 0.3 * (1 - score) ** 2
        if score < control.threshold:
            control.escalated(score, differs)
            continue
        probability = control.audit_probability(score)
        audit = rng.random() < probability
        control.accepted(score, probability, differs if audit else None)
        accepted, audited, differing = accepted + 1, audited + audit, differing + differs
    return Counts(accepted, audited, differing)


def until_void(control: StreamControl, rng: random.Random, traffic: Traffic, most: int) -> int:
    """Requests until the alarm, in steps of 50; `most` if none is raised."""
    for seen in range(0, most, 50):
        if control.void:
            return seen
        drive(control, rng, 50, traffic)
    return most


# ------------------------------------------------------------------------------------------------------ the alarm


@pytest.mark.slow
def test_streams_on_the_very_bound_of_what_was_certified_raise_false_alarms_no_oftener_than_delta() -> None:
    alarms = 0
    for seed in range(200):
        control = StreamControl(TERMS)
        drive(control, random.Random(seed), 5_000)
        alarms += control.void
    assert alarms <= TERMS.delta * 200


@pytest.mark.parametrize(
    ("traffic", "within"),
    [(Traffic(differing=8.0), 2_000), (Traffic(differing=4.0), 8_000), (Traffic(harder=2.0), 2_500)],
)
def test_other_traffic_raises_the_alarm(traffic: Traffic, within: int) -> None:
    for seed in range(5):
        control, rng = StreamControl(USUAL), random.Random(seed)
        drive(control, rng, 3_000)
        assert not control.void
        assert until_void(control, rng, traffic, within) < within, f"seed {seed}"


def test_a_long_quiet_past_does_not_delay_the_alarm() -> None:
    young, old = StreamControl(USUAL), StreamControl(USUAL)
    drive(young, random.Random(1), 1_000)
    drive(old, random.Random(1), 20_000)
    delays = [until_void(control, random.Random(2), Traffic(harder=2.0), 5_000) for control in (young, old)]
    assert delays[1] <= 1.5 * delays[0]


def test_after_the_alarm_less_is_accepted_and_the_label_free_target_is_kept() -> None:
    shares = []
    for seed in range(8):
        control, rng = StreamControl(USUAL), random.Random(seed)
        until_void(control, rng, Traffic(differing=8.0), 5_000)
        drive(control, rng, 2_000, Traffic(differing=8.0))
        shares.append(drive(control, rng, 20_000, Traffic(differing=8.0)).differing / 20_000)
        assert control.void
        assert control.threshold > CERTIFIED
    assert sum(shares) / len(shares) <= 1.1 * USUAL.max_drop, "8 times as much would differ at the certified threshold"


def test_the_promise_comes_back_with_the_traffic_but_not_at_once() -> None:
    control, rng = StreamControl(USUAL), random.Random(4)
    until_void(control, rng, Traffic(differing=8.0), 5_000)
    alarmed_at = control.state.void_since
    for _ in range(400):
        if not control.void:
            break
        drive(control, rng, 50)
    assert not control.void
    assert control.state.requests - alarmed_at >= LEAST_VOID
    drive(control, rng, 20_000)
    assert control.bar == pytest.approx(CERTIFIED, abs=0.1)


def test_an_outage_does_not_look_like_easy_traffic() -> None:
    """While the link is down only sure answers are accepted; the others are degraded, and must count as difficult."""
    control, rng = StreamControl(USUAL), random.Random(5)
    until_void(control, rng, Traffic(harder=2.0), 5_000)
    for _ in range(10_000):
        score = rng.random() ** 2
        if score >= control.bar:
            control.accepted(score, control.audit_probability(score), None)
        else:
            control.fell_short(score)
    assert control.void


# ------------------------------------------------------------------------------------------------- the threshold

STEPS = st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans(), st.floats(0.0, 1.0)), min_size=1, max_size=300)


@given(STEPS, st.booleans())
def test_no_sequence_makes_the_average_loss_exceed_its_goal_by_more_than_the_bound(
    steps: list[tuple[float, bool, float]], void: bool
) -> None:
    control, total = StreamControl(TERMS), 0.0
    control.state.void, control.state.alarms = void, int(void)
    goal = TERMS.max_drop if void else max(TERMS.max_drop, TERMS.disagreement)
    for score, differs, draw in steps:
        was_void = control.void
        if score >= control.threshold:
            probability = control.audit_probability(score)
            audited = draw < probability
            total += control.estimate(score, probability, differs if audited else None) - goal
            control.accepted(score, probability, differs if audited else None)
        else:
            total -= goal
            control.escalated(score, differs)
        if control.void != was_void:
            return  # another goal from here on
    assert total <= (1.0 - CERTIFIED) / GAIN + LARGEST_ESTIMATE


@given(STEPS)
def test_the_threshold_never_falls_below_the_certified_one(steps: list[tuple[float, bool, float]]) -> None:
    control = StreamControl(TERMS)
    for score, differs, draw in steps:
        control.accepted(score, control.audit_probability(score), differs if draw < 0.5 else None)
        control.escalated(score, differs)
        if draw < 0.1:
            control.fell_short(score)
        assert control.threshold >= control.bar >= CERTIFIED


def test_answers_that_are_surely_wrong_hardly_pass_however_sure_the_edge_is() -> None:
    """One audit in 200 finds the error, and must pay for the 199 that were not looked at."""
    rng = random.Random(6)
    control = StreamControl(replace(TERMS, max_drop=0.02, disagreement=0.02))
    accepted = 0
    for _ in range(50_000):
        if control.threshold > 1.0:
            control.escalated(1.0, True)
            continue
        accepted += 1
        probability = control.audit_probability(1.0)
        control.accepted(1.0, probability, True if rng.random() < probability else None)
    assert accepted / 50_000 < 0.1


def test_quiet_traffic_stays_near_the_certified_threshold() -> None:
    control, rng = StreamControl(USUAL), random.Random(7)
    counts = drive(control, rng, 20_000)
    assert counts.accepted / 20_000 > 0.75 * (1.0 - CERTIFIED)


# ------------------------------------------------------------------------------------------------------- audits


@pytest.mark.parametrize("share", [AUDIT_SHARE, 0.1])
def test_audits_take_the_share_of_answers_that_was_set_for_them(share: float) -> None:
    control, rng = StreamControl(USUAL, share), random.Random(8)
    counts = drive(control, rng, 20_000)
    assert 0.7 * share < counts.audited / counts.accepted < 1.2 * share


def test_audits_take_less_than_their_share_of_all_requests_even_in_other_traffic() -> None:
    control, rng = StreamControl(USUAL), random.Random(9)
    counts = drive(control, rng, 20_000, Traffic(differing=4.0))
    assert counts.audited / 20_000 <= AUDIT_SHARE


def test_unsure_answers_are_audited_more_and_the_surest_still_now_and_then() -> None:
    control = StreamControl(TERMS)
    chances = [control.audit_probability(score) for score in (0.4, 0.6, 0.8, 1.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] >= AUDIT_SHARE * LEAST_AUDITED


def test_without_audits_disagreement_goes_unseen_and_difficulty_does_not() -> None:
    blind, rng = StreamControl(USUAL, 0.0), random.Random(10)
    assert blind.audit_probability(0.5) == 0.0
    assert until_void(blind, rng, Traffic(harder=2.0), 5_000) < 5_000


@given(st.floats(CERTIFIED, 1.0), st.booleans(), st.floats(0.3, 6.0))
def test_the_estimate_is_right_on_average_whether_the_prediction_is_or_not(
    score: float, differs: bool, correction: float
) -> None:
    control = StreamControl(TERMS)
    control.state.correction = correction
    probability = control.audit_probability(score)
    found = control.estimate(score, probability, differs)
    missed = control.estimate(score, probability, None)
    assert probability * found + (1 - probability) * missed == pytest.approx(float(differs), abs=1e-6)


def test_escalations_correct_the_prediction() -> None:
    control, rng = StreamControl(USUAL), random.Random(11)
    drive(control, rng, 3_000, Traffic(differing=3.0))
    assert 2.0 < control.state.correction < 4.0


# --------------------------------------------------------------------------------------------------------- debt


def test_debt_raises_the_threshold_and_escalations_above_the_bar_repay_it() -> None:
    control, rng = StreamControl(USUAL), random.Random(12)
    for _ in range(40):
        control.fell_short(0.1)
    owed = control.state.debt
    assert owed > 1.0
    assert control.threshold > control.bar
    drive(control, rng, 3_000)
    assert control.state.debt == 0.0
    assert control.threshold == control.bar


def test_escalations_that_were_due_anyway_repay_nothing() -> None:
    control = StreamControl(USUAL)
    control.fell_short(0.1)
    owed = control.state.debt
    control.escalated(0.2, False)
    assert control.state.debt == owed


def test_debt_has_a_bound() -> None:
    control = StreamControl(USUAL)
    for _ in range(10_000):
        control.fell_short(0.0)
    assert control.state.debt == LARGEST_DEBT


# ------------------------------------------------------------------------------------------------------ restarts


def test_a_restored_controller_goes_on_as_if_nothing_had_happened() -> None:
    first, rng = StreamControl(USUAL), random.Random(13)
    drive(first, rng, 3_000, Traffic(differing=8.0))
    first.fell_short(0.1)
    second = StreamControl(USUAL)
    assert second.restore(msgspec.json.decode(msgspec.json.encode(first.state), type=State))
    assert (second.void, second.bar, second.threshold) == (first.void, first.bar, first.threshold)
    for control in (first, second):
        drive(control, random.Random(14), 1_000)
    assert second.state == first.state


def test_state_of_another_certificate_is_left_alone() -> None:
    stranger = StreamControl(replace(USUAL, key="another"))
    stranger.state.void = True
    control = StreamControl(USUAL)
    assert not control.restore(stranger.state)
    assert not control.void


@pytest.mark.parametrize("threshold", [0.0, 1.0, math.nextafter(1.0, 2.0)])
def test_thresholds_at_the_ends_of_the_scores_are_kept(threshold: float) -> None:
    control = StreamControl(replace(TERMS, threshold=threshold))
    assert control.bar >= threshold
    drive(control, random.Random(15), 500)
    assert control.bar >= threshold


def test_equal_scores_at_many_knots_do_no_harm() -> None:
    """Saturated networks give the score 1.0 to half of the pictures."""
    knots = tuple(min(1.0, s * 2) for s in KNOTS)
    control = StreamControl(replace(USUAL, scores=knots))
    drive(control, random.Random(16), 2_000, Traffic(differing=8.0))
    assert control.bar >= CERTIFIED
