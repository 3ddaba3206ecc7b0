"""A node with keys, which the tests of keys and of arriving requests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from hawkvision.servers.keyfile import Scope, add_key
from hawkvision.system.child_server import ServerProcess, running

SINGLE: Final = "a-key-with-every-right"
RATE: Final = 4
"""Requests a second of the keys `39` and `196`."""


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.toml"


@pytest.fixture(scope="session")
def keys(key_file: Path) -> dict[str, str]:
    """The keys of the file by their names."""
    scopes = {"camera": Scope.INFER, "prometheus": Scope.OBSERVE, "operator": Scope.OPERATE}
    made = {name: add_key(key_file, name, [scope]) for name, scope in scopes.items()}
    return made | {name: add_key(key_file, name, [Scope.INFER], RATE) for name in ("39", "196")}


@pytest.fixture(scope="session")
def keyed(key_file: Path, keys: dict[str, str]) -> Iterator[ServerProcess]:
    """A node with these keys and `SINGLE`."""
    with running("edge", "--port", "0", "--backend", "noop", "--api-key", SINGLE, "--keys-file", str(key_file)) as node:
        yield node
