"""Threads that help with one inference, kept off the processor of the thread that they help.

A thread that shares its work with a helper wakes it and goes on computing. Where the kernel then puts the helper on
the very same processor, it waits until the work has been done without it, and each wake-up was for nothing. Linux does
so in virtual machines, though another processor is idle: under KVM a halted one counts as preempted by the host, and
is not looked at (`available_idle_cpu` and `vcpu_is_preempted` in its scheduler). On two such cores of an AMD EPYC,
`efficientnet_lite0_int8` takes 5.4 ms on one thread, 5.7 on two, and 4.1 once the helper steps aside; three models in
turn take 19.9, 21.6 and 15.9. Only then does it pay that helpers spin between layers, where each would otherwise have
to be woken anew some fifty times: 3.4 and 13.4 ms; on the same processor 7.3 and 22.1. Where processors are kept
from halting, spinning saves a sixth and stepping aside nothing (`python -m tests.bench.helpers`).

Nothing is pinned: a helper may run anywhere but there.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

log = logging.getLogger("hawkvision.vision")

_OWN_NAME: Final = Path("/proc/thread-self/comm")
_THREADS: Final = Path("/proc/self/task")
_numbers: Final = itertools.count(1)
# Holds the interpreter's lock: shorter than giving it up.
_processor: Final = getattr(ctypes.PyDLL(None), "sched_getcpu", None)


def can_step_aside(threads: int) -> bool:
    """Whether those of `threads` that help another can be told apart and placed: on Linux, with a core for each."""
    return (
        threads > 1
        and _processor is not None
        and os.access(_OWN_NAME, os.W_OK)
        and threads <= len(os.sched_getaffinity(0))
    )


class Helpers:
    """Threads, by their ids, that compute parts of what other threads ask for."""

    def __init__(self, threads: Sequence[int] = ()) -> None:
        self.threads = tuple(threads)
        self._allowed = os.sched_getaffinity(0)
        self._avoided: int | None = None

    def step_aside(self) -> None:
        """Keep them off the processor on which the calling thread runs, which is about to need them.

        They may run on all others that the process had when they were started. Costs a quarter of a microsecond where
        the caller has not moved since, else a few more for each helper.
        """
        if not self.threads or _processor is None:
            return
        here = _processor()
        if here == self._avoided:
            return
        elsewhere = self._allowed - {here}
        try:
            for thread in self.threads:
                os.sched_setaffinity(thread, elsewhere)
        except OSError as error:
            log.warning("helper threads stay where the kernel puts them: %s", error)
            self.threads = ()
        self._avoided = here


@contextmanager
def helpers_started(threads: int) -> Iterator[Helpers]:
    """Around what starts `threads - 1` helpers; those that this thread started meanwhile are they, afterwards.

    Threads inherit the name of the one that starts them, which here is one that no other thread has (and which `top -H`
    shows). Without `can_step_aside` there are none.
    """
    helpers = Helpers()
    if not can_step_aside(threads):
        yield helpers
        return
    own, mark = _OWN_NAME.read_text(), f"hv-infer-{next(_numbers)}"
    _OWN_NAME.write_text(mark)
    try:
        yield helpers
    finally:
        _OWN_NAME.write_text(own.rstrip("\n"))
    helpers.threads = tuple(_named(mark))


def _named(name: str) -> Iterator[int]:
    for thread in _THREADS.iterdir():
        try:
            found = (thread / "comm").read_text()
        except OSError:  # it has just ended
            continue
        if found.rstrip("\n") == name:
            yield int(thread.name)
