"""The study of certificates uses the product's rules, and detects a broken guarantee."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from hawkvision.guarantee.bounds import paired_exact_p
from hawkvision.guarantee.certificate import certify, drop_bound
from hawkvision.guarantee.evidence import Evidence, StageEvidence, Thresholds, sweep, threshold_grid, two_levels
from tests.bench.cascade.certificates import make_pool, study
from tests.bench.cascade.fractional_losses import ADVERSARIES, KINDS, draw, kept, of_kind, upper
from tests.bench.cascade.fractional_losses import study as study_fractions
from tests.bench.cascade.threshold_rules import (
    OURS,
    Goal,
    Pool,
    sweep_grid,
)
from tests.hawkvision.cascade.synthetic import make_logits, outcomes

DELTA = 0.05


@functools.cache
def pool() -> Pool:
    """Ten classes; the reference stage (about 93 % right) knows what the edge (85 %) knows, and more."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 10, 12_000)
    edge = make_logits(rng, labels, 5.0)
    best = (edge + make_logits(rng, labels, 5.0)).argmax(axis=1)
    return make_pool("synthetic", edge, best, labels, np.arange(2_000), np.arange(2_000, 12_000))


def drawn(n: int, seed: int) -> Pool:
    return pool().taken(np.random.default_rng(seed).integers(len(pool()), size=n))


def as_sample(some: Pool, *, labelled: bool = True) -> Evidence:
    unknown = 0.0 if labelled else np.nan
    edge = outcomes(some.scores, some.edge_right, some.differs)
    edge = replace(edge, losses=edge.losses + unknown)
    return Evidence(edge, (~some.best_right).astype(np.float64) + unknown)


@pytest.mark.parametrize("rule", OURS)
@pytest.mark.parametrize("seed", range(4))
def test_each_rule_of_ours_keeps_what_the_product_certifies(rule: str, seed: int) -> None:
    some = drawn(600, seed)
    grid = threshold_grid(pool().scores, 100)
    goal = Goal(max_drop=0.03 if rule == "exact" else 0.08, accuracy=0.0, delta=DELTA)
    kept = OURS[rule](sweep_grid(some, grid), goal)
    certified = certify(as_sample(some, labelled=rule == "exact"), two_levels(grid), goal.max_drop, DELTA)
    assert certified.thresholds.edge == grid[kept]
    assert 0 < kept < len(grid) - 1


@pytest.mark.parametrize("seed", range(4))
def test_mapies_fixed_sequence_of_our_p_values_stops_where_ours_does(seed: int) -> None:
    some = drawn(600, seed)
    path = two_levels(threshold_grid(pool().scores, 100))
    steps = list(sweep(as_sample(some), path))[1:]
    p_values = np.array([paired_exact_p(step.lost, step.gained, 600, 0.03, differing=step.differing) for step in steps])
    from mapie.risk_control.fwer_control import FWERFixedSequenceTesting  # seconds, and for this test alone

    rejected = FWERFixedSequenceTesting(n_starts=1).run(p_values, DELTA)
    assert certify(as_sample(some), path, 0.03, DELTA).thresholds == path[len(rejected)]


@pytest.mark.parametrize("replace", [True, False])
def test_guarantees_are_kept_where_the_plug_in_threshold_breaks_its_own(replace: bool) -> None:
    cells = {cell.rule: cell for cell in study(pool(), 500, draws=60, seed=1, replace=replace)}
    assert not any(cell.broken for cell in cells.values())
    assert cells["plug-in"].rate > 0.2
    assert cells["exact"].escalation < cells["LTT"].escalation
    assert cells["exact"].escalation < cells["SGR"].escalation
    assert 1.0 < cells["exact"].ratio < cells["MAPIE paired"].ratio


@pytest.mark.parametrize("kind", KINDS)
def test_many_fractional_samples_are_certified_as_the_product_certifies_each(kind: str) -> None:
    population = of_kind(kind, 300)
    draws = draw(population, 80, 12, np.random.default_rng(4))
    drop, bounds = 0.1, upper(draws.lost, DELTA, draws.disagreements**2)
    steps = kept(draws, draws.lost, population.path, drop)
    agreeing = kept(draws, draws.disagreements, population.path, 0.3)
    assert len({*steps.tolist(), *agreeing.tolist()}) > 2
    for row in range(12):
        edge = StageEvidence(draws.scores[row], draws.edge_losses[row], draws.disagreements[row])
        sample = Evidence(edge, draws.reference_losses[row], binary=False)
        assert certify(sample, population.path, drop, DELTA).thresholds == population.path[steps[row]]
        unknown = np.full(80, np.nan)
        without = Evidence(StageEvidence(edge.scores, unknown, edge.disagreements), unknown, binary=False)
        found = certify(without, population.path, 0.3, DELTA)
        assert found.thresholds == population.path[agreeing[row]]
        never = next(sweep(sample, (Thresholds(-np.inf),)))
        assert drop_bound(sample, never, DELTA) == pytest.approx(bounds[row], abs=3e-4)


@pytest.mark.parametrize("name", [*KINDS, *(make.__name__ for make in ADVERSARIES)])
def test_no_statement_about_fractional_losses_is_wrong_more_often_than_it_says(name: str) -> None:
    made = next((make for make in ADVERSARIES if make.__name__ == name), None)
    population = of_kind(name, 400) if made is None else made(np.random.default_rng(1), 400)
    for n in (50, 200):
        cells = study_fractions(population, n, draws=300, seed=2)
        assert {cell.statement for cell in cells} >= {"drop", "fast", "agreement", "interval"}
        assert not any(cell.broken for cell in cells), cells
