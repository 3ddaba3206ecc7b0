"""The command line of a test, as its record states it: whoever has the record can repeat the test."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final

words: Final[ContextVar[Sequence[str]]] = ContextVar("words", default=())
"""What was asked for, from the command on: `main` sets it, whichever program's `main` was given it."""


def stated() -> str:
    """The command that runs the same test, without the key: records are shown to others."""
    given = words.get()
    shown = list(given)
    for place, word in enumerate(given):
        if word == "--api-key" and place + 1 < len(given):
            shown[place + 1] = "KEY"
        elif word.startswith("--api-key="):
            shown[place] = "--api-key=KEY"
    return shlex.join(["python", "-m", "loadgen", *shown])
