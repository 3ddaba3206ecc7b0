"""The command line of a test, as its record states it: whoever has the record can repeat the test."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Final

from hawkvision.errors import HawkVisionError

words: Final[ContextVar[Sequence[str]]] = ContextVar("words", default=())
"""What was asked for, from the command on: `main` sets it, whichever program's `main` was given it."""
program: Final[ContextVar[str]] = ContextVar("program", default="loadgen")
"""The module that was run."""
EXTRA_OF: Final = {"PIL": "peers", "mlperf_loadgen": "loadgen", "scipy": "loadgen"}
"""Which extra installs what is needed beyond what a node needs."""


def stated() -> str:
    """The command that runs the same test, without the key: records are shown to others."""
    given = words.get()
    shown = list(given)
    for place, word in enumerate(given):
        if word == "--api-key" and place + 1 < len(given):
            shown[place + 1] = "KEY"
        elif word.startswith("--api-key="):
            shown[place] = "--api-key=KEY"
    return shlex.join(["python", "-m", program.get(), *shown])


def explained(action: Callable[[], int | None]) -> int:
    """The exit status of an action: its own, 1 for an error that is explained to the user, 130 after Ctrl-C."""
    try:
        return action() or 0
    except HawkVisionError as error:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{where}", file=sys.stderr)  # noqa: T201
        return 1
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"error: this needs {error.name}: pip install 'hawkvision[{extra}]'", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
