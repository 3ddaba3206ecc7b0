"""`python -m loadgen COMMAND`: test a deployment from outside, before trusting it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from hawkvision.terminal import write_anything
from loadgen.commands import command_line
from loadgen.host import idle_prevention

COMMANDS: Final = {
    "run": "loadgen.commands.run",
    "find-capacity": "loadgen.commands.find_capacity",
    "mlperf": "loadgen.commands.mlperf",
    "noise": "loadgen.commands.noise",
    "evaluate": "loadgen.commands.evaluate",
    "compare": "loadgen.commands.compare",
    "behind": "loadgen.commands.link_proxy",
}
"""Each a module with `SUMMARY`, `add_arguments(parser)` and `async run(given)`, which gives an exit status or None."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m loadgen") -> int:
    """Run one command; the exit status is the command's, 1 for an error that was explained, 2 for a wrong command line.

    Only the command that is asked for is loaded: some need extras that others do without.
    """
    write_anything()
    words = list(sys.argv[1:] if argv is None else argv)
    command_line.words.set(words)
    parser = argparse.ArgumentParser(prog=prog, description="Test a deployment from outside.")
    commands = parser.add_subparsers(dest="command", required=True)
    asked = words[0] if words else ""

    def act() -> int | None:
        for name, module in COMMANDS.items():
            if asked not in COMMANDS or asked == name:
                loaded = importlib.import_module(module)
                command = commands.add_parser(name, help=loaded.SUMMARY, description=loaded.SUMMARY)
                loaded.add_arguments(command)
                if name != "compare":
                    command.add_argument(
                        "--keep-awake",
                        action="store_true",
                        help="keep the processors from halting meanwhile; of use on virtual machines, whose hosts are "
                        "slow to give them back",
                    )
        given = parser.parse_args(words)
        with idle_prevention.kept() if getattr(given, "keep_awake", False) else contextlib.nullcontext():
            status: int | None = asyncio.run(importlib.import_module(COMMANDS[given.command]).run(given))
        return status

    return command_line.explained(act)


if __name__ == "__main__":
    sys.exit(main())
