from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import BadImage, DeadlineMissed, HawkVisionError, TooLarge, UnsupportedMedia
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.execution.group_settings import group_settings, process_settings
from hawkvision.datacenter.execution.replica import Replica
from hawkvision.datacenter.stages.catalog import ServedStage, catalog_of
from hawkvision.datacenter.stages.ensemble import (
    AcceptThreshold,
    Augmentation,
    EvaluationRequest,
    VariantAnswer,
    evaluation_requests,
)
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.inference.batch_sizes import FixedBatches
from hawkvision.models.fingerprints import EXACT, parts_of
from hawkvision.models.manifest import Manifest
from hawkvision.tasks.class_scores import Probabilities, Score, average
from tests.hawkvision.datacenter.conftest import image, with_models
from tests.hawkvision.tasks.classes import classes_of
from tests.images import flat_png

SMALL = ServedStage("small", ("small",))
ENSEMBLE = ServedStage("reference", ("small", "medium"), mirrored=True)
UPRIGHT, BOTH = evaluation_requests(SMALL), evaluation_requests(ENSEMBLE)
NEVER = AcceptThreshold(Score.TOP1, math.inf)


def replica(manifest: Manifest, config: DatacenterConfig) -> Replica:
    catalog = catalog_of(manifest, classes_of(manifest), config)
    (group,) = catalog.groups
    return Replica(process_settings(group, catalog, config), group_settings(group, catalog, config))


async def classify(
    loaded: Replica, body: bytes, evaluations: Sequence[EvaluationRequest], left_ms: float | None
) -> tuple[tuple[VariantAnswer, ...], ...] | HawkVisionError:
    """The parts of an answer, or the error."""
    try:
        return tuple([part async for part in loaded.run(body, evaluations, deadline(left_ms), streaming=False)])
    except HawkVisionError as error:
        return error


async def streamed(
    loaded: Replica, body: bytes, evaluations: Sequence[EvaluationRequest], left_ms: float | None
) -> AsyncIterator[tuple[VariantAnswer, ...] | HawkVisionError]:
    """The parts of an answer as they come; the last may be the error."""
    try:
        async for part in loaded.run(body, evaluations, deadline(left_ms), streaming=True):
            yield part
    except HawkVisionError as error:
        yield error


def deadline(left_ms: float | None) -> Deadline | None:
    return None if left_ms is None else Deadline.after_ms(left_ms, time.monotonic())


def test_a_bad_image_does_not_fail_its_neighbours(manifest: Manifest, config: DatacenterConfig) -> None:
    async def together() -> list[tuple[tuple[VariantAnswer, ...], ...] | HawkVisionError]:
        loaded = replica(manifest, config)
        bodies = [image(), b"not an image", image(), image()[:600]]
        return await asyncio.gather(*[classify(loaded, b, BOTH, None) for b in bodies])

    answers = asyncio.run(together())
    assert [type(a) for a in answers] == [tuple, UnsupportedMedia, tuple, BadImage]


def test_an_expired_request_is_not_even_decoded(manifest: Manifest, config: DatacenterConfig) -> None:
    async def late() -> list[object]:
        loaded, past = replica(manifest, config), -1000.0
        parts = [part async for part in streamed(loaded, b"not an image", UPRIGHT, past)]
        return [await classify(loaded, b"not an image", UPRIGHT, past), *parts]

    assert [type(answer) for answer in asyncio.run(late())] == [DeadlineMissed, DeadlineMissed]


def test_probabilities_sum_to_one_whatever_the_views(manifest: Manifest, config: DatacenterConfig) -> None:
    async def each() -> list[tuple[tuple[VariantAnswer, ...], ...] | HawkVisionError]:
        loaded = replica(manifest, config)
        looks = [(EvaluationRequest(ENSEMBLE, {"small": views}),) for views in Augmentation]
        return await asyncio.gather(*[classify(loaded, image(), look, None) for look in looks])

    for parts in asyncio.run(each()):
        (answer,) = answered(parts)
        assert answer.output.shape == (10,)
        assert abs(float(answer.output.sum()) - 1.0) < 1e-5


U, M = Augmentation.UPRIGHT, Augmentation.MIRROR


def opinionated(manifest: Manifest) -> Manifest:
    """The no-op backend shows the same in each view; so sharpened, it is as good as certain."""
    variants = tuple(msgspec.structs.replace(v, temperature=0.01) for v in manifest.variants)
    return msgspec.structs.replace(manifest, variants=variants)


def asked(parts: Sequence[tuple[VariantAnswer, ...] | HawkVisionError]) -> list[tuple[str, Augmentation]]:
    return [(answer.variant, answer.augmentation) for part in parts if isinstance(part, tuple) for answer in part]


@pytest.mark.parametrize(
    ("wanted", "sure", "unsure"),
    [
        (
            {"small": Augmentation.BOTH, "medium": Augmentation.BOTH},
            [[("small", U)], [("medium", Augmentation.BOTH)]],
            [[("small", U)], [("small", M), ("medium", Augmentation.BOTH)]],
        ),
        ({"small": U, "medium": U}, [[("small", U)], [("medium", U)]], [[("small", U)], [("medium", U)]]),
        ({"small": M, "medium": M}, [[("medium", M)], [("small", M)]], [[("medium", M)], [("small", M)]]),
        (
            {"small": M, "medium": Augmentation.BOTH},
            [[("medium", U)], [("small", M), ("medium", M)]],  # three views of four settle it, two never do
            [[("medium", U)], [("small", M), ("medium", M)]],
        ),
    ],
)
def test_the_largest_variant_runs_first_and_the_others_together_unless_some_are_likely_to_decide(
    manifest: Manifest,
    config: DatacenterConfig,
    wanted: dict[str, Augmentation],
    sure: list[list[tuple[str, Augmentation]]],
    unsure: list[list[tuple[str, Augmentation]]],
) -> None:
    sizes = {"small": 2_000, "medium": 1_000}
    variants = tuple(msgspec.structs.replace(v, bytes=sizes[v.name]) for v in manifest.variants)
    sized = msgspec.structs.replace(manifest, variants=variants)

    async def parts(of: Manifest) -> list[list[tuple[str, Augmentation]]]:
        loaded = replica(of, config)
        received = [part async for part in streamed(loaded, image(), (EvaluationRequest(ENSEMBLE, wanted),), None)]
        return [asked([part]) for part in received]

    assert asyncio.run(parts(opinionated(sized))) == sure
    assert asyncio.run(parts(sized)) == unsure


@pytest.mark.parametrize(
    ("evaluations", "sure", "unsure"),
    [
        (BOTH, 3, 4),  # of four views, one may be missing; both views of one may be one answer
        (evaluation_requests(SMALL, ENSEMBLE, AcceptThreshold(Score.TOP1, 0.9)), 1, 4),
        (evaluation_requests(SMALL, ENSEMBLE, NEVER), 3, 4),
    ],
)
def test_a_replica_stops_once_the_evaluations_have_enough(
    manifest: Manifest, config: DatacenterConfig, evaluations: tuple[EvaluationRequest, ...], sure: int, unsure: int
) -> None:
    async def views(of: Manifest) -> set[int]:
        loaded = replica(of, config)
        parts = [part async for part in streamed(loaded, image(), evaluations, None)]
        at_once = await classify(loaded, image(), evaluations, None)
        assert isinstance(at_once, tuple)
        return {sum(2 if its is Augmentation.BOTH else 1 for _, its in asked(each)) for each in (parts, at_once)}

    assert asyncio.run(views(opinionated(manifest))) == {sure}
    assert asyncio.run(views(manifest)) == {unsure}


def test_two_evaluations_are_one_call_and_no_part_belongs_to_both(manifest: Manifest, config: DatacenterConfig) -> None:
    async def received() -> list[list[tuple[str, Augmentation]]]:
        loaded = replica(manifest, config)
        evaluations = evaluation_requests(ServedStage("upright", ("small", "medium")), ENSEMBLE, NEVER)
        parts = [part async for part in streamed(loaded, image(), evaluations, None)]
        return [asked([part]) for part in parts]

    first, *second = asyncio.run(received())
    assert sorted(first) == [("medium", U), ("small", U)]
    assert sorted(each for part in second for each in part) == [("medium", M), ("small", M)]


def test_a_bad_image_is_an_error_and_no_parts(manifest: Manifest, config: DatacenterConfig) -> None:
    async def parts() -> list[object]:
        return [part async for part in streamed(replica(manifest, config), b"not an image", BOTH, None)]

    assert [type(part) for part in asyncio.run(parts())] == [UnsupportedMedia]


@pytest.fixture
def real(manifest: Manifest, tmp_path: Path) -> Manifest:
    """The manifest with model files under `tmp_path`."""
    return with_models(manifest, tmp_path)


@pytest.mark.parametrize("backend", ["onnxruntime", "noop"])
def test_every_answer_states_what_was_loaded_and_runs(real: Manifest, tmp_path: Path, backend: BackendKind) -> None:
    config = DatacenterConfig(tasks=(real.task,), cache_dir=tmp_path, backend=backend)

    async def scenario() -> tuple[Replica, tuple[tuple[VariantAnswer, ...], ...] | HawkVisionError, str]:
        loaded = replica(real, config)
        return loaded, await classify(loaded, image(), BOTH, None), loaded.statement

    loaded, answers, present = asyncio.run(scenario())
    assert {answer.statement for answer in answered(answers)} == {loaded.statement} == {present}
    served = catalog_of(real, classes_of(real), config).stage("reference")
    assert served is not None
    execution = "onnxruntime:CPUExecutionProvider" if backend == "onnxruntime" else None
    assert served.ran(present) == (execution and f"{real.fingerprint('reference')}/{execution}")


def test_half_precision_is_stated_and_not_listed_as_certified(real: Manifest, tmp_path: Path) -> None:
    config = DatacenterConfig(tasks=(real.task,), cache_dir=tmp_path, onnx_precision="fp16")
    served = catalog_of(real, classes_of(real), config).stage("reference")
    assert served is not None
    assert served.fingerprint is None
    ran = served.ran(replica(real, config).statement)
    assert ran is not None
    assert ":fp16:" in ran
    assert not parts_of(ran)[1] <= EXACT


@pytest.mark.parametrize("most", [0, 4])
def test_on_a_device_batches_run_at_warm_sizes_and_answer_as_on_the_cpu(
    real: Manifest, tmp_path: Path, most: int
) -> None:
    """Another provider than the CPU's, which takes no layer of these models: the CPU runs them as a GPU would."""
    on_cpu = DatacenterConfig(tasks=(real.task,), cache_dir=tmp_path)
    device = ("AzureExecutionProvider", "CPUExecutionProvider")
    on_device = msgspec.structs.replace(on_cpu, onnx_providers=device, max_batch_size=most)

    async def answers(loaded: Replica) -> list[dict[str, Probabilities]]:
        found = await asyncio.gather(*(classify(loaded, image(), BOTH, None) for _ in range(7)))
        return [seen(answered(each)) for each in found]

    cpu, batched = replica(real, on_cpu), replica(real, on_device)
    for model in batched.models.models.values():
        fixed = model._narrow
        assert isinstance(fixed, FixedBatches)
        assert fixed.sizes == (1, 2, 4) if most else fixed.sizes[0] == 1
    wanted, found = asyncio.run(answers(cpu)), asyncio.run(answers(batched))
    for one, other in zip(wanted, found, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_allclose(other[key], one[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_image_gets_the_same_answers_in_parts_and_beside_others_and_on_however_many_threads(
    real: Manifest, tmp_path: Path, threads: int
) -> None:
    config = DatacenterConfig(tasks=(real.task,), cache_dir=tmp_path, intra_op_threads=threads)

    async def scenario() -> list[dict[str, Probabilities]]:
        loaded = replica(real, config)
        assert [loaded.models.models[name].wide is not None for name in ENSEMBLE.members] == [threads > 1] * 2
        singly = [evaluation_requests(ServedStage(name, (name,), mirrored=True)) for name in ENSEMBLE.members]
        one_by_one = [await classify(loaded, image(), evaluations, None) for evaluations in singly]
        beside = await asyncio.gather(*(classify(loaded, image(), BOTH, None) for _ in range(5)))
        parts = [part async for part in streamed(loaded, image(), BOTH, None)]
        return [
            seen([answer for each in one_by_one for answer in answered(each)]),
            seen([answer for part in parts if isinstance(part, tuple) for answer in part]),
            *(seen(answered(answers)) for answers in beside),
        ]

    first, *others = asyncio.run(scenario())
    for other in others:
        for name in ENSEMBLE.members:
            np.testing.assert_allclose(other[name], first[name], rtol=1e-5)


def answered(parts: tuple[tuple[VariantAnswer, ...], ...] | HawkVisionError) -> tuple[VariantAnswer, ...]:
    assert isinstance(parts, tuple)
    return tuple(answer for part in parts for answer in part)


def seen(answers: Sequence[VariantAnswer]) -> dict[str, Probabilities]:
    """Of every variant, the mean over its views."""
    views: dict[str, list[Probabilities]] = {}
    for answer in answers:
        views.setdefault(answer.variant, []).append(answer.output)
    return {variant: average(rows) for variant, rows in views.items()}


def test_images_that_cost_too_much_are_refused_before_they_are_decoded(
    manifest: Manifest, config: DatacenterConfig
) -> None:
    tight = msgspec.structs.replace(config, request_memory_bytes=9 * 2**20, max_pixels_whole=1_500_000)

    async def each() -> tuple[list[object], int]:
        loaded = replica(manifest, tight)
        bodies = [flat_png(2000, 1000), flat_png(1200, 1000, 6), flat_png(1200, 1000)]
        answers = [await classify(loaded, body, UPRIGHT, None) for body in bodies]
        return list(answers), loaded.memory.in_use

    (many, much, fine), in_use = asyncio.run(each())
    assert isinstance(many, TooLarge)
    assert "at most 1500000 are decoded, for a PNG" in str(many)
    # With alpha it takes eight bytes a pixel.
    assert isinstance(much, TooLarge)
    assert "of memory; one request may have 9437184" in str(much)
    assert isinstance(fine, tuple)
    assert in_use == 0


def test_rasters_of_all_images_together_stay_within_the_memory_there_is(
    manifest: Manifest, config: DatacenterConfig
) -> None:
    tight = msgspec.structs.replace(config, memory_bytes=64 * 2**20)

    async def crowd() -> tuple[list[object], int, int, int]:
        loaded = replica(manifest, tight)
        body = flat_png(1600, 1600)
        asked = [asyncio.create_task(classify(loaded, body, BOTH, None)) for _ in range(8)]
        asked[3].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return list(answers), loaded.memory.peak, loaded.memory.limit, loaded.memory.in_use

    answers, peak, limit, in_use = asyncio.run(crowd())
    assert [type(answer) for answer in answers].count(tuple) == 7
    assert 2 * 6 * 1600 * 1600 < peak <= limit
    assert in_use == 0
