"""One picture on several cores: when a node does so."""

from __future__ import annotations

import asyncio

import pytest

from edge.inference.edge_stage import EdgeResult, Look, Model, Rung
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import BadImage
from hawkvision.core.types import Quality, Score
from hawkvision.imaging.preprocessing import probe
from tests.edge.bench import SPEC, SURE, GatedBackend, bench
from tests.hawkvision.inference.test_adaptive_parallelism import Working
from tests.images import encoded


@pytest.mark.parametrize(
    ("alone", "pictures", "wide", "narrow"), [(True, 1, 1, 0), (False, 1, 0, 1), (True, 2, 0, 1), (False, 2, 0, 1)]
)
def test_a_picture_that_is_alone_is_run_wide_and_no_other(alone: bool, pictures: int, wide: int, narrow: int) -> None:
    rung = Rung("small", Model("small", GatedBackend(SURE), SPEC, GatedBackend(SURE)), 1.0, Score.TOP1)
    body = encoded()
    look = Look(rung, body, probe(body), 3, 1_000_000, MonotonicClock(), alone=lambda: alone)
    assert all(isinstance(found, EdgeResult) for found in rung.look_together([look] * pictures))
    assert isinstance(rung.first.wide, GatedBackend)
    assert isinstance(rung.first.backend, GatedBackend)
    assert (rung.first.wide.inferred, rung.first.backend.inferred) == (wide, narrow)


class Foresighted(GatedBackend):
    """Told that a picture will follow; notes how many it had inferred by then."""

    def __init__(self) -> None:
        super().__init__(SURE)
        self.told: list[int] = []

    def expect(self) -> None:
        self.told.append(self.inferred)


@pytest.mark.parametrize(("alone", "pictures", "told"), [(True, 1, [0]), (False, 1, []), (True, 2, [])])
def test_a_wide_backend_hears_of_a_lone_picture_before_it_is_decoded(
    alone: bool, pictures: int, told: list[int]
) -> None:
    wide = Foresighted()
    rung = Rung("small", Model("small", GatedBackend(SURE), SPEC, wide), 1.0, Score.TOP1)
    look = Look(rung, encoded(), probe(encoded()), 3, 1_000_000, MonotonicClock(), alone=lambda: alone)
    rung.look_together([look] * pictures)
    assert wide.told == told
    broken = Look(rung, encoded()[:300], probe(encoded()), 3, 1_000_000, MonotonicClock(), alone=lambda: True)
    with pytest.raises(BadImage):
        broken()
    assert wide.told[len(told) :] == [wide.inferred], "a picture that turns out to be none was expected as well"


def test_a_node_runs_wide_until_pictures_compete_and_closes_both_models() -> None:
    wide = Working(1)

    async def scenario() -> tuple[list[int], int]:
        async with bench(None, SURE, wide=wide) as it:
            counted = []
            await it.ask(target=Quality.FAST)
            counted += [wide.inferred, it.backend.inferred]
            await asyncio.gather(*(it.ask(target=Quality.FAST) for _ in range(8)))
            counted += [wide.inferred, it.backend.inferred]
            await it.ask(target=Quality.FAST)
            return [*counted, wide.inferred], it.backend.inferred

    (alone, none, after_many, together, again), at_last = asyncio.run(scenario())
    assert (alone, none) == (1, 0)
    assert together > 0
    assert (again, at_last) == (after_many + 1, together)
    assert wide.closed == 1
