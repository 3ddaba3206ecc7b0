"""`python -m loadgen COMMAND`: test a deployment from outside, before trusting it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from hawkvision.core.command_line import Group, run
from hawkvision.system.terminal import quiet_without_reader, write_anything
from loadgen.commands import command_line
from loadgen.commands.command_line import command

COMMANDS: Final = Group(
    "Test a deployment from outside, before trusting it.",
    {
        "": {
            "run": command("run", "Send a schedule of requests to a server, and report what its users would see."),
            "find-capacity": command(
                "find_capacity", "Find the highest rate at which a server keeps a P99 and an accuracy."
            ),
            "compare": command(
                "compare", "Compare recorded runs with the first: ratios with intervals, and what they show."
            ),
            "noise": command(
                "noise", "Measure what the load generator itself adds and can send, against a null server."
            ),
            "link-proxy": command(
                "link_proxy", "Offer a server at another loopback address, behind a bad link (needs root)."
            ),
        }
    },
)


def main(argv: Sequence[str] | None = None, prog: str = "python -m loadgen") -> int:
    """Run one command.

    Returns:
        The exit status: the command's own, 1 for an error that was explained, 2 for a wrong command line.
    """
    write_anything()
    given = list(sys.argv[1:] if argv is None else argv)
    command_line.words.set(given)
    try:
        return run(COMMANDS, given, prog)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))


if __name__ == "__main__":
    with quiet_without_reader():
        sys.exit(main())
