"""What holds for all tests."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

ROOT: Final = Path(__file__).parent
MACHINE: Final = ("system", "hawkvision/datacenter", "loadgen")
"""Folders whose tests start clusters, make network devices or look at all processes: one worker runs them all."""

# No test may depend on how busy the machine is; a hanging one is ended by pytest-timeout.
settings.register_profile("hawkvision", deadline=None)
settings.load_profile("hawkvision")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file together, for they share fixtures, where several workers run them."""
    for item in items:
        file = item.path.relative_to(ROOT).as_posix()
        item.add_marker(pytest.mark.xdist_group("machine" if file.startswith(MACHINE) else file))
