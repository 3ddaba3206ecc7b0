"""Tiers that several files of system tests ask, started once. `tests/conftest.py` runs each one's tests in a row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.build import verify
from hawkvision.models.manifest import cache_dir, load_manifest, models_dir
from hawkvision.system.child_server import ServerProcess, running
from tests.system import pages
from tests.system.up import Up, up


@pytest.fixture(scope="session")
def cascade() -> None:
    """The built ImageNet cascade, or a skip that says how to get it."""
    manifest = load_manifest("imagenet", models_dir())
    try:
        verify(manifest.task, cache=cache_dir())
    except ArtifactError as error:
        pytest.skip(f"the cascade is not built: {error}")


@pytest.fixture(scope="package")
def both(cascade: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Both tiers with the real cascade, by `hawkvision up`. A test of test_up.py ends them."""
    folder = tmp_path_factory.mktemp("up")
    with up(folder / "log", environment=pages.shell_environment(folder)) as found:
        found.ready()
        yield found


@pytest.fixture(scope="package")
def noop_tier() -> Iterator[ServerProcess]:
    """A datacenter of two tasks below a path, and of one that has no manifest: over HTTP and by datagrams."""
    words = ("--backend", "noop", "--port", "0", "--datagram-port", "0", "--route-prefix", "/vision")
    with running("hawkvision.datacenter", *words, "--tasks", "imagenet,cifar10,letters") as tier:
        yield tier
