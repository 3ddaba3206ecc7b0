"""Threads that work beside one another, each kept off the processors on which the others are at work.

The kernel is free to wake a thread on a processor that another computes on, though the next one has nothing to do, and
to let it wait there until a slice of some milliseconds is over. In virtual machines Linux does so often (see
`inference.intra_op_threads`). On two cores of an AMD EPYC under KVM, the three models of ImageNet's ensemble take 17.1
ms in the mean and 20.8 at the 90th percentile, shared out to two threads; apart 13.5 and 14.4. Where processors are
kept from halting, both take 12.6 in the mean (`python -m tests.bench.apart`). An edge node that answers 150 images a
second takes 10.7 and 9.3 ms instead of 11.3 and 9.9 in the mean of two runs, and at 60 or 210 as long as before.

    at work      A on core 0                   A on core 0, B on core 2
    idle         B, C: not on core 0           C: on none of both, while there is another

Whoever begins says where it is, and those that have nothing to do, or have been woken and do not run yet, are moved
elsewhere. The kernel may still move threads that are at work. All of this is for speed alone: where it cannot be done,
which is logged, work goes on without.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

from hawkvision.inference.backends.intra_op_threads import processor

log = logging.getLogger("hawkvision.inference")

MOST: Final = 16
"""Threads. Each that is idle costs a system call when another begins or ends; and of many, most only wait for something
else than a processor, as those do that feed an FPGA."""
_ANYWHERE: Final[frozenset[int]] = frozenset()
"""Of a thread that must be placed anew, wherever it may run."""

P = ParamSpec("P")
T = TypeVar("T")


class CorePlacement:
    """Threads that `join`, each of which enters this as a context while it is at work, and ends with `leave`.

    They may run where the thread may that makes this; more than `MOST` may run anywhere there. Entering and leaving the
    context costs some microseconds.
    """

    def __init__(self) -> None:
        self._cores: Final = frozenset(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._idle: dict[int, frozenset[int]] = {}
        """Where each of them may run, by its id."""
        self._at_work: dict[int, int] = {}
        """Where each of them began."""
        self._can = processor is not None and len(self._cores) > 1

    def join(self) -> None:
        """The calling thread is one of them, with nothing to do yet."""
        if self._can:
            with self._lock:
                self._idle[threading.get_native_id()] = _ANYWHERE
                if len(self._idle) + len(self._at_work) > MOST:
                    self._leave_alone()
                else:
                    self._place()

    def leave(self) -> None:
        """The calling thread is none of them any more; it must, before it ends, for its id may become another's."""
        with self._lock:
            self._idle.pop(threading.get_native_id(), None)

    def __enter__(self) -> None:
        if not self._can or processor is None:
            return
        me = threading.get_native_id()
        with self._lock:
            if self._idle.pop(me, None) is not None:
                self._at_work[me] = processor()
                self._place()

    def __exit__(self, *_: object) -> None:
        if not self._can:
            return
        me = threading.get_native_id()
        with self._lock:
            if self._at_work.pop(me, None) is not None:
                self._idle[me] = _ANYWHERE
                self._place()

    def _place(self) -> None:
        free = self._cores.difference(self._at_work.values()) or self._cores
        try:
            for thread, cores in self._idle.items():
                if cores != free:
                    os.sched_setaffinity(thread, free)
                    self._idle[thread] = free
        except OSError as error:
            log.warning("threads that work beside one another can no longer be kept apart: %s", error)
            self._leave_alone()

    def _leave_alone(self) -> None:
        self._can = False
        for thread in (*self._idle, *self._at_work):
            with suppress(OSError):
                os.sched_setaffinity(thread, self._cores)


class PlaceableThreads(ThreadPoolExecutor):
    """An executor whose threads are kept apart, from those of others with the same `CorePlacement` too. It is never
    shut down.

    Its threads end with the process.
    """

    def __init__(self, threads: int, name: str, apart: CorePlacement) -> None:
        super().__init__(threads, name, initializer=apart.join)
        self._apart = apart

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`."""
        return super().submit(self._run, fn, *args, **kwargs)

    def _run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._apart:
            return fn(*args, **kwargs)
