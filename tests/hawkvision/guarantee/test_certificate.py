"""Thresholds that are kept: what a sweep counts, where fixed-sequence testing stops, and that the guarantee holds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawkvision.guarantee.bounds import paired_betting_p, paired_exact_p
from hawkvision.guarantee.certificate import certified_steps, certify
from hawkvision.guarantee.evidence import (
    BEST_ONLY,
    Evidence,
    StageEvidence,
    Thresholds,
    ThresholdStep,
    disagreements,
    losses,
    sweep,
    threshold_grid,
    two_levels,
)
from tests.fuzz.examples import examples
from tests.hawkvision.cascade.synthetic import outcomes


def draw_sample(rng: np.random.Generator, n: int, *, intermediate: bool = False) -> Evidence:
    """A cascade whose truth is known: right rises with the score; a wrong answer is one of two wrong labels."""
    best = np.where(rng.random(n) < 0.9, 0, rng.integers(1, 3, n))

    def stage(base: float, copies: float) -> StageEvidence:
        scores = rng.random(n)
        own = np.where(rng.random(n) < base + (1 - base) * scores, 0, rng.integers(1, 3, n))
        said = np.where(rng.random(n) < copies, best, own)
        return outcomes(scores, said == 0, said != best)

    return Evidence(stage(0.5, 0.3), (best != 0).astype(np.float64), stage(0.7, 0.5) if intermediate else None)


def path_of_three(rng: np.random.Generator, steps: int) -> tuple[Thresholds, ...]:
    bars = np.sort(rng.random((steps, 2)), axis=0)[::-1]
    return (BEST_ONLY, *(Thresholds(float(e), float(m)) for e, m in bars), Thresholds(-math.inf, -math.inf))


@given(st.integers(1, 120), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_sweep_counts_what_going_through_the_images_one_by_one_counts(n: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    sample = draw_sample(rng, n, intermediate=True)
    assert sample.intermediate is not None
    if ties:
        edge = replace(sample.edge, scores=np.round(sample.edge.scores, 1))
        sample = replace(
            sample, edge=edge, intermediate=replace(sample.intermediate, scores=np.round(sample.intermediate.scores, 1))
        )
    for step in sweep(sample, path_of_three(rng, 6)):
        assert step == count_one_by_one(sample, step.thresholds)


def count_one_by_one(sample: Evidence, thresholds: Thresholds) -> ThresholdStep:
    intermediate = sample.intermediate
    assert intermediate is not None
    lost = gained = differing = 0.0
    at_edge = at_intermediate = 0
    for i in range(len(sample)):
        if sample.edge.scores[i] >= thresholds.edge:
            stage, at_edge = sample.edge, at_edge + 1
        elif intermediate.scores[i] >= thresholds.intermediate:
            stage, at_intermediate = intermediate, at_intermediate + 1
        else:
            continue
        more = stage.losses[i] - sample.reference_losses[i]
        lost, gained = lost + max(more, 0.0), gained + max(-more, 0.0)
        differing += stage.disagreements[i]
    n = len(sample)
    shares = (n - at_edge) / n, (n - at_edge - at_intermediate) / n, (lost - gained) / n
    return ThresholdStep(thresholds, *shares, lost, gained, differing)


@given(st.integers(1, 80), st.integers(0, 2**32 - 1), st.booleans())
@settings(deadline=None)
def test_losses_add_up_to_what_the_sweep_counts(n: int, seed: int, intermediate: bool) -> None:
    rng = np.random.default_rng(seed)
    sample = draw_sample(rng, n, intermediate=intermediate)
    for step in sweep(sample, path_of_three(rng, 4)):
        each = losses(sample, step.thresholds)
        assert (int((each == 1).sum()), int((each == -1).sum())) == (step.lost, step.gained)


@given(st.integers(1, 80), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_disagreement_bounds_the_drop_of_every_sample(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sample = draw_sample(rng, n, intermediate=True)
    for step in sweep(sample, path_of_three(rng, 4)):
        assert step.lost - step.gained <= step.lost + step.gained <= step.differing


KNOWN = pytest.mark.parametrize(("binary", "labelled"), [(True, 1.0), (True, 0.5), (True, 0.0), (False, 1.0)])
"""By the exact test with all, half and no labels, and by betting."""


def with_labels(sample: Evidence, known: NDArray[np.bool_], *, binary: bool = True) -> Evidence:
    """The sample with the labels of the images `known` (n,) only."""

    def hidden(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(known, values, np.nan)

    def stage(each: StageEvidence) -> StageEvidence:
        return replace(each, losses=hidden(each.losses))

    between = None if sample.intermediate is None else stage(sample.intermediate)
    return Evidence(stage(sample.edge), hidden(sample.reference_losses), between, binary)


@KNOWN
def test_certified_drop_holds_on_fresh_traffic_in_all_but_delta_of_the_samples(binary: bool, labelled: float) -> None:
    rng = np.random.default_rng(20261121)
    population = draw_sample(rng, 400_000, intermediate=True)
    path = path_of_three(rng, 24)
    truth = {step.thresholds: step.drop for step in sweep(population, path)}
    epsilon, delta, runs = 0.08, 0.05, 150
    violations, kept_steps = 0, set()
    for _ in range(runs):
        sample = draw_sample(rng, 600, intermediate=True)
        sample = with_labels(sample, rng.random(600) < labelled, binary=binary)
        kept = certify(sample, path, epsilon, delta).thresholds
        kept_steps.add(kept)
        violations += truth[kept] > epsilon
    # 5 % of 150 plus two standard errors.
    assert violations <= runs * delta + 2 * math.sqrt(runs * delta * (1 - delta))
    assert kept_steps != {BEST_ONLY}


@given(st.integers(20, 150), st.integers(0, 2**32 - 1), st.booleans(), st.floats(0.05, 0.6))
@settings(max_examples=examples(150), deadline=None)
def test_what_some_labels_certify_more_labels_certify_too(n: int, seed: int, binary: bool, max_drop: float) -> None:
    """So labels may come in any order, and looking after each one may end when a target is certified."""
    rng = np.random.default_rng(seed)
    sample, path = draw_sample(rng, n, intermediate=True), path_of_three(rng, 8)
    order, before = rng.permutation(n), 0
    for count in sorted(rng.integers(0, n + 1, 4).tolist()):
        known = np.isin(np.arange(n), order[:count])
        steps = certified_steps(with_labels(sample, known, binary=binary), path, max_drop, 0.05)
        assert len(steps) >= before
        before = len(steps)
    assert len(certified_steps(replace(sample, binary=binary), path, max_drop, 0.05)) >= before


def test_a_label_counts_only_where_the_stages_differ() -> None:
    sample = draw_sample(np.random.default_rng(2), 400, intermediate=True)
    assert sample.intermediate is not None
    differing = (sample.edge.disagreements + sample.intermediate.disagreements) > 0
    path = path_of_three(np.random.default_rng(3), 20)
    assert list(sweep(with_labels(sample, differing), path)) == list(sweep(sample, path))
    for step in sweep(with_labels(sample, np.zeros(400, np.bool_)), path):
        assert (step.lost, step.gained, step.drop) == (step.differing, 0.0, step.differing / 400)


@KNOWN
def test_the_kept_step_is_the_last_before_the_first_failure(binary: bool, labelled: float) -> None:
    rng = np.random.default_rng(8)
    sample = with_labels(draw_sample(rng, 800, intermediate=True), rng.random(800) < labelled, binary=binary)
    path = path_of_three(np.random.default_rng(9), 30)
    steps = list(sweep(sample, path))

    def p_value(step: ThresholdStep) -> float:
        if binary:
            return paired_exact_p(int(step.lost), int(step.gained), 800, 0.06, differing=int(step.differing))
        differing = np.add(*disagreements(sample, step.thresholds))
        return paired_betting_p(losses(sample, step.thresholds), differing, 0.06)

    passed = [p_value(step) <= 0.05 for step in steps[1:]]
    assert 0 < passed.index(False) < len(passed) - 1
    assert certify(sample, path, 0.06) == steps[passed.index(False)]


def test_the_cheapest_of_the_certified_steps_is_kept_and_none_beyond_them() -> None:
    sample = draw_sample(np.random.default_rng(11), 1_000, intermediate=True)
    path = path_of_three(np.random.default_rng(12), 30)
    last = certify(sample, path, 0.06)
    certified = list(sweep(sample, path))[: path.index(last.thresholds) + 1]
    expensive_edge = certify(sample, path, 0.06, cost=lambda step: 1.0 - step.escalation)
    assert expensive_edge == certified[0]
    odd = certify(sample, path, 0.06, cost=lambda step: abs(step.escalation - 0.9))
    assert odd == min(certified, key=lambda step: abs(step.escalation - 0.9))
    assert odd not in (certified[0], last)


@pytest.mark.parametrize("binary", [True, False])
def test_everything_is_escalated_when_nothing_may_be_given_up(binary: bool) -> None:
    sample = replace(draw_sample(np.random.default_rng(1), 500), binary=binary)
    kept = certify(sample, two_levels(threshold_grid(sample.edge.scores)), 0.0)
    assert (kept.thresholds, kept.escalation, kept.to_best, kept.drop) == (BEST_ONLY, 1.0, 1.0, 0.0)


@KNOWN
def test_a_larger_allowed_drop_never_escalates_more(binary: bool, labelled: float) -> None:
    rng = np.random.default_rng(3)
    sample = with_labels(draw_sample(rng, 1_000), rng.random(1_000) < labelled, binary=binary)
    path = two_levels(threshold_grid(sample.edge.scores, 60))
    escalations = [certify(sample, path, drop).escalation for drop in (0.01, 0.03, 0.06, 0.12, 0.25)]
    assert escalations == sorted(escalations, reverse=True)
    assert escalations[0] > escalations[-1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ((), "start with"),
        ((Thresholds(0.9),), "start with"),
        ((Thresholds(math.inf, 0.5), Thresholds(0.9, 0.4)), "start with"),
        ((BEST_ONLY, Thresholds(0.5), Thresholds(0.6)), "descend"),
        ((BEST_ONLY, Thresholds(0.5, 0.5), Thresholds(0.4, 0.6)), "descend"),
        ((BEST_ONLY, Thresholds(math.nan)), "descend"),
    ],
)
def test_paths_that_are_not_in_testing_order_are_refused(path: tuple[Thresholds, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        certify(draw_sample(np.random.default_rng(5), 10), path, 0.1)
