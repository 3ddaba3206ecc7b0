"""Datacenter stand-ins, and baselines that are installed in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hawkvision.core.settings.package_settings import settings_groups
from tests.bench.policies.baselines.plugin import INSTALLED
from tests.edge.conftest import large, peer

__all__ = ["large", "peer"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The baselines' entry points are found by this process, too."""
    monkeypatch.syspath_prepend(INSTALLED)
    settings_groups.cache_clear()
    yield
    settings_groups.cache_clear()
