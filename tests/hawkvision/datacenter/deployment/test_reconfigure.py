"""A replica takes other models and limits while it serves."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.messages import (
    PROTOCOL,
    Part,
    decode_presence,
    decode_reply,
    encode_request,
)
from hawkvision.datacenter.deployment.replica_endpoint import ReplicaEndpoint
from hawkvision.datacenter.execution.group_settings import group_settings, process_settings
from hawkvision.datacenter.stages.catalog import Catalog, ServedStage, catalog_of
from hawkvision.datacenter.stages.ensemble import EvaluationRequest, evaluation_requests
from hawkvision.models.manifest import Manifest
from tests.hawkvision.datacenter.conftest import image, with_models
from tests.hawkvision.tasks.classes import classes_of

SMALL = evaluation_requests(ServedStage("small", ("small",)))


@pytest.fixture
def catalog(manifest: Manifest, tmp_path: Path) -> Catalog:
    """Of real models under `tmp_path`."""
    return catalog_of(with_models(manifest, tmp_path, seed=0), classes_of(manifest), config(tmp_path))


def config(cache: Path) -> DatacenterConfig:
    return DatacenterConfig(cache_dir=cache, backend="onnxruntime", intra_op_threads=1)


def user_config(catalog: Catalog, cache: Path, **limits: object) -> dict[str, Any]:
    (group,) = catalog.groups
    return msgspec.structs.replace(group_settings(group, catalog, config(cache)), **limits).to_user_config()


async def started(catalog: Catalog, cache: Path) -> ReplicaEndpoint:
    (group,) = catalog.groups
    replica = ReplicaEndpoint(process_settings(group, catalog, config(cache)))
    await replica.reconfigure(user_config(catalog, cache))
    return replica


async def ask(replica: ReplicaEndpoint, evaluations: tuple[EvaluationRequest, ...] = SMALL) -> tuple[Part, ...]:
    return decode_reply(await replica.classify(PROTOCOL, image(), encode_request(evaluations, None, None)))


def test_new_models_answer_new_images_and_the_statement_follows(
    manifest: Manifest, catalog: Catalog, tmp_path: Path
) -> None:
    async def scenario() -> tuple[tuple[Part, ...], tuple[Part, ...], str]:
        replica = await started(catalog, tmp_path)
        before = await ask(replica)
        newer = catalog_of(with_models(manifest, tmp_path, seed=1), classes_of(manifest), config(tmp_path))
        await replica.reconfigure(user_config(newer, tmp_path))
        presence = decode_presence(await replica.present(PROTOCOL))
        assert presence.refused == ""
        return before, await ask(replica), presence.statement

    (((before,),), ((after,),), stated) = asyncio.run(scenario())
    assert before.statement != after.statement == stated
    assert not np.array_equal(before.output, after.output)


def test_an_image_inside_finishes_with_the_models_that_it_began_with(catalog: Catalog, tmp_path: Path) -> None:
    go = threading.Event()

    async def scenario() -> tuple[Part, ...]:
        replica = await started(catalog, tmp_path)
        older = replica.replica.statement
        pool = replica.replica.inferring
        blocked = [pool.submit(go.wait, 60.0) for _ in range(pool._max_workers)]
        inside = asyncio.create_task(ask(replica))
        async with asyncio.timeout(60.0):
            while not replica.replica.models.in_use:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await replica.reconfigure(user_config(catalog, tmp_path, max_batch_size=3))
        assert replica.replica.models.settings.max_batch_size == 3
        go.set()
        for each in blocked:
            await asyncio.wrap_future(each)
        parts = await inside
        assert parts[0][0].statement == older
        return await ask(replica)

    try:
        assert asyncio.run(scenario())
    finally:
        go.set()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"labels": "ten"}, r"user_config: Expected `array`, got `str` - at `\$.labels`"),
        ({"variants": []}, r"user_config: expected at least one variant - at `\$.variants`"),
        ({"colour": 1}, "user_config: Object contains unknown field `colour`"),
        ({"cache_dir": "/nowhere"}, "/nowhere"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_and_the_old_ones_keep_serving(
    catalog: Catalog, tmp_path: Path, broken: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = user_config(catalog, tmp_path)

    async def scenario() -> None:
        replica = await started(catalog, tmp_path)
        before = await ask(replica)
        await replica.reconfigure({**good, **broken})
        refused = decode_presence(await replica.present(PROTOCOL)).refused
        assert re.search(reason, refused), refused
        assert (await ask(replica))[0][0].statement == before[0][0].statement
        await replica.reconfigure(good)
        assert decode_presence(await replica.present(PROTOCOL)).refused == ""

    asyncio.run(scenario())
    assert "the old ones stay in use" in caplog.text


def test_first_settings_that_cannot_be_used_fail_the_start(catalog: Catalog, tmp_path: Path) -> None:
    (group,) = catalog.groups
    replica = ReplicaEndpoint(process_settings(group, catalog, config(tmp_path)))
    with pytest.raises(ConfigError, match="user_config"):
        asyncio.run(replica.reconfigure({**user_config(catalog, tmp_path), "classes": 0.5}))


def test_a_variant_that_is_not_loaded_is_reported_and_not_awaited(catalog: Catalog, tmp_path: Path) -> None:
    async def scenario() -> None:
        replica = await started(catalog, tmp_path)
        with pytest.raises(NotReady, match="large: not among this replica's variants, "):
            await ask(replica, evaluation_requests(ServedStage("large", ("large",))))

    asyncio.run(scenario())


def test_replaced_models_are_closed_once_their_last_image_has_left(catalog: Catalog, tmp_path: Path) -> None:
    async def scenario() -> None:
        replica = await started(catalog, tmp_path)
        older = replica.replica.models
        with older.used():
            await replica.reconfigure(user_config(catalog, tmp_path, max_batch_size=3))
            assert not older.closed
        assert older.closed

    asyncio.run(scenario())
