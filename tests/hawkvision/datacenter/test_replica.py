from __future__ import annotations

import asyncio
import hashlib
import math
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hawkvision.config import DatacenterConfig
from hawkvision.datacenter.replica import Replica, VariantAnswer, Views, settings_of
from hawkvision.errors import BadImage, DeadlineMissed, HawkVisionError, UnsupportedMedia
from hawkvision.manifest import Manifest, artifact_path
from tests.hawkvision.datacenter.conftest import picture
from tests.hawkvision.vision.graphs import tiny_classifier


def replica(manifest: Manifest, config: DatacenterConfig) -> Replica:
    return Replica(settings_of(manifest.variant("small"), manifest.classes, config))


def test_a_bad_picture_does_not_fail_its_neighbours(manifest: Manifest, config: DatacenterConfig) -> None:
    async def together() -> list[VariantAnswer | HawkVisionError]:
        loaded = replica(manifest, config)
        bodies = [picture(), b"not a picture", picture(), picture()[:600]]
        return await asyncio.gather(*[loaded.classify(b, Views.UPRIGHT, math.inf) for b in bodies])

    answers = asyncio.run(together())
    assert [type(a) for a in answers] == [VariantAnswer, UnsupportedMedia, VariantAnswer, BadImage]


def test_an_expired_request_is_not_even_decoded(manifest: Manifest, config: DatacenterConfig) -> None:
    async def late() -> VariantAnswer | HawkVisionError:
        return await replica(manifest, config).classify(b"not a picture", Views.UPRIGHT, time.time() - 1.0)

    assert isinstance(asyncio.run(late()), DeadlineMissed)


def test_probabilities_sum_to_one_whatever_the_views(manifest: Manifest, config: DatacenterConfig) -> None:
    async def each() -> list[VariantAnswer | HawkVisionError]:
        loaded = replica(manifest, config)
        return await asyncio.gather(*[loaded.classify(picture(), views, math.inf) for views in Views])

    for answer in asyncio.run(each()):
        assert isinstance(answer, VariantAnswer)
        assert answer.probabilities.shape == (1, 10)
        assert abs(float(answer.probabilities.sum()) - 1.0) < 1e-5


@pytest.mark.parametrize("threads", [1, 2])
def test_a_picture_gets_the_same_answer_whoever_looks_beside_and_on_however_many_threads(
    manifest: Manifest, tmp_path: Path, threads: int
) -> None:
    data = tiny_classifier(height=32, width=32, classes=manifest.classes)
    file = artifact_path(tmp_path, manifest.task, "small")
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    variant = msgspec.structs.replace(manifest.variant("small"), sha256=hashlib.sha256(data).hexdigest())
    config = DatacenterConfig(task=manifest.task, cache_dir=tmp_path, intra_op_threads=threads)

    async def alone_and_together() -> list[VariantAnswer | HawkVisionError]:
        loaded = Replica(settings_of(variant, manifest.classes, config))
        assert (loaded._wide is not None) is (threads > 1)
        alone = await loaded.classify(picture(), Views.BOTH, math.inf)
        beside = await loaded.classify(picture(), Views.BOTH, math.inf, alone=False)
        return [
            alone,
            beside,
            *await asyncio.gather(*(loaded.classify(picture(), Views.BOTH, math.inf) for _ in range(5))),
        ]

    alone, *together = asyncio.run(alone_and_together())
    assert isinstance(alone, VariantAnswer)
    for answer in together:
        assert isinstance(answer, VariantAnswer)
        np.testing.assert_allclose(answer.probabilities, alone.probabilities, rtol=1e-5)
