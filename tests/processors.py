"""Where the calling thread, and what it starts, may run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def confined_to(*processors: int) -> Iterator[None]:
    """This thread runs on these alone, and so do threads and processes that it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def confined_to_one() -> Iterator[None]:
    """The same, on the first that it may use."""
    with confined_to(min(os.sched_getaffinity(0))):
        yield
