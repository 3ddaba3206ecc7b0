"""Side by side with other servers: the same model, pictures, work and core, one server at a time.

Nothing is imported before it is needed: what runs inside a peer's own environment imports `loadgen.peers.work` through
this file, and has none of HawkVision's dependencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import argparse

SUMMARY: Final = "Compare a HawkVision node with other model servers: same model, same pictures, same core."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m loadgen peers`."""
    from loadgen.peers import command

    command.add_arguments(parser)


async def run(given: argparse.Namespace) -> int:
    """Compare as the options say, and print the tables; 1 if a server had to be left out, else 0.

    Raises:
        HawkVisionError: if a server cannot be installed, or the options make no comparison.
    """
    from loadgen.peers import command

    return await command.run(given)
