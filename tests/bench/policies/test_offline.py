"""Escalations at equal targets: what a threshold that is chosen on some images does to others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hawkvision.cascade.policy import Policy
from hawkvision.guarantee.evidence import Evidence
from tests.bench.policies.offline import rows
from tests.bench.policies.thresholds import lost, lowest_threshold
from tests.hawkvision.cascade.synthetic import make_profile, outcomes

DROPS = (0.01, 0.05, 0.1)


def evidence(n: int, seed: int) -> Evidence:
    """Scores of two digits, so that many are equal; the surer the edge, the more often it is right."""
    rng = np.random.default_rng(seed)
    scores = np.round(rng.random(n), 2)
    right, best = rng.random(n) < 0.3 + 0.7 * scores, rng.random(n) < 0.95
    return Evidence(outcomes(scores, right, right != best), (~best).astype(np.float64))


@pytest.mark.parametrize("drop", [0.0, *DROPS, 0.5, 1.0])
def test_no_lower_threshold_loses_as_little(drop: float) -> None:
    some = evidence(500, 1)
    kept = [each for each in [math.inf, *np.unique(some.edge.scores)] if lost(some, each).mean() <= drop + 1e-9]
    found = lowest_threshold(some, drop)
    assert (some.edge.scores >= found).sum() == max((some.edge.scores >= each).sum() for each in kept)
    assert lost(some, found).mean() <= drop + 1e-9


def test_a_threshold_says_whether_it_escalates_everything_or_nothing() -> None:
    some = evidence(500, 1)
    hopeless = replace(some, edge=replace(some.edge, losses=np.ones(500), disagreements=np.ones(500)))
    assert lowest_threshold(hopeless, 0.0) == math.inf
    assert lowest_threshold(some, 1.0) == -math.inf


def test_knowing_the_test_images_escalates_least_of_what_keeps_the_target() -> None:
    policy, certifying, test = Policy(make_profile(), "small", "large"), evidence(2_000, 1), evidence(3_000, 2)
    found = list(rows(policy, certifying, test, DROPS))
    assert [(row.rule, row.max_drop) for row in found] == [
        (rule, drop) for drop in DROPS for rule in ("certified", "undivided", "tuned", "known")
    ]
    for known in found[3::4]:
        kept = [row for row in found if row.max_drop == known.max_drop and row.drop.value <= known.max_drop]
        assert known.escalated == min(row.escalated for row in kept)


def test_a_certified_target_that_loses_more_than_chance_explains_is_broken() -> None:
    policy, some = Policy(make_profile(), "small", "large"), evidence(2_000, 1)
    wrong = replace(some, edge=replace(some.edge, losses=np.ones(2_000), disagreements=np.ones(2_000)))
    whole = [rows(policy, some, each, (0.3,)) for each in (some, wrong)]
    assert [next(iter(found)).broken for found in whole] == [False, True]
