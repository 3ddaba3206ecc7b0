"""Congestion controllers by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.transport.congestion import registry
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.congestion.registry import DEFAULT, controller_class
from hawkvision.transport.settings import DatagramSettings
from tests.hawkvision.transport.congestion.bbr import Bbr


def test_the_settings_default_is_a_controller() -> None:
    assert DatagramSettings().congestion_control == DEFAULT
    assert controller_class(DEFAULT) is LossTolerant


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no 'cubic'; expected one of loss_tolerant"):
        controller_class("cubic")


def test_a_package_adds_a_controller_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def added(value: str) -> None:
        found = EntryPoints([EntryPoint("theirs", value, registry.ENTRY_POINTS)])
        monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))

    added("tests.hawkvision.transport.congestion.bbr:Bbr")
    assert controller_class("theirs") is Bbr
    added("tests.hawkvision.transport.congestion.bbr:State")
    with pytest.raises(ConfigError, match="expected a CongestionController"):
        controller_class("theirs")
