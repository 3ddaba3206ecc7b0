"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hawkvision.core.advice import remember

# Servers take one option per setting; their own parsers know them all, so they get the words unparsed.
PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Task = Annotated[str, typer.Option(help="The task whose cascade is meant.")]


def remembered(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Take note of a folder or file, for the commands that messages advise."""
    remember(**{str(parameter.name): value})
    return value


ModelsDir = Annotated[
    Path | None, typer.Option(help="Where manifests lie; default: the ones shipped.", callback=remembered)
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Where built models lie; default: ~/.cache/hawkvision.", callback=remembered)
]
Profile = Annotated[Path | None, typer.Option(help="A profile of your own; default: the task's.", callback=remembered)]

RENAMED_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "calibrate": {"--middle": "--intermediate"},
    "classify": {"--lossy": "--datagram"},
    "demo": {"--pictures": "--images"},
}
"""Options that commands had before 0.2, and what they are called now."""


def renamed_option(words: Sequence[str]) -> str | None:
    """What to say of an option with its old name among the words of a command line; None if there is none."""
    for command, options in RENAMED_OPTIONS.items():
        if command not in words:
            continue
        for word in words[words.index(command) :]:
            old = word.partition("=")[0]
            if old in options:
                return f"{old}: this option of `{command}` is called {options[old]} since 0.2"
    return None
