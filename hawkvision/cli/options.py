"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
