"""Keeps threads that work in parallel on different cores.

The kernel may wake a thread on a core that another one uses although the next core is idle. In virtual machines Linux
does so often (see `inference.backends.intra_op_threads`).

    at work      A on core 0                   A on core 0, B on core 2
    idle         B, C: not on core 0           C: on neither, while there is another

A thread that begins work announces its core. Threads that are idle, or woken and not running yet, are moved elsewhere.
The kernel may still move threads at work. If threads cannot be placed, which is logged, work goes on without. Figures:
`docs/design/inference-threads.md`.
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
"""Most threads that are placed. Each idle one costs a system call when another begins or ends. Of many threads, most
wait for something other than a processor, as those that feed an FPGA."""
_ANYWHERE: Final[frozenset[int]] = frozenset()
"""A thread that must be placed again, wherever it may run."""

P = ParamSpec("P")
T = TypeVar("T")


class CorePlacement:
    """Threads that call `join`, enter this context while they work, and live as long as the process.

    They may run on the cores of the thread that created this object. Beyond `MOST`, threads are not placed. Entering
    and leaving the context takes some microseconds.
    """

    def __init__(self) -> None:
        self._cores: Final = frozenset(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._idle: dict[int, frozenset[int]] = {}
        """The cores on which each idle thread may run, by its id."""
        self._at_work: dict[int, int] = {}
        """The core on which each working thread began."""
        self._can = processor is not None and len(self._cores) > 1

    def join(self) -> None:
        """Register the calling thread as idle."""
        if self._can:
            with self._lock:
                self._idle[threading.get_native_id()] = _ANYWHERE
                if len(self._idle) + len(self._at_work) > MOST:
                    self._leave_alone()
                else:
                    self._place()

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
    """An executor that keeps its threads on different cores, together with others that share its `CorePlacement`.

    It is never shut down; its threads end with the process.
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
