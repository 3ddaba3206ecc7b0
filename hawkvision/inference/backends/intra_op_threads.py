"""Keeps the helper threads of an inference off the core of the thread that they help.

A thread that shares its work with a helper wakes it and goes on computing. In virtual machines Linux often puts the
helper on the same core although another is idle: under KVM a halted core counts as preempted by the host. The helper
then waits until the work is done without it.

A helper may run on any core except that of its caller at the start of the inference. If threads cannot be placed, which
is logged, inference goes on without. Figures: `docs/design/inference-threads.md`.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

log = logging.getLogger("hawkvision.inference")

_OWN: Final = Path("/proc/thread-self")
_THREADS: Final = Path("/proc/self/task")
_numbers: Final = itertools.count(1)
# Keeps the interpreter's lock, because releasing it takes longer.
processor: Final = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
"""The processor on which the calling thread runs; None if that is unknown."""


def can_step_aside(threads: int) -> bool:
    """Whether the helper threads of an inference can be identified and placed: on Linux, with a core for each thread.

    This is tried on the calling thread, which keeps its name and its cores.
    """
    if threads < 2 or processor is None:
        return False
    try:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        _rename(_own_name())
        # Ids must belong to our own namespace; otherwise foreign threads would be moved.
        return threads <= len(cores) and _OWN.readlink().name == str(threading.get_native_id())
    except OSError:
        return False


class HelperThreads:
    """The ids of threads that compute parts of other threads' inferences."""

    def __init__(self, threads: Iterable[int] = ()) -> None:
        self.threads: tuple[int, ...] = ()
        self._cores: set[int] = set()
        self._avoided: int | None = None
        self._moving = threading.Lock()
        self.adopt(threads)

    def adopt(self, threads: Iterable[int]) -> None:
        """Take these as the helpers. They may run where the calling thread may."""
        self.threads = tuple(threads)
        self._cores = os.sched_getaffinity(0) if self.threads else set()
        self._avoided = None

    def step_aside(self) -> None:
        """Keep the helpers off the processor of the calling thread, before they start to work.

        They may run on all other processors of the calling thread. Takes a quarter of a microsecond if the caller has
        not moved since, else three more with one helper. Never raises: helpers that cannot be moved are no longer
        placed.
        """
        if not self.threads or processor is None:
            return
        here = processor()
        if here != self._avoided:
            self._keep_off(here)

    def _keep_off(self, here: int) -> None:
        with self._moving:
            try:
                # Not the caller's processors: the caller may be kept off a core only while another thread is there.
                elsewhere = self._cores - {here} or self._cores
                for helper in self.threads:
                    os.sched_setaffinity(helper, elsewhere)
                self._avoided = here
            except OSError as error:
                log.warning("threads that help with inference can no longer be kept off their caller's core: %s", error)
                for helper in self.threads:
                    with suppress(OSError):
                        os.sched_setaffinity(helper, self._cores)
                self.threads = ()


@contextmanager
def helpers_started(threads: int) -> Iterator[HelperThreads]:
    """Surrounds a call that starts `threads - 1` helpers; the threads that started meanwhile are the helpers.

    Threads inherit the name of the thread that starts them. Here that name is unique (`top -H` shows it). There are no
    helpers without `can_step_aside`, or if not all can be found.
    """
    helpers = HelperThreads()
    if not can_step_aside(threads):
        yield helpers
        return
    own, mark = _own_name(), f"hv-infer-{next(_numbers)}".encode()
    _rename(mark)
    try:
        yield helpers
    finally:
        _rename(own)
    found = list(_named(mark))
    if len(found) == threads - 1:
        helpers.adopt(found)
    else:
        log.warning("%d threads that help with inference were found, not %d: none is placed", len(found), threads - 1)


def _own_name() -> bytes:
    return (_OWN / "comm").read_bytes().removesuffix(b"\n")


def _rename(name: bytes) -> None:
    (_OWN / "comm").write_bytes(name)


def _named(name: bytes) -> Iterator[int]:
    for thread in _THREADS.iterdir():
        with suppress(OSError):  # the thread has just ended
            if (thread / "comm").read_bytes().removesuffix(b"\n") == name:
                yield int(thread.name)
