"""The command line of a comparison that runs from a checkout."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from hawkvision.system.terminal import write_anything
from loadgen.commands import command_line


def main(name: str, module: Any) -> int:
    """Run `module`, which has `SUMMARY`, `add_arguments` and `run` as the commands of `loadgen` do; the exit status."""
    write_anything()
    command_line.words.set(sys.argv[1:])
    command_line.program.set(name)
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=module.SUMMARY)
    module.add_arguments(parser)
    given = parser.parse_args()

    def act() -> int | None:
        status: int | None = asyncio.run(module.run(given))
        return status

    return command_line.explained(act)
