"""A Chromium, and nodes for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from hawkvision.cascade.certification.profile_files import load_profile
from hawkvision.models.manifest import artifact_path, cache_dir, models_dir
from hawkvision.servers.keyfile import Scope, add_key
from hawkvision.system.child_server import ServerProcess, running
from tests.browser import chromium
from tests.edge.conftest import Caller
from tests.edge.peer import Peer, running_peer
from tests.images import encoded

EDGE = "squeezenet1_1_int8"
REFERENCE = load_profile(models_dir() / "imagenet" / "profile.json").stage("reference").fingerprint


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A key of each scope, by its name, and under `file` where they are."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    return {scope.value: add_key(path, scope.value, [scope]) for scope in Scope} | {"file": str(path)}


@pytest.fixture(scope="module")
def tier() -> Iterator[Peer]:
    with running_peer(model="reference", fingerprint=REFERENCE) as peer:
        yield peer


@pytest.fixture(scope="module")
def node(tier: Peer) -> Iterator[ServerProcess]:
    """A node without keys, whose edge stage is hardly ever sure, with a tier."""
    with running("edge", "--port", "0", "--backend", "noop", "--datacenter-url", tier.url) as process:
        yield process


@pytest.fixture(scope="module")
def keyed(tier: Peer, keys: dict[str, str]) -> Iterator[ServerProcess]:
    """A node with these keys."""
    command = ("edge", "--port", "0", "--backend", "noop", "--datacenter-url", tier.url, "--keys-file", keys["file"])
    with running(*command) as process:
        yield process


@pytest.fixture(scope="module")
def certified(tier: Peer) -> Iterator[ServerProcess]:
    """A node without keys that runs what was certified."""
    if not artifact_path(cache_dir(), "imagenet", EDGE).is_file():
        pytest.skip(f"{EDGE} has not been built on this machine")
    command = ("edge", "--port", "0", "--backend", "onnxruntime", "--variant", EDGE, "--datacenter-url", tier.url)
    with running(*command) as process:
        yield process


@pytest.fixture(scope="module")
def audited(tier: Peer, keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A node with these keys that keeps images, and has audited some sixty, which the tier answers otherwise."""
    if not artifact_path(cache_dir(), "imagenet", EDGE).is_file():
        pytest.skip(f"{EDGE} has not been built on this machine")
    folder = tmp_path_factory.mktemp("audited")
    command = [
        "edge", "--port", "0", "--backend", "onnxruntime", "--variant", EDGE, "--datacenter-url", tier.url,
        "--state-file", str(folder / "state"), "--certificates", str(folder / "certificates.json"),
        "--audit-share", "0.2", "--review-max-bytes", "10000000", "--review-max-days", "1", "--keys-file", keys["file"],
    ]  # fmt: skip
    with running(*command) as process:
        caller = Caller(process)
        bearer = {scope: {"Authorization": f"Bearer {keys[scope]}"} for scope in ("infer", "review")}
        while caller.send("GET", "/v1/review", headers=bearer["review"]).json["audits"] < 55:
            for _ in range(20):
                assert caller.send("POST", "/v1/infer?quality=fast", encoded(), bearer["infer"]).status == 200
        caller.close()
        yield process


@pytest.fixture
def photograph(tmp_path: Path) -> Path:
    """An image in a file whose name is markup."""
    path = tmp_path / "<img src=x onerror=alert(1)>.jpg"
    path.write_bytes(encoded())
    return path
