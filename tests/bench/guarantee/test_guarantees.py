"""The bench of guarantees: derived delays bound simulated ones, and no answer is certified after them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from hawkvision.core.types import Quality
from tests.bench.guarantee.certificates import Population
from tests.bench.guarantee.delays import derived
from tests.bench.guarantee.node import DETECTION, through_a_node
from tests.bench.guarantee.review import Person
from tests.bench.guarantee.scenarios import PATTERNS, WHO, Row, deadlines, missing, names, other_claim, reloaded
from tests.bench.guarantee.site import digest
from tests.bench.guarantee.test_certificates import GRID, pool
from tests.hawkvision.guarantee.simulated import EIGHT, SHARE, delay


@pytest.mark.parametrize("fractions", [False, True])
@pytest.mark.parametrize("times", [4.0, math.inf])
def test_the_derived_delay_is_an_upper_bound(times: float, fractions: bool) -> None:
    limit = derived(EIGHT, [min(1.0, 0.05 * times)] * 8, SHARE)
    delays = [delay(times, 0, np.random.default_rng(seed), fractions=fractions) for seed in range(20)]
    assert np.percentile(delays, 95) < limit < 20_000


@pytest.mark.parametrize("scenario", range(len(WHO)))
def test_under_whatever_names_nothing_is_certified_after_the_derived_delay(scenario: int) -> None:
    _, who, part, limit = WHO[scenario]
    row = names(who, part, limit, math.inf, seeds=3)
    assert row.seeds == 0
    assert 0 < max(row.delays) < row.limit < 2_000


def test_audits_of_wrong_answers_may_be_missing_as_seldom_as_the_answers_may_be_wrong() -> None:
    row = missing(seeds=3)
    assert row.seeds == 0
    assert min(row.delays) > 0


@pytest.mark.parametrize("scenario", [reloaded, other_claim])
def test_an_alarm_is_lifted_by_no_other_certificate_and_by_no_other_claim(scenario: Callable[[int], Row]) -> None:
    assert scenario(2).seeds == 0


def test_deadlines_that_let_only_the_edges_answers_through_are_soon_no_more_certified() -> None:
    population, drop = Population(pool(), GRID, (0.02,)), 0.02
    few, every = (deadlines(population, drop, PATTERNS[name], 1) for name in ("one escalation in twenty", "all"))
    assert len(few.certified) == len(few.everything) > len(every.everything)
    assert len(every.certified) < 0.01 * len(every.everything)
    assert every.everything.mean() > drop > few.lost(drop) * drop
    assert not few.above(drop)


def test_a_careful_person_is_right_and_a_hasty_one_errs_as_often_as_stated() -> None:
    body, classes = b"image", {digest(b"image"): 1}
    shown = [["cat", "dog"], ["dog", "cat"], ["cat", "bird"], ["dog"], ["cat"]]
    items = [{"answers": [{"label": label} for label in labels]} for labels in shown]
    right = ["second", "first", "neither", "right", "wrong"]
    careful, hasty = Person(classes, ["cat", "dog"], 1), Person(classes, ["cat", "dog"], 1, wrong=0.05, unsure=0.05)
    assert [careful.says(item, body) for item in items] == right
    said = [hasty.says(items[0], body) for _ in range(4_000)]
    assert said.count("cannot_tell") / 4_000 == pytest.approx(0.05, abs=0.015)
    assert (said.count("first") + said.count("neither")) / 4_000 == pytest.approx(0.05, abs=0.015)


@pytest.mark.slow
def test_no_answer_is_certified_after_the_derived_delay() -> None:
    assert through_a_node([("fast", Quality.FAST)]) == []


@pytest.mark.slow
def test_nor_is_one_of_a_kind_whose_answers_differ_in_part() -> None:
    assert through_a_node([("fast", Quality.FAST)], ["disagrees 4 times", "restart"], DETECTION) == []
