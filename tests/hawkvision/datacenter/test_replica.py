from __future__ import annotations

import asyncio
import math
import time

from hawkvision.config import DatacenterConfig
from hawkvision.datacenter.replica import Replica, VariantAnswer, Views, settings_of
from hawkvision.errors import BadImage, DeadlineMissed, HawkVisionError, UnsupportedMedia
from hawkvision.manifest import Manifest
from tests.hawkvision.datacenter.conftest import picture


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
