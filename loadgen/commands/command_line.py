"""The command line of `python -m loadgen`: options are the fields of a dataclass, and a command is a function of one.

The command that a test records is one that repeats the test.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, get_type_hints

import typer
import typer.main
from typer.core import TyperCommand

from hawkvision.core.errors import HawkVisionError

words: Final[ContextVar[Sequence[str]]] = ContextVar("words", default=())
"""The words of the command line, from the command on: `main` sets it, whichever program's `main` it was given."""
program: Final[ContextVar[str]] = ContextVar("program", default="loadgen")
"""The module that was run."""
EXTRA_OF: Final = {"PIL": "bench", "mlperf_loadgen": "loadgen", "scipy": "loadgen"}
"""The extra that installs what a node does not need."""


def option(panel: str, description: str, *names: str, metavar: str | None = None) -> Any:
    """How a field is an option: described in one line, and listed among those of one topic (`panel`)."""
    return typer.Option(*names, help=description, metavar=metavar, rich_help_panel=panel)


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
        print(f"error: this needs {error.name}: pip install 'hawkvision[{extra}]'", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130


def command_of(
    name: str, summary: str, options: type[Any], run: Callable[[Any], Awaitable[int | None]]
) -> TyperCommand:
    """A command whose options are the fields of a dataclass, and which runs `run` with an instance of it."""
    hints = get_type_hints(options, include_extras=True)

    def act(**values: Any) -> None:
        given = options(**values)

        def measure() -> int | None:
            return asyncio.run(_awaited(run, given))

        raise typer.Exit(explained(measure))

    parameters = [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=_default(each), annotation=hints[each.name]
        )
        for each in dataclasses.fields(options)
    ]
    act.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    act.__annotations__ = {each.name: each.annotation for each in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help=summary)(act)
    made = typer.main.get_command(app)
    assert isinstance(made, TyperCommand)
    return made


async def _awaited(run: Callable[[Any], Awaitable[int | None]], given: Any) -> int | None:
    return await run(given)


def _default(option: dataclasses.Field[Any]) -> Any:
    if option.default is not dataclasses.MISSING:
        return option.default
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return inspect.Parameter.empty
