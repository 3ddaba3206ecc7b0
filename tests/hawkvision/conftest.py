"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hawkvision.client.client_node import Start, starter


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts nodes, and stops them afterwards."""
    yield from starter()
