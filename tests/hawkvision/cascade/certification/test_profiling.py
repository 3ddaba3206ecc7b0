"""How a profile is made: disjoint splits, temperatures, accuracies, and certificates as they are written down."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.certification.predictions import (
    Scored,
    StagePredictions,
    make_evidence,
    split_indices,
)
from hawkvision.cascade.certification.profile import Condition, threshold_value
from hawkvision.cascade.certification.profiling import (
    certify_condition,
    paths_of,
    profile_stage,
    rounded_path,
)
from hawkvision.cascade.certification.threshold_order import Costs
from hawkvision.guarantee.binomial import clopper_pearson
from hawkvision.guarantee.bounds import drop_upper_bound
from hawkvision.guarantee.certificate import check_path
from hawkvision.guarantee.evidence import BEST_ONLY, Evidence, Thresholds, sweep
from hawkvision.tasks.class_scores import Score, score, softmax
from tests.hawkvision.cascade.synthetic import KIND, SHA, make_logits, make_profile

COSTS = Costs(edge=1.0, best=20.0, escalation=5.0, intermediate=4.0)


@functools.cache
def looked_at(n: int = 2_000) -> tuple[np.ndarray, StagePredictions, StagePredictions, StagePredictions]:
    """Labels, and what three stages said: edge (about 80 % right), middle and best."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 10, n)
    edge, intermediate, best = (
        StagePredictions(str(s), list(softmax(make_logits(rng, labels, s))), s) for s in (3.0, 6.0, 9.0)
    )
    return labels, edge, intermediate, best


def sample_at(n: int = 2_000, *, labelled: bool = True) -> Evidence:
    labels, edge, intermediate, best = looked_at(n)
    truth = labels.tolist() if labelled else [None] * n
    return make_evidence(KIND, Scored(edge, "margin"), best, truth, np.arange(n), Scored(intermediate, "top1"))


TWO = tuple(Thresholds(t) for t in (math.inf, *np.linspace(0.99, 0.0, 60).tolist(), -math.inf))
THREE = (
    BEST_ONLY,
    *(Thresholds(t, t) for t in np.linspace(0.99, 0.01, 60).tolist()),
    Thresholds(-math.inf, -math.inf),
)


@functools.cache
def condition(*, labelled: bool = True, three: bool = True) -> Condition:
    paths = (TWO, THREE) if three else (TWO,)
    return certify_condition(sample_at(labelled=labelled), paths, COSTS, 0.03, 0.05)


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=3, max_size=300), st.integers(0, 2**32 - 1))
def test_splits_are_disjoint_and_cover_everything(groups: list[str], seed: int) -> None:
    split = split_indices(np.array(groups), seed)
    together = np.concatenate([split.profile, split.certify, split.held_out])
    assert sorted(together.tolist()) == list(range(len(groups)))


def test_splits_keep_the_mixture_of_sources() -> None:
    groups = np.array(["a"] * 600 + ["b"] * 400)
    split = split_indices(groups, seed=1)
    assert (groups[split.certify] == "a").mean() == pytest.approx(0.6)
    assert len(split.profile) == 200


@pytest.mark.parametrize("seed", range(5))
def test_scores_that_are_certified_are_those_of_the_written_temperature(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, 500)
    logits = make_logits(rng, labels, 3.0)
    split = split_indices(labels.astype(str), seed=1)
    stage, looked = profile_stage(
        KIND, "small", {"small": SHA}, SHA, list(logits), labels.tolist(), split, SHA, cost_ms=1.23456
    )
    served = softmax(logits, stage.temperature)
    outputs = looked.of(np.arange(500))
    np.testing.assert_array_equal(outputs, served)
    np.testing.assert_array_equal(KIND.score_all(outputs, "margin"), score(served, Score.MARGIN).astype(np.float64))
    assert stage.cost_ms == looked.cost_ms == 1.235


def test_accuracy_is_measured_on_the_certification_split_alone() -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 10, 600)
    logits = make_logits(rng, labels, 3.0)
    split = split_indices(labels.astype(str), seed=1)
    logits[split.certify, :] = 0.0
    logits[split.certify, labels[split.certify]] = 9.0
    stage, _ = profile_stage(KIND, "small", {}, SHA, list(logits), labels.tolist(), split, SHA, 1.0)
    assert (stage.accuracy.value, stage.accuracy.n) == (1.0, len(split.certify))


@given(st.lists(st.floats(0, 1), max_size=40))
def test_a_written_path_is_still_in_testing_order_and_names_each_step_once(bars: list[float]) -> None:
    path = (BEST_ONLY, *(Thresholds(bar, bar) for bar in sorted(bars, reverse=True)))
    kept = rounded_path(path)
    check_path(kept)
    assert len(set(kept)) == len(kept)
    assert rounded_path(kept) == kept


@pytest.mark.parametrize("labelled", [True, False])
def test_every_certificate_says_what_its_thresholds_did_on_the_sample(labelled: bool) -> None:
    sample, found = sample_at(labelled=labelled), condition(labelled=labelled)
    for c in (*found.certificates, found.balanced, found.fast):
        thresholds = Thresholds(threshold_value(c.threshold), threshold_value(c.intermediate_threshold))
        (step,) = sweep(sample, (thresholds,))
        assert c.escalation == pytest.approx(step.escalation)
        assert c.to_best == pytest.approx(step.to_best)
        assert c.observed_drop == pytest.approx(step.drop if labelled else step.differing / 2_000, abs=1e-6)
        assert (c.n, c.delta, c.basis) == (2_000, 0.05, "labelled" if labelled else "agreement")


@pytest.mark.parametrize("labelled", [True, False])
def test_what_is_observed_stays_below_what_is_certified_and_looser_costs_no_more(labelled: bool) -> None:
    found = condition(labelled=labelled)
    assert all(c.observed_drop < c.max_drop for c in (*found.certificates, found.fast))
    costs = [c.to_best for c in condition(labelled=labelled, three=False).certificates]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_agreement_never_certifies_more_than_labels_do_at_the_same_level() -> None:
    labelled, unlabelled = condition(three=False), condition(labelled=False, three=False)
    wide = [(a, b) for a, b in zip(labelled.certificates, unlabelled.certificates, strict=True) if a.max_drop >= 0.03]
    assert all(a.escalation <= b.escalation for a, b in wide)
    assert labelled.fast.max_drop < unlabelled.fast.max_drop


def test_each_of_two_paths_is_tested_at_half_of_delta() -> None:
    sample, max_drop = replace(sample_at(), intermediate=None), 0.03
    alone = certify_condition(sample, (TWO,), COSTS, max_drop, 0.025).balanced
    both = certify_condition(sample, (TWO, TWO), COSTS, max_drop, 0.05).balanced
    assert (both.threshold, both.delta) == (alone.threshold, 0.05)


def test_never_escalating_carries_the_upper_bound_of_its_drop() -> None:
    sample = sample_at()
    more = sample.edge.losses - sample.reference_losses
    lost, gained = int((more > 0).sum()), int((more < 0).sum())
    bound = drop_upper_bound(lost, gained, 2_000, differing=int(sample.edge.disagreements.sum()))
    assert condition().fast.threshold == "never"
    assert bound <= condition().fast.max_drop <= bound + 1e-4


def test_the_disagreement_of_each_stage_is_bounded_by_what_was_seen() -> None:
    sample = sample_at()
    assert sample.intermediate is not None
    c = next(c for c in condition().certificates if c.intermediate_disagreement is not None and c.max_drop >= 0.03)
    assert c.intermediate_disagreement is not None
    accepted = sample.edge.scores >= threshold_value(c.threshold)
    halfway = ~accepted & (sample.intermediate.scores >= threshold_value(c.intermediate_threshold))
    escalated = int((~accepted).sum())

    def upper(count: int, n: int) -> float:
        return clopper_pearson(count, n, 0.05)[1]

    assert c.edge_disagreement == pytest.approx(upper(int(sample.edge.disagreements[accepted].sum()), 2_000), abs=1e-6)
    differing = int(sample.intermediate.disagreements[halfway].sum())
    assert c.intermediate_disagreement == pytest.approx(upper(differing, escalated), abs=1e-6)


@pytest.mark.parametrize("intermediate", [False, True])
def test_the_paths_of_a_pair_are_those_that_were_certified(intermediate: bool) -> None:
    pair = make_profile(intermediate=intermediate).pairs[0]
    paths = paths_of(pair)
    assert len(paths) == (1 if pair.intermediate is None else 2)
    steps = {step for path in paths for step in path}
    for path in paths:
        check_path(path)
        assert path[-1].edge == -math.inf
    for c in (*pair.conditions[0].certificates, pair.conditions[0].balanced):
        assert Thresholds(threshold_value(c.threshold), threshold_value(c.intermediate_threshold)) in steps
