"""Servers that the tests of HTTP connections leave as they found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hawkvision.system.child_server import ServerProcess, running
from tests.hawkvision.servers.raw_http import KEY


@pytest.fixture(scope="package")
def node() -> Iterator[ServerProcess]:
    """A node on the no-op backend that asks for `KEY`."""
    with running("edge", "--port", "0", "--backend", "noop", "--api-key", KEY) as node:
        yield node


@pytest.fixture(scope="package")
def impatient() -> Iterator[ServerProcess]:
    """The server of `tests.hawkvision.servers.impatient`."""
    with running("tests.hawkvision.servers.impatient") as server:
        yield server
