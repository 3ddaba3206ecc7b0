"""The command line of `python -m loadgen`: a command is a function of a struct of options (`core.command_line`).

The command that a test records is one that repeats the test.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import shlex
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, Final

import msgspec

from hawkvision.core.command_line import Program, call
from hawkvision.core.errors import HawkVisionError

words: Final[ContextVar[Sequence[str]]] = ContextVar("words", default=())
"""The words of the command line, from the command on: `main` sets it, whichever program's `main` it was given."""
program: Final[ContextVar[str]] = ContextVar("program", default="loadgen")
"""The module that was run."""
EXTRA_OF: Final = {"PIL": "bench", "scipy": "loadgen"}
"""The extra that installs what a node does not need."""


def option(topic: str, description: str) -> msgspec.Meta:
    """How a field of a command's options is shown: the topic it is listed under, and what it does."""
    return msgspec.Meta(title=topic, description=description)


def command(module: str, summary: str) -> Program:
    """The command whose `run` is in a module of `loadgen.commands`, which is imported when it is called for."""

    def main(given: Sequence[str], prog: str) -> int:
        def act() -> int:
            run: Callable[[Any], Coroutine[Any, Any, int | None]]
            run = importlib.import_module(f"loadgen.commands.{module}").run

            @functools.wraps(run)
            def measure(options: Any) -> int:
                return asyncio.run(run(options)) or 0

            measure.__doc__ = summary
            return call(measure, given, prog)

        return explained(act)

    return Program(summary, main)


def stated() -> str:
    """The command that runs the same test, without the API key: records are shown to others."""
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
        print(f"error: this needs {error.name}: in a checkout, pip install '.[{extra}]'", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
