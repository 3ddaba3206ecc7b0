"""Output for a terminal whose reader may leave early, as in `loadgen compare … | head -1`."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class Terminal(Console):
    """A console whose reader may leave: what it says from then on is said to nobody, and the command goes on.

    Its files and its exit status are others' to read.
    """

    def on_broken_pipe(self) -> None:
        """Say nothing any more."""
        self.quiet = True
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, sys.stdout.fileno())
        os.close(nobody)


def terminal(width: int, *, highlight: bool = True) -> Console:
    """Standard output, as wide as the terminal is, or `width` where it is none."""
    return Terminal(width=None if sys.stdout.isatty() else width, highlight=highlight)
