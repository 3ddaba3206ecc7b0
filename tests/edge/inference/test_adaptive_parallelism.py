"""One image on several cores: when a node uses them."""

from __future__ import annotations

import asyncio

import pytest

from edge.inference.edge_stage import EdgeStage, InferenceJob, LoadedModel, StagePrediction
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.types import Quality
from hawkvision.imaging.preprocessing import probe
from hawkvision.tasks.class_scores import Score
from tests.edge.bench import SPEC, SURE, GatedBackend, bench
from tests.hawkvision.inference.test_adaptive_parallelism import Working
from tests.hawkvision.tasks.classes import TEN
from tests.images import encoded


@pytest.mark.parametrize(
    ("alone", "images", "wide", "narrow"), [(True, 1, 1, 0), (False, 1, 0, 1), (True, 2, 0, 1), (False, 2, 0, 1)]
)
def test_only_an_image_that_is_alone_uses_several_threads(alone: bool, images: int, wide: int, narrow: int) -> None:
    stage = EdgeStage("small", LoadedModel("small", GatedBackend(SURE), SPEC, GatedBackend(SURE)), 1.0, Score.TOP1, TEN)
    body = encoded()
    look = InferenceJob(stage, body, probe(body), 3, 1_000_000, MonotonicClock(), alone=lambda: alone)
    assert all(isinstance(found, StagePrediction) for found in stage.infer_batch([look] * images))
    assert isinstance(stage.first.wide, GatedBackend)
    assert isinstance(stage.first.backend, GatedBackend)
    assert (stage.first.wide.inferred, stage.first.backend.inferred) == (wide, narrow)


def test_a_node_runs_wide_until_images_compete_and_closes_both_models() -> None:
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
