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

from hawkvision.cascade.drift.monitor import Claim, Claims, Monitor
from hawkvision.cascade.drift.online import (
    AUDIT_SHARE,
    GAIN,
    LARGEST_DEBT,
    ControllerSpec,
    ControllerState,
    DriftController,
)

KNOTS = tuple(i / 64 for i in range(65))
CERTIFIED = 0.4
DISAGREEMENTS = tuple(0.3 * (1 - s) ** 2 for s in KNOTS)
# Scores are uniform, so that accepted answers differ in ∫ 0.3 (1 − s)² ds = 0.1 (1 − τ)³ of the requests.
TRUE_DISAGREEMENT = 0.1 * (1 - CERTIFIED) ** 3
LARGEST_ESTIMATE = 1 / AUDIT_SHARE
TERMS = ControllerSpec(
    key="certificate",
    threshold=CERTIFIED,
    max_drop=0.011,
    disagreement=TRUE_DISAGREEMENT,
    scores=KNOTS,
    disagreements=DISAGREEMENTS,
    drops=tuple(d / 2 for d in DISAGREEMENTS),
)
USUAL = replace(TERMS, disagreement=1.3 * TRUE_DISAGREEMENT)
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


class Node:
    """A controller and its monitor, driven as an edge node does, with a reference that always answers."""

    def __init__(self, spec: ControllerSpec = USUAL, seed: int = 1) -> None:
        self.control = DriftController(spec)
        claim = Claim(spec.threshold, spec.disagreement)
        self.monitor = Monitor(Claims("p", "edge", (claim,), 0.05), shared=False)
        self.rng = random.Random(seed)

    def drive(self, requests: int, traffic: Traffic = AS_CERTIFIED) -> Counts:
        accepted = audited = differing = 0
        control, rng = self.control, self.rng
        for _ in range(requests):
            score = rng.random() ** traffic.harder
            differs = rng.random() < traffic.differing * 0.3 * (1 - score) ** 2
            drawn = rng.random() < AUDIT_SHARE
            control.follow(self.monitor.suspended)
            if drawn:
                self.monitor.record(score, differs)
            if score < control.threshold:
                control.escalated(score, differs)
                continue
            control.accepted(score, 1 / AUDIT_SHARE, differs if drawn else None)
            accepted, audited, differing = accepted + 1, audited + drawn, differing + differs
        return Counts(accepted, audited, differing)

    def until(self, suspended: bool, traffic: Traffic, most: int) -> int:
        for seen in range(0, most, 50):
            if self.monitor.suspended is suspended:
                return seen
            self.drive(50, traffic)
        return most


# ------------------------------------------------------------------------------------------------ drift and return


def test_while_suspended_less_is_accepted_and_the_label_free_target_is_kept() -> None:
    shares = []
    for seed in range(4):
        node = Node(seed=seed)
        node.until(True, Traffic(differing=8.0), 10_000)
        node.drive(2_000, Traffic(differing=8.0))
        shares.append(node.drive(10_000, Traffic(differing=8.0)).differing / 10_000)
        assert node.monitor.suspended
        assert node.control.threshold > CERTIFIED
    assert sum(shares) / len(shares) <= 1.2 * USUAL.max_drop, "8 times as much would differ at the certified threshold"


def test_after_the_return_the_certified_threshold_counts_again_at_once() -> None:
    node = Node()
    node.monitor.suspend()
    node.drive(500, Traffic(differing=8.0))
    assert node.control.bar > CERTIFIED
    assert node.until(False, Traffic(differing=0.1), 40_000) < 40_000
    node.control.follow(False)
    assert node.control.bar == CERTIFIED


def test_a_target_that_never_escalates_does_so_only_while_it_is_suspended() -> None:
    control = DriftController(replace(TERMS, threshold=-math.inf))
    control.accepted(0.1, 50.0, True)
    assert control.bar == -math.inf
    control.follow(True)
    control.accepted(0.1, 50.0, True)
    assert control.bar > 0.0
    control.follow(False)
    assert control.bar == -math.inf


# ------------------------------------------------------------------------------------------------- the threshold

STEPS = st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans(), st.floats(0.0, 1.0)), min_size=1, max_size=300)


@given(STEPS, st.booleans())
def test_no_sequence_makes_the_average_loss_exceed_its_goal_by_more_than_the_bound(
    steps: list[tuple[float, bool, float]], suspended: bool
) -> None:
    control, total = DriftController(TERMS), 0.0
    control.follow(suspended)
    goal = TERMS.max_drop if suspended else max(TERMS.max_drop, TERMS.disagreement)
    for score, differs, draw in steps:
        if score >= control.threshold:
            audited = differs if draw < AUDIT_SHARE else None
            total += control.estimate(score, 1 / AUDIT_SHARE, audited) - goal
            control.accepted(score, 1 / AUDIT_SHARE, audited)
        else:
            total -= goal
            control.escalated(score, differs)
    assert total <= (1.0 - CERTIFIED) / GAIN + LARGEST_ESTIMATE


@given(STEPS)
def test_the_threshold_never_falls_below_the_certified_one(steps: list[tuple[float, bool, float]]) -> None:
    control = DriftController(TERMS)
    for score, differs, draw in steps:
        control.accepted(score, 1 / AUDIT_SHARE, differs if draw < 0.5 else None)
        control.escalated(score, differs)
        if draw < 0.1:
            control.fell_short(score)
        assert control.threshold >= control.bar >= CERTIFIED


# --------------------------------------------------------------------------------------------------------- debt


def test_debt_raises_the_threshold_and_escalations_above_the_bar_repay_it() -> None:
    node = Node(seed=12)
    for _ in range(40):
        node.control.fell_short(0.1)
    owed = node.control.state.debt
    assert owed > 1.0
    assert node.control.threshold > node.control.bar
    node.drive(3_000)
    assert node.control.state.debt == 0.0
    assert node.control.threshold == node.control.bar


def test_debt_has_a_bound() -> None:
    control = DriftController(USUAL)
    for _ in range(10_000):
        control.fell_short(0.0)
    assert control.state.debt == LARGEST_DEBT


# ------------------------------------------------------------------------------------------------------ restarts


def test_a_restored_controller_goes_on_as_if_nothing_had_happened() -> None:
    first, second = Node(seed=13), Node()
    first.drive(3_000, Traffic(differing=8.0))
    first.control.fell_short(0.1)
    assert second.control.restore(msgspec.json.decode(msgspec.json.encode(first.control.state), type=ControllerState))
    assert (second.control.bar, second.control.threshold) == (first.control.bar, first.control.threshold)
    second.monitor = Monitor(first.monitor.claims, shared=False)
    assert second.monitor.restore(first.monitor.state)
    first.rng, second.rng = random.Random(14), random.Random(14)
    for node in (first, second):
        node.drive(1_000)
    assert second.control.state == first.control.state


def test_state_of_another_certificate_is_left_alone() -> None:
    stranger = DriftController(replace(USUAL, key="another"))
    stranger.fell_short(0.1)
    control = DriftController(USUAL)
    assert not control.restore(stranger.state)
    assert control.state.debt == 0.0


@pytest.mark.parametrize(("differing", "within"), [(8.0, 8_000), (4.0, 20_000)])
def test_other_traffic_raises_the_alarm(differing: float, within: int) -> None:
    for seed in range(3):
        node = Node(seed=seed)
        node.drive(3_000)
        assert not node.monitor.suspended
        assert node.until(True, Traffic(differing), within) < within, f"seed {seed}"
