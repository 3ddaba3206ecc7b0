"""A replica that cannot load its models at its start waits for better files or settings, unless another one serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hawkvision.core.errors import ArtifactError, BackendError, NotReady
from hawkvision.datacenter.deployment.messages import PROTOCOL, decode_presence, encode_request
from hawkvision.datacenter.deployment.replica_endpoint import ReplicaEndpoint
from hawkvision.datacenter.execution.group_settings import process_settings
from hawkvision.datacenter.stages.catalog import Catalog, catalog_of
from hawkvision.models.manifest import Manifest, artifact_path
from tests.hawkvision.datacenter.conftest import image, with_models
from tests.hawkvision.datacenter.deployment.test_reconfigure import SMALL, ask, config, user_config
from tests.hawkvision.tasks.classes import classes_of

DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "of another hash": lambda file: file.write_bytes(b"another model"),
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.fixture
def catalog(manifest: Manifest, tmp_path: Path) -> Catalog:
    return catalog_of(with_models(manifest, tmp_path, seed=0), classes_of(manifest), config(tmp_path))


class Peer:
    """Whether another replica of the group serves."""

    def __init__(self, *, serves: bool = False) -> None:
        self.serves = serves

    async def __call__(self) -> bool:
        return self.serves


def waiting(catalog: Catalog, cache: Path, peer: Peer | None = None) -> ReplicaEndpoint:
    (group,) = catalog.groups
    return ReplicaEndpoint(process_settings(group, catalog, config(cache)), peer or Peer())


async def presence(replica: ReplicaEndpoint) -> Any:
    return decode_presence(await replica.present(PROTOCOL))


def damaged(catalog: Catalog, cache: Path) -> Path:
    """A model file that is gone; `mend` brings it back."""
    file = artifact_path(cache, catalog.task, "medium")
    file.rename(file.with_suffix(".away"))
    return file


def mend(file: Path) -> None:
    file.with_suffix(".away").rename(file)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_replica_without_usable_files_says_why_and_stays_healthy(
    catalog: Catalog, tmp_path: Path, damage: str
) -> None:
    DAMAGES[damage](artifact_path(tmp_path, catalog.task, "medium"))

    async def scenario() -> None:
        replica = waiting(catalog, tmp_path)
        await replica.reconfigure(user_config(catalog, tmp_path))
        await replica.check_health()
        said = await presence(replica)
        assert str(tmp_path) in said.failed
        with pytest.raises(NotReady, match=r"its models cannot be loaded: .*medium"):
            await ask(replica)
        streamed = [
            part async for part in replica.classify_streaming(PROTOCOL, image(), encode_request(SMALL, None, None))
        ]
        assert len(streamed) == 1, "one failure"

    asyncio.run(scenario())


def test_it_serves_by_itself_once_the_file_is_mended_and_the_log_names_the_failure_once(
    catalog: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hawkvision.datacenter")
    file = damaged(catalog, tmp_path)

    async def scenario() -> None:
        replica = waiting(catalog, tmp_path)
        for _ in range(2):  # Serve may give the same settings again
            await replica.reconfigure(user_config(catalog, tmp_path))
        mend(file)
        async with asyncio.timeout(60.0):
            while (await presence(replica)).failed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await ask(replica)

    asyncio.run(scenario())
    assert caplog.text.count("task shapes cannot be served: ") == 1
    assert caplog.text.count("task shapes is served now") == 1


def test_new_settings_are_taken_at_once(manifest: Manifest, catalog: Catalog, tmp_path: Path) -> None:
    damaged(catalog, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    newer = catalog_of(with_models(manifest, elsewhere, seed=1), classes_of(manifest), config(elsewhere))

    async def scenario() -> None:
        replica = waiting(catalog, tmp_path)
        await replica.reconfigure(user_config(catalog, tmp_path))
        await replica.reconfigure(user_config(newer, elsewhere))
        said = await presence(replica)
        assert (said.failed, said.refused) == ("", "")
        assert await ask(replica)

    asyncio.run(scenario())


@pytest.mark.parametrize("broken", [{"variants": []}, {"kind": "seen nowhere"}, {"backend": "unknown"}])
def test_settings_that_cannot_be_used_are_a_reason_too(
    catalog: Catalog, tmp_path: Path, broken: dict[str, object]
) -> None:
    async def scenario() -> None:
        replica = waiting(catalog, tmp_path)
        await replica.reconfigure({**user_config(catalog, tmp_path), **broken})
        assert (await presence(replica)).failed
        await replica.reconfigure(user_config(catalog, tmp_path))
        assert not (await presence(replica)).failed

    asyncio.run(scenario())


def test_a_replica_beside_one_that_serves_does_not_start_without_models(catalog: Catalog, tmp_path: Path) -> None:
    damaged(catalog, tmp_path)

    async def scenario() -> None:
        with pytest.raises(ArtifactError, match="the model file is missing"):
            await waiting(catalog, tmp_path, Peer(serves=True)).reconfigure(user_config(catalog, tmp_path))

    asyncio.run(scenario())


def test_a_waiting_replica_leaves_once_another_serves(catalog: Catalog, tmp_path: Path) -> None:
    damaged(catalog, tmp_path)
    peer = Peer()

    async def unhealthy(replica: ReplicaEndpoint) -> bool:
        try:
            await replica.check_health()
        except BackendError:
            return True
        return False

    async def scenario() -> None:
        replica = waiting(catalog, tmp_path, peer)
        await replica.reconfigure(user_config(catalog, tmp_path))
        assert not await unhealthy(replica)
        peer.serves = True
        async with asyncio.timeout(60.0):
            while not await unhealthy(replica):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(scenario())
