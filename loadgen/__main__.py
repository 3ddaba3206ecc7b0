"""`python -m loadgen COMMAND`: test a deployment from outside, before trusting it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from hawkvision.system.terminal import quiet_without_reader, write_anything
from loadgen.commands import command_line


class LoadedCommand(NamedTuple):
    """What a command's module offers."""

    options: type[Any]
    """A dataclass; each field is an option."""
    run: Callable[[Any], Coroutine[Any, Any, int | None]]
    """Takes the options; gives an exit status or None."""


class Command(NamedTuple):
    """Where a command is, and what it is for."""

    module: str
    options: str
    """The name of its dataclass of options."""
    summary: str

    def load(self) -> LoadedCommand:
        """Import the command's module: some need extras that others do without."""
        module = importlib.import_module(f"loadgen.commands.{self.module}")
        return LoadedCommand(getattr(module, self.options), module.run)


COMMANDS: Final = {
    "run": Command(
        "run", "RunOptions", "Send a schedule of requests to a server, and report what its users would see."
    ),
    "find-capacity": Command(
        "find_capacity", "CapacityOptions", "Find the highest rate at which a server keeps a P99 and an accuracy."
    ),
    "compare": Command(
        "compare", "CompareOptions", "Compare recorded runs with the first: ratios with intervals, and what they show."
    ),
    "evaluate": Command(
        "evaluate", "EvaluateOptions", "Measure accuracy, escalations and latency per target on labelled images."
    ),
    "mlperf": Command(
        "mlperf.command",
        "MlperfOptions",
        "Run MLPerf LoadGen against a server: SingleStream, MultiStream, Server or Offline.",
    ),
    "noise": Command(
        "noise", "NoiseOptions", "Measure what the load generator itself adds and can send, against a null server."
    ),
    "link-proxy": Command(
        "link_proxy", "LinkProxyOptions", "Offer a server at another loopback address, behind a bad link (needs root)."
    ),
}


class _Commands(TyperGroup):
    """Loads only the command that was asked for."""

    def list_commands(self, _: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _: Any, cmd_name: str) -> TyperCommand | None:
        """For the list of commands: its name and what it is for."""
        found = COMMANDS.get(cmd_name)
        return None if found is None else TyperCommand(cmd_name, help=found.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            loaded = COMMANDS[name].load()
            command = command_line.command_of(name, COMMANDS[name].summary, loaded.options, loaded.run)
        return name, command, rest


def main(argv: Sequence[str] | None = None, prog: str = "python -m loadgen") -> int:
    """Run one command.

    Returns:
        The exit status: the command's own, 1 for an error that was explained, 2 for a wrong command line.
    """
    write_anything()
    given = list(sys.argv[1:] if argv is None else argv)
    command_line.words.set(given)
    app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
    app.callback(help="Test a deployment from outside, before trusting it.")(lambda: None)
    group = typer.main.get_group(app)

    def act() -> int | None:
        try:
            group.main(args=given, prog_name=prog)
        except SystemExit as exit_:
            return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
        return 0

    return command_line.explained(act)


if __name__ == "__main__":
    with quiet_without_reader():
        sys.exit(main())
