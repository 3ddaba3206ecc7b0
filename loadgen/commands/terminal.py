"""Output of commands: a terminal whose reader may leave early (`loadgen compare … | head -1`), and progress bars."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from loadgen.clients.engine import MOST_LATENCIES, Tally

RATE_REPORTS: Final = 25
"""Reports of progress over which the rate is taken: five seconds."""


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
def progress_bar(title: str, total: int | None, duration_s: float | None = None) -> Iterator[Callable[[Tally], None]]:
    """A live line on standard error if that is a terminal: how many, the rate, the P99 of late, and the time left.

    Args:
        title: what is counted.
        total: of all; None where it is unknown.
        duration_s: how long it takes; None: as long as the rest does at the present rate.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    latencies_ms: deque[float] = deque(maxlen=MOST_LATENCIES)
    seen: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=RATE_REPORTS)
    began = seen[0][0]
    columns = (TextColumn("{task.description}"), BarColumn(10), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, said="")

        def show(tally: Tally) -> None:
            latencies_ms.extend(tally.latencies_ms)
            seen.append((time.monotonic(), tally.done))
            (since, before), (now, done) = seen[0], seen[-1]
            rate = (done - before) / max(now - since, 1e-3)
            left_s = duration_s - (now - began) if duration_s is not None else ((total or 0) - done) / max(rate, 1e-3)
            said = [f"{done}" + (f"/{total}" if total else ""), f"{rate:.3g}/s"]
            said += [f"P99 {np.percentile(latencies_ms, 99):.3g} ms"] if latencies_ms else []
            said += [f"{max(0.0, left_s):.0f} s left", f"{tally.sent - done} in flight"]
            said += [f"{tally.failed} failed"] if tally.failed else []
            bar.update(task, completed=done, said=", ".join(said))

        yield show
