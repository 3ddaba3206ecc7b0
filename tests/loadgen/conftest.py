"""The null server, once for all tests that ask a server which answers always the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hawkvision.system.child_server import ServerProcess, running


@pytest.fixture(scope="session")
def null() -> Iterator[ServerProcess]:
    with running("loadgen.clients.noise_floor", title="the null server") as server:
        yield server
