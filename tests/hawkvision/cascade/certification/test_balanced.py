"""Which drop `balanced` gives up, by images of the design alone."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from hawkvision.cascade.certification.balanced import (
    LEAST_CERTIFIED,
    Certifying,
    Exchange,
    balanced_drop,
    choose,
    exchanges,
)
from hawkvision.cascade.certification.profile import TESTED_DROPS
from hawkvision.cascade.certification.profiling import certify_condition
from hawkvision.cascade.certification.threshold_order import Costs
from hawkvision.guarantee.certificate import least_drop
from hawkvision.guarantee.evidence import Evidence, StageEvidence, Thresholds

COSTS = Costs(edge=1.0, best=20.0, escalation=5.0)
PATH = tuple(Thresholds(bar) for bar in (math.inf, *np.linspace(0.99, 0.0, 60).tolist(), -math.inf))


@functools.cache
def population(n: int, seed: int, hardest: float = 0.3) -> Evidence:
    """An edge that differs from the reference stage the more often the lower its score; two thirds of it are lost."""
    rng = np.random.default_rng(seed)
    scores = rng.uniform(size=n)
    differing = (rng.uniform(size=n) < hardest * (1.0 - scores) ** 2).astype(float)
    lost = differing * (rng.uniform(size=n) < 2 / 3)
    reference = np.where(lost == 1.0, 0.0, differing)  # wrong where the edge gains
    return Evidence(StageEvidence(scores, lost, differing), reference)


def offered(n: int, delta: float = 0.05) -> list[Exchange]:
    return exchanges(population(1_500, 1), (PATH,), COSTS, Certifying(n, delta))


def test_balanced_has_the_best_exchange_between_drop_and_escalation_of_those_that_are_certified_often() -> None:
    found = offered(400)
    kept = choose(found)
    assert kept.certified >= LEAST_CERTIFIED
    assert all(kept.price <= each.price for each in found if each.certified >= LEAST_CERTIFIED)
    assert kept.max_drop == balanced_drop(population(1_500, 1), (PATH,), COSTS, Certifying(400, 0.05))
    escalated = [each.escalation for each in found]
    assert escalated == sorted(escalated, reverse=True)


@pytest.mark.parametrize("n", [100, 400])
def test_no_drop_is_chosen_that_so_few_images_cannot_certify_even_without_a_loss(n: int) -> None:
    found, least = offered(n), least_drop(n, 0.05, binary=True)
    assert {each.certified for each in found if each.max_drop < least} == {0.0}
    assert choose(found).max_drop >= least


def test_more_images_certify_a_smaller_balanced_drop() -> None:
    drops = [choose(offered(n)).max_drop for n in (100, 400, 2_000)]
    assert drops == sorted(drops, reverse=True)
    assert drops[0] > drops[-1]


def test_what_is_chosen_is_certified_on_nearly_all_further_samples_and_escalates_what_was_expected() -> None:
    expected = choose(offered(400))
    found = [
        certify_condition(population(400, seed), (PATH,), COSTS, expected.max_drop, 0.05).balanced
        for seed in range(10, 40)
    ]
    escalated = [each.escalation for each in found]
    assert np.mean([share < 1.0 for share in escalated]) >= LEAST_CERTIFIED - 0.05
    assert float(np.mean(escalated)) == pytest.approx(expected.escalation, abs=0.1)


def test_where_hardly_anything_can_be_certified_the_largest_drop_is_aimed_for() -> None:
    assert choose(offered(4)).max_drop == TESTED_DROPS[-1]
