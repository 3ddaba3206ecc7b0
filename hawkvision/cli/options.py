"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

# Servers take one option per setting; their own parsers know them all, so they get the words unparsed.
PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Task = Annotated[str, typer.Option(help="The task whose ladder is meant.")]
ModelsDir = Annotated[Path | None, typer.Option(help="Where manifests lie; default: the ones shipped.")]
CacheDir = Annotated[Path | None, typer.Option(help="Where built models lie; default: ~/.cache/hawkvision.")]
