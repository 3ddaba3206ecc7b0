"""What the edge rung says of one picture, at its own temperature and at that of another condition."""

from __future__ import annotations

import numpy as np
import pytest

from edge.rung import EdgeResult, Look, Rung
from hawkvision.clock import MonotonicClock
from hawkvision.errors import BadImage
from hawkvision.types import Score
from hawkvision.vision.image import probe
from hawkvision.vision.noop_backend import NoopBackend
from tests.edge.bench import SPEC, GatedBackend
from tests.pictures import encoded

LEAD = 4.0


def look(score: Score, temperature: float | None) -> EdgeResult:
    rung = Rung("small", GatedBackend(LEAD), SPEC, 1.5, score)
    return Look(rung, encoded(), probe(encoded()), 3, 1_000_000, MonotonicClock(), temperature)()


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


def test_pictures_looked_at_together_are_seen_as_each_alone_and_a_broken_one_harms_no_other() -> None:
    rung = Rung("small", NoopBackend((SPEC.height, SPEC.width, 3), 10), SPEC, 1.5, Score.MARGIN)
    bodies = [encoded(seed=1), encoded(seed=2)[:300], encoded(".png", seed=3)]
    looks = [
        Look(rung, body, probe(encoded(seed=2) if number == 1 else body), 3, 1_000_000, MonotonicClock(), 1.0 + number)
        for number, body in enumerate(bodies)
    ]
    first, broken, last = rung.look_together(looks)
    assert isinstance(broken, BadImage)
    for look_, found in ((looks[0], first), (looks[2], last)):
        alone = look_()
        assert isinstance(found, EdgeResult)
        assert (found.indices, found.confidences, found.score) == (alone.indices, alone.confidences, alone.score)
    assert all(isinstance(found, BadImage) for found in rung.look_together([looks[1], looks[1]]))
