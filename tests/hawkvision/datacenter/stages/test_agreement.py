"""The server and the replicas agree on when a stage has enough, for all pairs of stages."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import cv2
import msgspec
import numpy as np
import pytest
from ray.serve.handle import DeploymentHandle

from hawkvision.core.clock import Deadline
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.handles import HandleVariants
from hawkvision.datacenter.deployment.messages import PROTOCOL, decode_request, encode_answers
from hawkvision.datacenter.execution.group_settings import group_settings, process_settings
from hawkvision.datacenter.execution.replica import Replica
from hawkvision.datacenter.stages.cascade_executor import SecondStage, run_two_stages
from hawkvision.datacenter.stages.catalog import Group, ServedStage, catalog_of
from hawkvision.datacenter.stages.ensemble import (
    AcceptThreshold,
    Augmentation,
    EvaluationRequest,
    StageResult,
    VariantAnswer,
)
from hawkvision.models.manifest import Manifest
from hawkvision.tasks.class_scores import Score
from tests.hawkvision.datacenter.conftest import with_models
from tests.hawkvision.tasks.classes import classes, classes_of

STAGES = (
    ServedStage("small", ("small",)),
    ServedStage("small, twice", ("small",), mirrored=True),
    ServedStage("medium", ("medium",)),
    ServedStage("upright", ("small", "medium")),
    ServedStage("all", ("medium", "small"), mirrored=True, temperature=0.8),
)
BARS = (0.0, 0.4, 0.7, 0.99, math.inf)


@dataclass
class Local:
    """The way to a replica in this process."""

    replica: Replica

    async def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, deadline: Deadline | None, *, streaming: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        async for part in self.replica.run(image, evaluations, deadline, streaming=streaming):
            yield part


def replica(manifest: Manifest, models: Path, temperature: float) -> Replica:
    """One whose models see something in images, and are as sure of it as the temperature says."""
    variants = with_models(manifest, models).variants
    config = DatacenterConfig(tasks=(manifest.task,), cache_dir=models, backend="onnxruntime")
    known = msgspec.structs.replace(
        manifest, variants=tuple(msgspec.structs.replace(each, temperature=temperature) for each in variants)
    )
    catalog = catalog_of(known, classes_of(manifest), config)
    (group,) = catalog.groups
    return Replica(process_settings(group, catalog, config), group_settings(group, catalog, config))


def images(number: int) -> list[bytes]:
    rng = np.random.default_rng(3)
    plain = [rng.integers(0, 256, (1, 1, 3)) + rng.normal(0, 60, (64, 64, 3)) for _ in range(number)]
    return [bytes(cv2.imencode(".png", each.clip(0, 255).astype(np.uint8))[1]) for each in plain]


@pytest.mark.parametrize("temperature", [0.02, 0.2, 0.6, 2.0])
def test_stages_end_where_the_replica_stops_with_the_class_of_all_views(
    manifest: Manifest, tmp_path: Path, temperature: float
) -> None:
    async def scenario() -> set[tuple[int, bool]]:
        variants, kinds = Local(replica(manifest, tmp_path, temperature)), set()

        async def look(
            first: ServedStage, second: SecondStage | None, image: bytes, *, parts: bool
        ) -> tuple[StageResult, ...]:
            receive = (lambda looks: reported.append(looks[-1])) if parts else None
            reported: list[StageResult] = []
            looks = await run_two_stages(variants, classes_of(manifest), first, second, image, None, receive)
            assert not any(look.decided for look in reported)
            return looks

        async def whole(stage: ServedStage, image: bytes) -> StageResult:
            """What it says with all its views, because of its score."""
            other = next(each for each in STAGES if each is not stage)
            return (await look(stage, (other, AcceptThreshold(Score.MARGIN, math.inf)), image, parts=False))[0]

        for image in images(4):
            all_views = {stage.name: await whole(stage, image) for stage in STAGES}
            for (first, second), bar, parts in itertools.product(
                itertools.permutations(STAGES, 2), BARS, (False, True)
            ):
                looks = await look(first, (second, AcceptThreshold(Score.MARGIN, bar)), image, parts=parts)
                accepted = all_views[first.name].score(Score.MARGIN) >= bar
                assert looks[-1].stage is (first if accepted else second)
                expected = all_views[looks[-1].stage.name]
                assert looks[-1].output.argmax() == expected.output.argmax()
                kinds.add((len(looks), looks[-1].missing > 0))
        return kinds

    kinds = asyncio.run(scenario())
    assert {looks for looks, _ in kinds} == {1, 2}
    assert ((2, True) in kinds) is (temperature < 1.0), "the sure ones settle before the last view"


@dataclass
class Elsewhere:
    """As a handle of Ray Serve to a deployment whose every variant sees the same, `top` as probable as it says."""

    top: float
    asked: list[dict[str, Augmentation]] = field(default_factory=list)
    cancelled: int = 0

    def options(self, **_: object) -> Elsewhere:
        return self

    @property
    def classify(self) -> Any:
        return None  # nobody asks for all parts at once

    @property
    def classify_streaming(self) -> Any:
        return self

    def remote(self, protocol: int, _: bytes, request: bytes) -> AsyncIterator[bytes]:
        assert protocol == PROTOCOL
        handle, evaluations = self, decode_request(request)[0]

        class Stream:
            def __init__(self) -> None:
                self.parts = iter(evaluations)

            def __aiter__(self) -> Stream:
                return self

            async def __anext__(self) -> bytes:
                evaluation = next(self.parts, None)
                if evaluation is None:
                    raise StopAsyncIteration
                handle.asked.append(dict(evaluation.wanted))
                row = np.array([handle.top, 1.0 - handle.top], np.float32)
                wanted = evaluation.wanted.items()
                return encode_answers([tuple(VariantAnswer(v, views, row, 0.0, 0.0, 0.0, 1) for v, views in wanted)])

            def cancel(self) -> None:
                handle.cancelled += 1

        return Stream()


@pytest.mark.parametrize(("top", "answered_by"), [(0.9, "small"), (0.6, "medium")])
def test_stages_in_two_groups_are_asked_one_after_the_other_and_the_second_only_if_it_is_needed(
    manifest: Manifest, top: float, answered_by: str
) -> None:
    handles = Elsewhere(top), Elsewhere(top)
    groups = [Group(variant.name, (variant,)) for variant in manifest.variants]
    variants = HandleVariants(groups, cast(list[DeploymentHandle], handles))
    second = (ServedStage("medium", ("medium",)), AcceptThreshold(Score.TOP1, 0.8))

    looks = asyncio.run(run_two_stages(variants, classes(2), STAGES[0], second, b"", None, lambda _: None))

    assert looks[-1].stage.name == answered_by
    assert [handle.asked for handle in handles] == [
        [{"small": Augmentation.UPRIGHT}],
        [] if answered_by == "small" else [{"medium": Augmentation.UPRIGHT}],
    ]
    assert [handle.cancelled for handle in handles] == [1, 0 if answered_by == "small" else 1]
