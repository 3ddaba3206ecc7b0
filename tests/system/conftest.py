"""Both tiers with the real cascade, started once for all system tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hawkvision.client.blocking import Client
from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.build import verify
from hawkvision.models.manifest import cache_dir, load_manifest, models_dir
from hawkvision.system.child_server import ServerProcess, running


@pytest.fixture(scope="session")
def cascade() -> None:
    """The built ImageNet cascade, or a skip that says how to get it."""
    manifest = load_manifest("imagenet", models_dir())
    try:
        verify(manifest.task, cache=cache_dir())
    except ArtifactError as error:
        pytest.skip(f"the cascade is not built: {error}")


@pytest.fixture(scope="session")
def datacenter(cascade: None) -> Iterator[ServerProcess]:
    with running("hawkvision.datacenter", "--port", "0") as tier:
        yield tier


@pytest.fixture(scope="session")
def node(datacenter: ServerProcess) -> Iterator[ServerProcess]:
    with running("edge", "--port", "0", "--datagram-port", "0", "--datacenter-url", datacenter.url) as edge:
        yield edge


@pytest.fixture(scope="session")
def node_url(node: ServerProcess) -> str:
    return node.url


@pytest.fixture
def client(node: ServerProcess) -> Iterator[Client]:
    with Client(node.url) as client:
        yield client
