from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hawkvision.cascade.scores import Probabilities, average, settled
from hawkvision.config import DatacenterConfig
from hawkvision.datacenter.catalog import catalog_of
from hawkvision.datacenter.replica import Replica, VariantAnswer, Views, settings_of
from hawkvision.errors import BadImage, DeadlineMissed, HawkVisionError, UnsupportedMedia
from hawkvision.manifest import Manifest, artifact_path
from tests.hawkvision.datacenter.conftest import picture
from tests.hawkvision.vision.graphs import tiny_classifier

UPRIGHT = {"small": Views.UPRIGHT}
BOTH = {"small": Views.BOTH, "medium": Views.BOTH}


def replica(manifest: Manifest, config: DatacenterConfig) -> Replica:
    catalog = catalog_of(manifest, config)
    (group,) = catalog.groups
    return Replica(settings_of(group, catalog, config))


def test_a_bad_picture_does_not_fail_its_neighbours(manifest: Manifest, config: DatacenterConfig) -> None:
    async def together() -> list[tuple[VariantAnswer, ...] | HawkVisionError]:
        loaded = replica(manifest, config)
        bodies = [picture(), b"not a picture", picture(), picture()[:600]]
        return await asyncio.gather(*[loaded.classify(b, BOTH, math.inf) for b in bodies])

    answers = asyncio.run(together())
    assert [type(a) for a in answers] == [tuple, UnsupportedMedia, tuple, BadImage]


def test_an_expired_request_is_not_even_decoded(manifest: Manifest, config: DatacenterConfig) -> None:
    async def late() -> list[object]:
        loaded, past = replica(manifest, config), time.time() - 1.0
        parts = [part async for part in loaded.piecemeal(b"not a picture", UPRIGHT, past)]
        return [await loaded.classify(b"not a picture", UPRIGHT, past), *parts]

    assert [type(answer) for answer in asyncio.run(late())] == [DeadlineMissed, DeadlineMissed]


def test_probabilities_sum_to_one_whatever_the_views(manifest: Manifest, config: DatacenterConfig) -> None:
    async def each() -> list[tuple[VariantAnswer, ...] | HawkVisionError]:
        loaded = replica(manifest, config)
        return await asyncio.gather(*[loaded.classify(picture(), {"small": views}, math.inf) for views in Views])

    for answers in asyncio.run(each()):
        assert isinstance(answers, tuple)
        (answer,) = answers
        assert answer.probabilities.shape == (1, 10)
        assert abs(float(answer.probabilities.sum()) - 1.0) < 1e-5


U, M = Views.UPRIGHT, Views.MIRROR


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (
            {"small": Views.BOTH, "medium": Views.BOTH},
            [[("small", U)], [("medium", Views.BOTH)], [("small", M)]],
        ),
        ({"small": U, "medium": U}, [[("small", U)], [("medium", U)]]),
        ({"small": M, "medium": M}, [[("medium", M)], [("small", M)]]),
        ({"small": M, "medium": Views.BOTH}, [[("medium", U)], [("medium", M)], [("small", M)]]),
        ({"medium": Views.BOTH}, [[("medium", U)], [("medium", M)]]),
    ],
)
def test_the_largest_variant_begins_and_the_smallest_looks_first_at_the_mirror_image(
    manifest: Manifest,
    config: DatacenterConfig,
    wanted: dict[str, Views],
    expected: list[list[tuple[str, Views]]],
) -> None:
    sizes = {"small": 2_000, "medium": 1_000}
    variants = tuple(msgspec.structs.replace(v, bytes=sizes[v.name]) for v in manifest.variants)

    async def parts() -> list[list[tuple[str, Views]]]:
        loaded = replica(msgspec.structs.replace(manifest, variants=variants), config)
        heard = [part async for part in loaded.piecemeal(picture(), wanted, math.inf)]
        return [[(a.variant, a.views) for a in part] for part in heard if isinstance(part, tuple)]

    assert asyncio.run(parts()) == expected


def test_what_earlier_looks_have_settled_is_not_looked_at_any_further(
    manifest: Manifest, config: DatacenterConfig
) -> None:
    lead = np.zeros((1, manifest.classes), np.float32)
    lead[0, 2] = 3.5  # of four views, one may be missing

    async def scenario() -> tuple[list[int], int, int]:
        loaded = replica(manifest, config)
        parts = [answered(part) async for part in loaded.piecemeal(picture(), BOTH, math.inf, lead)]
        open_ = np.zeros_like(lead)
        told = [len(answered(await loaded.classify(picture(), BOTH, math.inf, so_far))) for so_far in (lead, open_)]
        return [len(part) for part in parts], told[0], told[1]

    # The no-op backend's views say nothing of either class, so nothing is settled without what came before.
    assert asyncio.run(scenario()) == ([1], 2, 3)


@pytest.mark.parametrize("lead", np.linspace(0.9995, 1.0005, 41).tolist())
def test_whoever_stops_looking_is_never_contradicted_by_who_checks(
    manifest: Manifest, config: DatacenterConfig, lead: float
) -> None:
    so_far = np.zeros((1, manifest.classes), np.float32)
    so_far[0, 2] = lead  # of two more views, one may be missing

    async def scenario() -> bool:
        parts = replica(manifest, config).piecemeal(picture(), {"small": Views.BOTH}, math.inf, so_far)
        first, *more = [answer async for part in parts for answer in answered(part)]
        return bool(more) or settled(so_far + first.probabilities, 1)

    assert asyncio.run(scenario())


def test_a_bad_picture_is_an_error_and_no_parts(manifest: Manifest, config: DatacenterConfig) -> None:
    async def parts() -> list[object]:
        return [part async for part in replica(manifest, config).piecemeal(b"not a picture", BOTH, math.inf)]

    assert [type(part) for part in asyncio.run(parts())] == [UnsupportedMedia]


@pytest.fixture
def real(manifest: Manifest, tmp_path: Path) -> Manifest:
    """The manifest with model files under `tmp_path`."""
    variants = []
    for variant in manifest.variants:
        side = variant.input.height
        data = tiny_classifier(height=side, width=side, classes=manifest.classes)
        file = artifact_path(tmp_path, manifest.task, variant.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        variants.append(msgspec.structs.replace(variant, sha256=hashlib.sha256(data).hexdigest()))
    return msgspec.structs.replace(manifest, variants=tuple(variants))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_picture_gets_the_same_answers_in_parts_and_beside_others_and_on_however_many_threads(
    real: Manifest, tmp_path: Path, threads: int
) -> None:
    config = DatacenterConfig(task=real.task, cache_dir=tmp_path, intra_op_threads=threads)

    async def scenario() -> list[dict[str, Probabilities]]:
        loaded = replica(real, config)
        assert [loaded._models[name].wide is not None for name in BOTH] == [threads > 1] * 2
        one_by_one = [await loaded.classify(picture(), {name: Views.BOTH}, math.inf) for name in BOTH]
        beside = await asyncio.gather(*(loaded.classify(picture(), BOTH, math.inf) for _ in range(5)))
        parts = [part async for part in loaded.piecemeal(picture(), BOTH, math.inf)]
        together = [answer for part in parts for answer in answered(part)]
        return [
            seen([answer for part in one_by_one for answer in answered(part)]),
            seen(together),
            *(seen(answered(answers)) for answers in beside),
        ]

    first, *others = asyncio.run(scenario())
    for other in others:
        for name in BOTH:
            np.testing.assert_allclose(other[name], first[name], rtol=1e-5)


def answered(part: tuple[VariantAnswer, ...] | HawkVisionError) -> tuple[VariantAnswer, ...]:
    assert isinstance(part, tuple)
    return part


def seen(answers: Sequence[VariantAnswer]) -> dict[str, Probabilities]:
    """Of every variant, the mean over its views."""
    views: dict[str, list[Probabilities]] = {}
    for answer in answers:
        views.setdefault(answer.variant, []).append(answer.probabilities)
    return {variant: average(rows) for variant, rows in views.items()}
