"""Every option, setting and metric is described where it is declared, and the reference pages say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawkvision.cli.reference import PAGES, commands
from hawkvision.core.command_line import Option, Program, options_of, summary_of
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.load import settings_of
from hawkvision.datacenter.servers.metrics import DatacenterMetrics

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"
COMMANDS = dict(commands())
SETTINGS = [(kind.__name__, setting) for kind in (EdgeConfig, DatacenterConfig) for setting in settings_of(kind)]


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_what_the_code_says(name: str) -> None:
    written = (REFERENCE / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "stale: run `python -m hawkvision.cli.reference docs/reference`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_each_of_its_options_is_described(name: str) -> None:
    assert summary_of(COMMANDS[name])
    options = () if isinstance(COMMANDS[name], Program) else options_of(COMMANDS[name])
    assert [option.name for option in options if not option.description] == []


@pytest.mark.parametrize(("kind", "setting"), SETTINGS, ids=[f"{kind}.{setting.name}" for kind, setting in SETTINGS])
def test_every_setting_has_a_description_and_a_topic(kind: str, setting: Option) -> None:
    assert setting.topic
    assert setting.summary.endswith((".", ")"))
    assert len(setting.summary) <= 240, "a line, not a paragraph"


def test_every_metric_is_described() -> None:
    for registry in (EdgeMetrics().registry, DatacenterMetrics().registry):
        assert [family.name for family in registry.collect() if not family.documentation] == []
