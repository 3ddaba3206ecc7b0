"""Every option, setting and metric is described where it is declared, and the reference pages say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawkvision.cli.reference import PAGES, commands
from hawkvision.core.command_line import Program, options_of, summary_of
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.load import settings_of
from hawkvision.datacenter.servers.metrics import DatacenterMetrics

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_what_the_code_says(name: str) -> None:
    written = (REFERENCE / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "stale: run `python -m hawkvision.cli.reference docs/reference`"


def test_every_command_and_each_of_its_options_is_described() -> None:
    for name, command in commands():
        assert summary_of(command), name
        options = () if isinstance(command, Program) else options_of(command)
        assert [option.name for option in options if not option.description] == [], name


def test_every_setting_has_a_topic_and_every_metric_a_description() -> None:
    for kind in (EdgeConfig, DatacenterConfig):
        assert [setting.name for setting in settings_of(kind) if not (setting.topic and setting.description)] == []
    for registry in (EdgeMetrics().registry, DatacenterMetrics().registry):
        assert [family.name for family in registry.collect() if not family.documentation] == []
