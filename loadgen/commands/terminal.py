"""Output of commands: a terminal whose reader may leave early (`loadgen compare … | head -1`), and progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.clients.engine import Tally


class Terminal(Console):
    """A console that goes on silently when its reader has left: the command still writes its files and its status."""

    def on_broken_pipe(self) -> None:
        """Write nothing more."""
        self.quiet = True
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, sys.stdout.fileno())
        os.close(nobody)


def terminal(width: int, *, highlight: bool = True) -> Console:
    """Standard output, as wide as the terminal, or `width` characters where it is not one."""
    return Terminal(width=None if sys.stdout.isatty() else width, highlight=highlight)


@contextmanager
def progress_bar(title: str, total: int | None) -> Iterator[Callable[[Tally], None]]:
    """A progress bar on standard error if that is a terminal; `total` is None where it is unknown."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[said]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, said="")

        def show(tally: Tally) -> None:
            said = f"{tally.sent - tally.done} in flight" + (f", {tally.failed} failed" if tally.failed else "")
            bar.update(task, completed=tally.done, said=said)

        yield show
