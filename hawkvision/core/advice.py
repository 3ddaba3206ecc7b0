"""Commands that messages advise, so that they work as pasted: with the folders and files that the user gave.

Who reads a command line or settings says what was given (`remember`); who writes a message needs no way to know it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

OPTIONS_OF: Final = {
    "calibrate": ("models_dir", "cache_dir"),
    "certify": ("profile", "models_dir", "cache_dir"),
    "models build": ("models_dir", "cache_dir"),
    "models equivalence": ("profile", "models_dir", "cache_dir"),
}
"""Which of what was given each command takes."""

_given: dict[str, Path] = {}
"""Of this process: a command has one user."""


def remember(**given: Path | None) -> None:
    """Take note of options that the user gave, by their names; None forgets one."""
    for name, path in given.items():
        if path is None:
            _given.pop(name, None)
        else:
            _given[name] = path


def forget() -> None:
    """Forget all that was given."""
    _given.clear()


def advise(command: str, *words: str, **known: Path | None) -> str:
    """The command line `hawkvision COMMAND WORDS…` with what was given, quoted for a shell.

    Args:
        command: a key of `OPTIONS_OF`.
        words: its arguments; what only the user can say is in capitals.
        known: options that the caller knows better than what was remembered; None leaves one out.
    """
    chosen = {name: known[name] if name in known else _given.get(name) for name in OPTIONS_OF[command]}
    options = [
        word for name, path in chosen.items() if path is not None for word in (f"--{name.replace('_', '-')}", str(path))
    ]
    return shlex.join(("hawkvision", *command.split(), *words, *options))
