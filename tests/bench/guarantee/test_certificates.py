"""The study of certificates decides as the product does, and detects a broken guarantee."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from hawkvision.cascade.certification.profile import CERTIFIED_DROPS
from hawkvision.core.types import AccuracyStatus, Quality
from hawkvision.guarantee.bounds import paired_exact_p
from hawkvision.guarantee.certificate import certify, drop_bound
from hawkvision.guarantee.evidence import Evidence, StageEvidence, Thresholds, sweep, threshold_grid, two_levels
from hawkvision.guarantee.labels import label_needs
from tests.bench.guarantee.certificates import EVIDENCE, Population, Study, labelled_in_turn, pool_of
from tests.bench.guarantee.defaults import MODELS, default_of, shipped_tasks
from tests.bench.guarantee.fractional_losses import ADVERSARIES, KINDS, draw, kept, of_kind, upper
from tests.bench.guarantee.fractional_losses import study as study_fractions
from tests.bench.guarantee.rules import OTHERS, Flags, Goal, Pool, exact, sweep_grid
from tests.hawkvision.cascade.synthetic import make_logits, outcomes

DELTA = 0.05
GOAL = Goal(max_drop=0.04, accuracy=0.0, delta=DELTA)


@functools.cache
def pool() -> Pool:
    """Ten classes; the reference stage (about 93 % right) knows what the edge (85 %) knows, and more."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 10, 10_000)
    edge = make_logits(rng, labels, 5.0)
    answers, best = edge.argmax(axis=1), (edge + make_logits(rng, labels, 5.0)).argmax(axis=1)
    stage = outcomes(np.exp(edge).max(axis=1) / np.exp(edge).sum(axis=1), answers == labels, answers != best)
    return pool_of("synthetic", Evidence(stage, (best != labels).astype(np.float64)))


GRID = threshold_grid(pool().scores, 100)


def drawn(n: int, seed: int) -> Pool:
    return pool().taken(np.random.default_rng(seed).integers(len(pool()), size=n))


def as_sample(some: Pool, known: Flags | None = None) -> Evidence:
    unknown = np.where(True if known is None else known, 0.0, np.nan)
    edge = outcomes(some.scores, some.edge_right, some.differs)
    reference = (~some.best_right).astype(np.float64)
    return Evidence(replace(edge, losses=edge.losses + unknown), reference + unknown)


@pytest.mark.parametrize("evidence", EVIDENCE)
@pytest.mark.parametrize("seed", range(4))
def test_each_evidence_keeps_what_the_product_certifies(evidence: str, seed: int) -> None:
    some = drawn(600, seed)
    known = EVIDENCE[evidence](some.differs, np.random.default_rng(seed))
    kept = exact(sweep_grid(some, GRID, known), GOAL)
    for labelled in (known, known & some.differs):  # where the stages agree no label counts
        certified = certify(as_sample(some, labelled), two_levels(GRID), GOAL.max_drop, DELTA)
        assert certified.thresholds.edge == GRID[kept]
    assert 0 < kept < len(GRID) - 1


@pytest.mark.parametrize("seed", range(3))
def test_who_labels_what_helps_ends_where_nothing_helps_by_the_product(seed: int) -> None:
    some = drawn(600, seed)
    *_, (kept, used) = labelled_in_turn(some, GRID, GOAL, first=False)
    assert kept == exact(sweep_grid(some, GRID), GOAL)
    places = np.searchsorted(-GRID, -some.scores, side="left")
    order = np.flatnonzero(some.differs)[np.argsort(-some.scores[some.differs], kind="stable")]
    known = np.zeros(len(some), np.bool_)
    known[order[:used]] = True
    need = label_needs(as_sample(some, known), [two_levels(GRID)], [GOAL.max_drop], DELTA, lambda s: s.escalation)
    assert not need[GOAL.max_drop].helps.any()
    assert need[GOAL.max_drop].used == (known & (places <= kept)).sum() <= used < some.differs.sum()


@pytest.mark.parametrize("seed", range(4))
def test_mapies_fixed_sequence_of_our_p_values_stops_where_ours_does(seed: int) -> None:
    some = drawn(600, seed)
    steps = list(sweep(as_sample(some), two_levels(GRID)))[1:]
    p_values = np.array([paired_exact_p(step.lost, step.gained, 600, 0.03, differing=step.differing) for step in steps])
    from mapie.risk_control.fwer_control import FWERFixedSequenceTesting  # seconds, and for this test alone

    rejected = FWERFixedSequenceTesting(n_starts=1).run(p_values, DELTA)
    path = two_levels(GRID)
    assert certify(as_sample(some), path, 0.03, DELTA).thresholds == path[len(rejected)]


def test_guarantees_are_kept_where_the_plug_in_threshold_breaks_its_own() -> None:
    study = Study(Population(pool(), GRID, (0.04,)), draws=60, seed=1)
    cells = {cell.evidence: cell for cell in study.cells(500, [*EVIDENCE, "while it helps"], list(OTHERS))}
    assert not any(cell.broken for cell in cells.values())
    assert cells["plug-in"].rate > 0.2
    assert cells["disagreements"].escalation == cells["while it helps"].escalation
    assert cells["disagreements"].escalation < min(cells[name].escalation for name in ("half", "LTT", "SGR"))
    assert cells["disagreements"].perfect < cells["disagreements"].escalation < cells["none"].escalation
    assert cells["while it helps"].labels < cells["disagreements"].labels


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


@pytest.mark.parametrize("task", shipped_tasks())
def test_the_default_request_of_a_shipped_task_is_certified_or_its_card_says_why_not(task: str) -> None:
    found, card = default_of(task), " ".join((MODELS / task / "CARD.md").read_text().split())
    assert found.route.guarantee.target is Quality.BALANCED
    assert found.certified != ("The default request is not certified because" in card)
    stated = found.route.guarantee.max_drop
    assert stated is None or stated in CERTIFIED_DROPS


def test_a_default_that_escalates_everything_or_has_no_certificate_is_not_called_certified() -> None:
    known = default_of("cifar10")
    assert known.certified
    escalated = replace(known.route, escalation=1.0)
    assert not replace(known, route=escalated).certified
    best_effort = replace(known.route.guarantee, status=AccuracyStatus.BEST_EFFORT)
    assert not replace(known, route=replace(known.route, guarantee=best_effort)).certified
