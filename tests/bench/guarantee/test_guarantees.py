"""The bench of guarantees: derived delays bound simulated ones, and no answer is certified after them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hawkvision.core.types import Quality
from hawkvision.guarantee.monitor import Claim, Claims
from tests.bench.guarantee.guarantees import DETECTION, derived, simulate, through_a_node, traffic

CLAIMS = Claims("p", "edge", (Claim(-math.inf, 0.1), Claim(0.5, 0.02)), 0.05)


def accepted(threshold: float) -> float:
    """Scores are uniform."""
    return 1.0 - max(0.0, threshold)


@pytest.mark.parametrize("fractions", [False, True])
@pytest.mark.parametrize("times", [3.0, math.inf])
def test_the_derived_delay_is_an_upper_bound(times: float, fractions: bool) -> None:
    fault = traffic(CLAIMS, times, accepted)
    expected = derived(CLAIMS, fault.rates, 0.02)
    delays = [
        simulate(CLAIMS, None, fault, 100_000, np.random.default_rng(seed), fractions=fractions)[0]
        for seed in range(30)
    ]
    assert np.percentile(delays, 50) < expected.median < expected.late < 100_000
    assert np.percentile(delays, 95) < expected.late


@pytest.mark.slow
def test_no_answer_is_certified_after_the_derived_delay() -> None:
    assert through_a_node([("fast", Quality.FAST)]) == []


@pytest.mark.slow
def test_nor_is_one_of_a_kind_whose_answers_differ_in_part() -> None:
    assert through_a_node([("fast", Quality.FAST)], ["disagrees 4 x as claimed", "restart"], DETECTION) == []
