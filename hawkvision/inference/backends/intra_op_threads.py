"""Threads that help with one inference, kept off the processor of the thread that they help.

A thread that shares its work with a helper wakes it and goes on computing. Where the kernel then puts the helper on
the very same processor, it waits until the work has been done without it, and each wake-up was for nothing. Linux does
so in virtual machines, though another processor is idle: under KVM a halted one counts as preempted by the host, and
is not looked at (so we read `available_idle_cpu` and `vcpu_is_preempted`). On two such cores of an AMD EPYC,
`efficientnet_lite0_int8` takes 5.4 ms on one thread, 5.7 on two, and 4.1 once the helper steps aside; three models in
turn take 19.9, 21.6 and 15.9. Only then does it pay that helpers spin between layers, where each would otherwise have
to be woken anew some fifty times: 3.4 and 13.4 ms; on the same processor 7.3 and 22.1. Where processors are kept
from halting, spinning saves a sixth of one model's time and hardly any of three's, and stepping aside nothing
(`python -m tests.bench.helpers`).

A helper may run anywhere but where its caller is when the inference begins, which with two cores is one place. All of
this is for speed alone: where it cannot be done, which is logged, inference goes on without.
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
# Holds the interpreter's lock: shorter than giving it up.
processor: Final = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
"""The number of the one that the calling thread runs on; None where that cannot be told."""


def can_step_aside(threads: int) -> bool:
    """Whether those of `threads` that help another can be told apart and placed: on Linux, with a core for each.

    It is tried out on the calling thread, which keeps its name and its cores.
    """
    if threads < 2 or processor is None:
        return False
    try:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        _rename(_own_name())
        # Ids must be those of our own namespace, or strangers would be moved.
        return threads <= len(cores) and _OWN.readlink().name == str(threading.get_native_id())
    except OSError:
        return False


class HelperThreads:
    """Threads, by their ids, that compute parts of what other threads ask for."""

    def __init__(self, threads: Iterable[int] = ()) -> None:
        self.threads: tuple[int, ...] = ()
        self._cores: set[int] = set()
        self._avoided: int | None = None
        self._moving = threading.Lock()
        self.adopt(threads)

    def adopt(self, threads: Iterable[int]) -> None:
        """These are the helpers. Where the calling thread may run, they may."""
        self.threads = tuple(threads)
        self._cores = os.sched_getaffinity(0) if self.threads else set()
        self._avoided = None

    def step_aside(self) -> None:
        """Keep them off the processor on which the calling thread runs, which is about to need them.

        They may run on all others on which it may run. Costs a quarter of a microsecond where the caller has not moved
        since, else three more with one helper. Never raises: helpers that cannot be moved are left alone from then on.
        """
        if not self.threads or processor is None:
            return
        here = processor()
        if here != self._avoided:
            self._keep_off(here)

    def _keep_off(self, here: int) -> None:
        with self._moving:
            try:
                # Not where the caller may run: it may have been kept off a core only while another thread is there.
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
    """Around what starts `threads - 1` helpers; those that this thread started meanwhile are they, afterwards.

    Threads inherit the name of the one that starts them, which here is one that no other thread has (and which `top -H`
    shows). There are none without `can_step_aside`, or if not all can be found.
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
        with suppress(OSError):  # it has just ended
            if (thread / "comm").read_bytes().removesuffix(b"\n") == name:
                yield int(thread.name)
