"""Command lines in messages, with the folders and files that the user gave, so that they work as pasted.

The reader of a command line or of settings calls `remember`; the writer of a message calls `advise`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

OPTIONS_OF: Final = {
    "calibrate": ("models_dir", "cache_dir"),
    "certify": ("profile", "models_dir", "cache_dir"),
    "edge up": ("models_dir", "cache_dir"),
    "models add": ("models_dir", "cache_dir"),
    "models build": ("models_dir", "cache_dir"),
    "models check": ("models_dir", "cache_dir"),
    "up": ("models_dir", "cache_dir"),
}
"""The options that each command takes."""

_given: dict[str, Path] = {}
"""The options given to this process."""


def remember(**given: Path | None) -> None:
    """Remember options that the user gave, by name; None forgets one."""
    for name, path in given.items():
        if path is None:
            _given.pop(name, None)
        else:
            _given[name] = path


def forget() -> None:
    """Forget all options."""
    _given.clear()


def advise(command: str, *words: str, **known: Path | None) -> str:
    """The command line `hawkvision COMMAND WORDS…` with the remembered options, quoted for a shell.

    Args:
        command: a key of `OPTIONS_OF`.
        words: its arguments; placeholders for the user are in capitals.
        known: options that replace the remembered ones; None omits one.
    """
    chosen = {name: known[name] if name in known else _given.get(name) for name in OPTIONS_OF[command]}
    options = [
        word for name, path in chosen.items() if path is not None for word in (f"--{name.replace('_', '-')}", str(path))
    ]
    return shlex.join(("hawkvision", *command.split(), *words, *options))
