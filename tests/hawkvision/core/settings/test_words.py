"""Plain command lines of servers: read as Typer reads them, without importing it."""

import contextlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.arguments import DC_UP, EDGE_UP
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.descriptions import settings_of
from hawkvision.core.settings.load import structs_of
from hawkvision.core.settings.server_command import ServerCommand
from hawkvision.core.settings.words import ParsedArguments, read_plain

COMMANDS: dict[Any, ServerCommand] = {
    EdgeConfig: ServerCommand(EdgeConfig, *EDGE_UP),
    DatacenterConfig: ServerCommand(DatacenterConfig, *DC_UP),
}
OPTIONS = sorted({setting.option for kind in COMMANDS for setting in settings_of(*structs_of(kind))})
VALUES = ("", "0", "true", "a,b", "a=b", "-1", "--", "-h", "--help", "-")
OPTION = st.sampled_from([*OPTIONS, "--config", "--port", "--allow-plain-http"])
VALUE = st.one_of(st.sampled_from(VALUES), st.text(max_size=4))
WORD = st.one_of(OPTION, VALUE, st.builds("{}={}".format, OPTION, VALUE))


def by_typer(kind: Any, words: list[str]) -> ParsedArguments | None:
    with contextlib.suppress(SystemExit, ConfigError):
        config, settings, more = COMMANDS[kind].parse(words)
        return ParsedArguments(config, {name: value for name, value in settings.items() if value is not None}, more)
    return None


@pytest.mark.parametrize("kind", COMMANDS)
@example(words=["--port", "0", "--allow-plain-http", "--host=", "--config", "x"])
@example(words=["--allow-plain-http", "false", "--port=1", "--port", "2"])
@given(words=st.lists(WORD, max_size=6))
def test_what_is_read_without_typer_is_what_typer_reads(kind: Any, words: list[str]) -> None:
    plain = read_plain(kind, words)
    assert plain is None or plain == by_typer(kind, words)


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_option_is_plain(kind: Any) -> None:
    settings = settings_of(*structs_of(kind))
    words = [word for setting in settings for word in (setting.option, "true" if setting.kind == "BOOL" else "1")]
    switches = [setting.option for setting in settings if setting.kind == "BOOL"]
    for each in (words, switches):
        plain = read_plain(kind, each)
        assert plain is not None
        assert plain == by_typer(kind, each)
