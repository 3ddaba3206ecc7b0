"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hawkvision.core.advice import remember

# Servers have one option per setting; their own parsers read the words.
PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Task = Annotated[str, typer.Option(help="The task.")]


def remembered(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Remember a folder or file for command lines in messages."""
    remember(**{str(parameter.name): value})
    return value


ModelsDir = Annotated[
    Path | None, typer.Option(help="Folder of manifests; default: the installed ones.", callback=remembered)
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Folder of built models; default: ~/.cache/hawkvision.", callback=remembered)
]
Profile = Annotated[Path | None, typer.Option(help="The profile; default: the task's own.", callback=remembered)]
