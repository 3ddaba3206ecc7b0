"""Which thresholds are tried: smooth curves, paths of two and three levels, and what they cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.cascade.certification.threshold_order import (
    Costs,
    disagreement_risk,
    expected_cost,
    plan_paths,
)
from hawkvision.guarantee.certificate import check_path
from hawkvision.guarantee.evidence import BEST_ONLY, Evidence, StageEvidence, Thresholds, ThresholdStep, sweep
from tests.hawkvision.cascade.synthetic import outcomes

COSTS = Costs(edge=1.0, best=20.0, escalation=5.0, intermediate=4.0)


def cascade(seed: int, n: int = 4_000, *, intermediate: float | None = None) -> Evidence:
    """An edge that is right 70 % of the time, a reference stage 95 %, an intermediate stage that gives the best's
    label `intermediate`."""
    rng = np.random.default_rng(seed)
    best_right = rng.random(n) < 0.95

    def stage(agreeing: float) -> StageEvidence:
        hardness = rng.random(n)
        agrees = hardness < agreeing
        scores = np.clip(1.0 - hardness + rng.normal(0, 0.1, n), 0.0, 1.0)
        return outcomes(scores, agrees & best_right, ~agrees)

    edge = stage(0.7)
    return Evidence(edge, (~best_right).astype(np.float64), None if intermediate is None else stage(intermediate))


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
@settings(deadline=None)
def test_risk_is_a_probability_that_adds_up_to_what_differed_whatever_the_scores(
    pairs: list[tuple[float, bool]],
) -> None:
    scores, differs = np.array([s for s, _ in pairs]), np.array([d for _, d in pairs])
    risk = disagreement_risk(scores, differs.astype(np.float64))
    assert np.all((risk >= 0.0) & (risk <= 1.0))
    assert risk.sum() == pytest.approx(differs.sum(), abs=1e-2)
    by_score = risk[np.argsort(scores, kind="stable")]
    assert np.all(np.diff(by_score) >= -1e-9) or np.all(np.diff(by_score) <= 1e-9)


def test_where_neither_of_two_stages_differs_the_one_that_began_to_differ_lower_down_is_the_safer() -> None:
    scores = np.linspace(0.0, 1.0, 201)[1:-1]
    bold, shy = (disagreement_risk(scores, (scores < bar).astype(np.float64)) for bar in (0.3, 0.6))
    above = scores > 0.7
    assert np.all(np.diff(bold[above]) < 0), "and the surer of two images, the safer"
    assert np.all(bold[above] < shy[above])


def test_an_intermediate_stage_that_hardly_differs_has_taken_nearly_all_before_the_edge_takes_half() -> None:
    sample = cascade(7, intermediate=0.99)
    _, three = plan_paths(sample, Costs(edge=1.0, best=20.0, escalation=5.0, intermediate=10.0, reused=10.0))
    half = next(step for step in sweep(sample, three) if step.escalation < 0.5)
    assert half.to_best < 0.1 * half.escalation


@pytest.mark.parametrize("intermediate", [None, 0.9, 1.0])
def test_every_path_starts_at_the_best_stage_alone_descends_and_ends_at_never_escalating(
    intermediate: float | None,
) -> None:
    for path in plan_paths(cascade(2, intermediate=intermediate), COSTS if intermediate else Costs(1.0, 20.0, 5.0)):
        check_path(path)
        assert path[0] == BEST_ONLY
        assert path[-1].edge == -math.inf


def test_without_an_intermediate_stage_there_are_two_levels() -> None:
    (path,) = plan_paths(cascade(3), Costs(1.0, 20.0, 5.0))
    assert {step.intermediate for step in path} == {math.inf}


def test_an_intermediate_stage_that_is_never_right_adds_no_path() -> None:
    assert len(plan_paths(cascade(4, intermediate=0.0), COSTS)) == 1


def test_an_intermediate_stage_as_dear_as_the_best_adds_no_path() -> None:
    assert (
        len(plan_paths(cascade(5, intermediate=0.9), Costs(edge=1.0, best=20.0, escalation=5.0, intermediate=20.0)))
        == 1
    )


def test_a_cheap_perfect_intermediate_stage_makes_three_levels_that_cost_less() -> None:
    sample = cascade(6, intermediate=1.0)
    two, three = plan_paths(sample, COSTS)
    assert {step.intermediate for step in two} == {math.inf}
    assert any(-math.inf < step.intermediate < math.inf for step in three)

    def least(path: tuple[Thresholds, ...]) -> float:
        return min(expected_cost(COSTS, step) for step in sweep(sample, path) if step.drop <= 0.05)

    assert least(three) < least(two) / 1.5


@pytest.mark.parametrize(
    ("thresholds", "escalation", "to_best", "cost"),
    [
        (BEST_ONLY, 1.0, 1.0, 25.0),
        (Thresholds(0.5), 0.4, 0.4, 1.0 + 0.4 * 25.0),
        (Thresholds(0.5, 0.6), 0.4, 0.1, 1.0 + 0.4 * (5.0 + 4.0) + 0.1 * 20.0),
        (Thresholds(math.inf, 0.6), 1.0, 0.3, 5.0 + 4.0 + 0.3 * 20.0),
        (Thresholds(-math.inf, -math.inf), 0.0, 0.0, 1.0),
    ],
)
def test_cost_counts_every_stage_that_is_asked(
    thresholds: Thresholds, escalation: float, to_best: float, cost: float
) -> None:
    step = ThresholdStep(thresholds, escalation, to_best, 0.0, 0, 0, 0)
    assert expected_cost(COSTS, step) == pytest.approx(cost)
