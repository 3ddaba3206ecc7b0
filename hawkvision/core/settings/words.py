"""Reads the options of a server's command line where they are plain, so that the server need not import Typer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hawkvision.core.settings.descriptions import FEATURES
from hawkvision.core.settings.load import ConfigT, structs_of


class ParsedArguments(NamedTuple):
    """The words of a command line."""

    config: Path | None
    settings: dict[str, str | None]
    more: dict[str, str | None]


def read_plain(kind: type[ConfigT], words: Sequence[str]) -> ParsedArguments | None:
    """The options in these words, as `ServerCommand.parse` reads them.

    Returns: None unless each word is a known option or the value of one. `ServerCommand` answers the rest: requests for
        help, mistakes, and values that begin with a dash.
    """
    options = {"--config": ("config", False)}
    for struct in structs_of(kind):
        for field in msgspec.structs.fields(struct):
            if field.name != FEATURES:
                options[f"--{field.encode_name.replace('_', '-')}"] = field.encode_name, field.type is bool
    given: dict[str, str | None] = {}
    rest = list(reversed(words))
    while rest:
        option, assigned, value = rest.pop().partition("=")
        if option not in options:
            return None
        name, switch = options[option]
        if not assigned:
            if rest and not rest[-1].startswith("-"):
                value = rest.pop()
            elif switch:
                value = "true"
            else:
                return None
        given[name] = value
    config = given.pop("config", None)
    return ParsedArguments(None if config is None else Path(config), given, {})
