"""The bench of guarantees: derived delays bound simulated ones, and no answer is certified after them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hawkvision.core.types import Quality
from tests.bench.guarantee.delays import derived
from tests.bench.guarantee.node import DETECTION, through_a_node
from tests.hawkvision.guarantee.simulated import EIGHT, SHARE, delay


@pytest.mark.parametrize("fractions", [False, True])
@pytest.mark.parametrize("times", [4.0, math.inf])
def test_the_derived_delay_is_an_upper_bound(times: float, fractions: bool) -> None:
    limit = derived(EIGHT, [min(1.0, 0.05 * times)] * 8, SHARE)
    delays = [delay(times, 0, np.random.default_rng(seed), fractions=fractions) for seed in range(20)]
    assert np.percentile(delays, 95) < limit < 20_000


@pytest.mark.slow
def test_no_answer_is_certified_after_the_derived_delay() -> None:
    assert through_a_node([("fast", Quality.FAST)]) == []


@pytest.mark.slow
def test_nor_is_one_of_a_kind_whose_answers_differ_in_part() -> None:
    assert through_a_node([("fast", Quality.FAST)], ["disagrees 4 times", "restart"], DETECTION) == []
