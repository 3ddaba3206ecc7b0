"""The study of certificates uses the product's rules, and detects a broken guarantee."""

from __future__ import annotations

import csv
import functools
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.risk_control.fwer_control import FWERFixedSequenceTesting
from rich.console import Console

from hawkvision.cascade.certification.bounds import paired_exact_p
from hawkvision.cascade.certification.certificate import (
    Method,
    Sample,
    StageOutcomes,
    Thresholds,
    certify,
    drop_bound,
    sweep,
    threshold_grid,
    two_levels,
)
from tests.bench.cascade.certificates import Cell, make_pool, show, study, verdict, write_cells
from tests.bench.cascade.fractional_losses import ADVERSARIES, KINDS, draw, kept, of_kind, upper
from tests.bench.cascade.fractional_losses import study as study_fractions
from tests.bench.cascade.threshold_rules import (
    OTHERS,
    OURS,
    Goal,
    Pool,
    conformal_alignment,
    perfect_escalation,
    sweep_grid,
)
from tests.fuzz.examples import examples
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


def as_sample(some: Pool) -> Sample:
    return Sample(outcomes(some.scores, some.edge_right, some.differs), (~some.best_right).astype(np.float64))


def test_one_pass_over_all_thresholds_counts_what_the_products_sweep_counts() -> None:
    some = drawn(700, seed=1)
    grid = threshold_grid(some.scores, 60)
    counted = sweep_grid(some, grid)
    for place, step in enumerate(sweep(as_sample(some), two_levels(grid))):
        assert (counted.lost[place], counted.gained[place], counted.differing[place]) == (
            step.lost,
            step.gained,
            step.differing,
        )
        assert counted.escalation[place] == pytest.approx(step.escalation)
        assert counted.right[place] == round((some.best_right.mean() - step.drop) * 700)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("seed", range(4))
def test_each_rule_of_ours_keeps_what_the_product_certifies(method: Method, seed: int) -> None:
    some = drawn(600, seed)
    grid = threshold_grid(pool().scores, 100)
    goal = Goal(max_drop=0.08 if method is Method.AGREEMENT else 0.03, accuracy=0.0, delta=DELTA)
    kept = OURS[method.value](sweep_grid(some, grid), goal)
    certified = certify(as_sample(some), two_levels(grid), goal.max_drop, DELTA, method)
    assert certified.thresholds.edge == grid[kept]
    assert 0 < kept < len(grid) - 1


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(20, 150),
    steps=st.integers(2, 40),
    rates=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    max_drop=st.floats(0.005, 0.5),
    delta=st.sampled_from([0.001, 0.05, 0.3]),
    method=st.sampled_from(list(Method)),
)
@settings(max_examples=examples(300), deadline=None)
def test_what_rules_remember_changes_no_decision(
    seed: int, n: int, steps: int, rates: tuple[float, float], max_drop: float, delta: float, method: Method
) -> None:
    rng = np.random.default_rng(seed)
    edge, best = (rng.random(n) < rate for rate in rates)
    scores = rng.choice([rng.random(n), rng.integers(0, 8, n) / 8.0])  # without ties, and with many
    some = Pool("random", scores, edge, best, (edge != best) | (rng.random(n) < 0.1))
    grid = threshold_grid(scores, steps)
    kept = OURS[method.value](sweep_grid(some, grid), Goal(max_drop, 0.0, delta))
    assert certify(as_sample(some), two_levels(grid), max_drop, delta, method).thresholds.edge == grid[kept]


@pytest.mark.parametrize("seed", range(4))
def test_mapies_fixed_sequence_of_our_p_values_stops_where_ours_does(seed: int) -> None:
    some = drawn(600, seed)
    path = two_levels(threshold_grid(pool().scores, 100))
    steps = list(sweep(as_sample(some), path))[1:]
    p_values = np.array([paired_exact_p(step.lost, step.gained, 600, 0.03) for step in steps])
    rejected = FWERFixedSequenceTesting(n_starts=1).run(p_values, DELTA)
    assert certify(as_sample(some), path, 0.03, DELTA).thresholds == path[len(rejected)]


def test_conformal_alignment_accepts_what_benjamini_hochberg_accepts_of_much_traffic() -> None:
    some, goal = drawn(300, seed=2), Goal(max_drop=0.03, accuracy=0.0, delta=DELTA)
    grid = threshold_grid(pool().scores, 100)
    traffic = drawn(4_000, seed=3).scores
    lost = some.best_right & ~some.edge_right
    p_values = np.array([(1 + (lost & (some.scores >= score)).sum()) / 301 for score in traffic])
    order = np.sort(p_values)
    passed = np.flatnonzero(order <= goal.max_drop * np.arange(1, len(order) + 1) / len(order))
    accepted = (p_values <= order[passed[-1]]).mean()
    kept = grid[conformal_alignment(sweep_grid(some, grid), goal)]
    assert (traffic >= kept).mean() == pytest.approx(accepted, abs=0.03)


def test_conformal_alignment_keeps_the_drop_on_average_and_not_in_each_sample() -> None:
    (cell,) = study(pool(), 500, draws=60, seed=1, chosen=["conformal alignment"])
    assert not cell.guarantees
    goal = Goal(max_drop=cell.max_drop, accuracy=0.0, delta=DELTA)
    grid = threshold_grid(pool().scores, 100)
    whole = sweep_grid(pool(), grid)
    drops = [
        whole.lost[conformal_alignment(sweep_grid(drawn(500, seed), grid), goal)] / len(pool()) for seed in range(60)
    ]
    assert np.mean(drops) <= cell.max_drop


def test_perfect_knowledge_is_the_best_of_all_thresholds() -> None:
    some = drawn(120, seed=5)
    possible = [np.inf, *some.scores]

    def drop(threshold: float) -> float:
        accepted = some.scores >= threshold
        return float((some.best_right.astype(int) - some.edge_right)[accepted].sum() / 120)

    expected = min(float((some.scores < t).mean()) for t in possible if drop(t) <= 0.02)
    assert perfect_escalation(some, 0.02) == pytest.approx(expected)


@pytest.mark.parametrize("replace", [True, False])
def test_guarantees_are_kept_where_the_plug_in_threshold_breaks_its_own(replace: bool) -> None:
    cells = {cell.rule: cell for cell in study(pool(), 500, draws=60, seed=1, replace=replace)}
    assert not any(cell.broken for cell in cells.values())
    assert cells["plug-in"].rate > 0.2
    assert cells["exact"].escalation < cells["LTT"].escalation
    assert cells["exact"].escalation < cells["SGR"].escalation
    assert 1.0 < cells["exact"].ratio < cells["MAPIE paired"].ratio


def test_half_of_a_pool_may_contradict_the_other_half_oftener_than_the_population_would() -> None:
    (whole, *_), (half, *_) = (study(pool(), 5_000, draws=1, seed=1, replace=replace) for replace in (True, False))
    assert whole.expected == DELTA
    assert half.expected == pytest.approx(0.1224, abs=1e-4)  # the normal tail beyond 1.645 / √2


def test_the_same_seed_draws_the_same_samples() -> None:
    assert study(pool(), 200, draws=3, seed=9) == study(pool(), 200, draws=3, seed=9)


def make_cell(rule: str, violations: int, *, guarantees: bool = True) -> Cell:
    return Cell("a → b", 1_000, rule, guarantees, 200, violations, 0.2, 0.1, 0.01, DELTA)


def test_nineteen_of_two_hundred_may_be_chance_and_twenty_may_not() -> None:
    assert not make_cell("exact", 19).broken
    assert make_cell("exact", 20).broken
    assert not make_cell("plug-in", 100, guarantees=False).broken


def test_a_broken_guarantee_is_named_in_the_verdict() -> None:
    kept, said = verdict([make_cell("exact", 3), make_cell("betting", 40)])
    assert not kept
    assert "a → b, n = 1000, betting: 20.0% > 9.6%" in said
    assert verdict([make_cell("exact", 3), make_cell("plug-in", 90, guarantees=False)])[0]


def test_table_shows_every_figure_in_eighty_columns() -> None:
    cells = [
        Cell("a → b", n, rule, rule in OURS, 200, 10, 0.2, 0.1, 0.01, DELTA)
        for n in (500, 1_000, 5_000)
        for rule in OURS | OTHERS
    ]
    out = io.StringIO()
    show(Console(file=out, width=80), pool(), cells)
    assert "…" not in out.getvalue()
    assert out.getvalue().count("2.00x") == len(cells)


def test_cells_are_written_as_csv_or_json(tmp_path: Path) -> None:
    cells = [make_cell("exact", 3), make_cell("plug-in", 90, guarantees=False)]
    write_cells(tmp_path / "cells.csv", cells)
    write_cells(tmp_path / "cells.json", cells)
    with (tmp_path / "cells.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rule"], float(row["rate"])) for row in rows] == [("exact", 0.015), ("plug-in", 0.45)]
    assert [row["ratio"] for row in json.loads((tmp_path / "cells.json").read_bytes())] == [2.0, 2.0]


def test_a_pair_that_is_none_is_named() -> None:
    command = [sys.executable, "-m", "tests.bench.cascade.certificates", "--pairs", "cifar10:tiny"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "'cifar10:tiny'" in ran.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_many_fractional_samples_are_certified_as_the_product_certifies_each(kind: str) -> None:
    population = of_kind(kind, 300)
    draws = draw(population, 80, 12, np.random.default_rng(4))
    drop, bounds = 0.1, 2.0 * upper((draws.lost + 1.0) / 2.0, DELTA) - 1.0
    steps = kept((draws.lost + 1.0) / 2.0, draws.scores, population.path, (1.0 + drop) / 2.0)
    agreeing = kept(draws.disagreements, draws.scores, population.path, 0.3)
    assert len({*steps.tolist(), *agreeing.tolist()}) > 2
    for row in range(12):
        edge = StageOutcomes(draws.scores[row], draws.edge_losses[row], draws.disagreements[row])
        sample = Sample(edge, draws.reference_losses[row], binary=False)
        assert certify(sample, population.path, drop, DELTA, Method.BETTING).thresholds == population.path[steps[row]]
        without = Sample(StageOutcomes(edge.scores, np.zeros(80), edge.disagreements), np.zeros(80), binary=False)
        found = certify(without, population.path, 0.3, DELTA, Method.AGREEMENT)
        assert found.thresholds == population.path[agreeing[row]]
        never = next(sweep(sample, (Thresholds(-np.inf),)))
        assert drop_bound(sample, never, DELTA, Method.BETTING) == pytest.approx(max(bounds[row], 0.0), abs=3e-4)


@pytest.mark.parametrize("name", [*KINDS, *(make.__name__ for make in ADVERSARIES)])
def test_no_statement_about_fractional_losses_is_wrong_more_often_than_it_says(name: str) -> None:
    made = next((make for make in ADVERSARIES if make.__name__ == name), None)
    population = of_kind(name, 400) if made is None else made(np.random.default_rng(1), 400)
    for n in (50, 200):
        cells = study_fractions(population, n, draws=300, seed=2)
        assert {cell.statement for cell in cells} >= {"drop", "fast", "agreement", "interval", "min_accuracy"}
        assert not any(cell.broken for cell in cells), cells
