"""Settings from the command line of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hawkvision.core.settings.load import ConfigT, load_config, read_words
from hawkvision.core.settings.words import ParsedArguments, read_plain

EDGE_UP: Final = ("hawkvision edge up", "Start an edge node.")
DC_UP: Final = ("hawkvision dc up", "Start a datacenter tier on this machine, Ray included.")
DC_DEPLOY: Final = ("hawkvision dc deploy", "Deploy the datacenter tier to a running Ray cluster.")
"""Name and description of each command."""


def parse_arguments(kind: type[ConfigT], prog: str, description: str, argv: Sequence[str]) -> ConfigT:
    """Settings from a command line: one option per setting, and `--config FILE`.

    Raises:
        ConfigError: as `load_config`.
        SystemExit: as `ServerCommand.parse`.
    """
    parsed = read_plain(kind, argv)
    if parsed is None:
        from hawkvision.core.settings.server_command import ServerCommand  # Typer, which takes longer than the rest

        parsed = ServerCommand(kind, prog, description).parse(argv)
    return configured(kind, parsed)


def configured(kind: type[ConfigT], parsed: ParsedArguments) -> ConfigT:
    """Settings from the words of a command line, the environment and a file.

    Raises:
        ConfigError: as `load_config`.
    """
    return load_config(kind, parsed.config, read_words(kind, parsed.settings))
