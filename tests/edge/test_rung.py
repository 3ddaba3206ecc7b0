"""What the edge rung says of one picture, at its own temperature and at that of another condition."""

from __future__ import annotations

import numpy as np
import pytest

from edge.rung import EdgeResult, Rung
from hawkvision.clock import MonotonicClock
from hawkvision.types import Score
from hawkvision.vision.image import probe
from tests.edge.bench import SPEC, GatedBackend
from tests.pictures import encoded

LEAD = 4.0


def look(score: Score, temperature: float | None) -> EdgeResult:
    rung = Rung("small", GatedBackend(LEAD), SPEC, 1.5, score)
    return rung.look(encoded(), probe(encoded()), 3, 1_000_000, MonotonicClock(), temperature)


def expected(temperature: float) -> tuple[float, float]:
    """Of ten classes of which one leads: its probability, and that of each other."""
    total = np.exp(LEAD / temperature) + 9.0
    return float(np.exp(LEAD / temperature) / total), float(1.0 / total)


@pytest.mark.parametrize(("given", "used"), [(None, 1.5), (3.0, 3.0)])
def test_confidence_is_at_the_temperature_of_the_condition_if_one_is_given(given: float | None, used: float) -> None:
    first, second = expected(used)
    assert look(Score.TOP1, given).confidences[:2] == pytest.approx((first, second), rel=1e-5)
    assert look(Score.TOP1, given).score == pytest.approx(first, rel=1e-5)
    assert look(Score.MARGIN, given).score == pytest.approx(first - second, rel=1e-5)


def test_a_higher_temperature_changes_no_answer() -> None:
    assert look(Score.TOP1, None).indices == look(Score.TOP1, 9.0).indices
