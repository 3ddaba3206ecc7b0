"""The worker pool: threads that decode images and run models, fed from one bounded queue (`edge.inference.job_queue`).

Threads suffice, because decoding and inference release the interpreter lock. While images compete, each model call uses
one intra-op thread: N cores run N images, and no image waits at another's barrier. An image that is alone may use
several threads (`inference.adaptive_parallelism`).
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from edge.inference.job_queue import MAX_BATCH, NO_COST, Job, JobQueue, Place, RunBatch
from hawkvision.core.errors import NotReady
from hawkvision.imaging.decoding_cost import DecodingCost
from hawkvision.system.admission import TooLateToBegin
from hawkvision.system.memory import MemoryBudget

T = TypeVar("T")

RECENT: Final = 32
"""Number of jobs whose times are remembered."""


class WorkerPool(Generic[T]):
    """`threads` workers behind a queue of at most `limit` waiting jobs. Made and used on one event loop."""

    def __init__(
        self, threads: int, limit: int, max_batch: int = MAX_BATCH, memory: MemoryBudget | None = None
    ) -> None:
        """Start the workers.

        Args:
            threads: number of workers.
            limit: jobs that may wait.
            max_batch: jobs that a worker runs together; 1 where a batch saves no time.
            memory: from which jobs' bytes are taken while they run; None has no bound.

        Raises:
            ValueError: for less than one thread or place.
        """
        if threads < 1 or limit < 1:
            raise ValueError(f"expected at least one thread and one place, got {threads} and {limit}")
        self.threads = threads
        self.limit = limit
        """Jobs that may wait."""
        self.beside: tuple[WorkerPool[Any], ...] = ()
        """The pools of other tasks, which use the same cores."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._memory = MemoryBudget() if memory is None else memory
        self._queue: JobQueue[T] = JobQueue(threads, limit, max_batch)
        # True when there may be a job, or False to stop. A SimpleQueue hands over in half the time of a Condition.
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._running = 0
        self._recent_ms: deque[float] = deque(maxlen=RECENT)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"hawkvision-worker-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Number of jobs in the queue."""
        return self._queue.waiting

    @property
    def service_ms(self) -> float:
        """Smoothed time of a job in milliseconds; 0 before the first."""
        return self._queue.admission.interval_s * self.threads * 1e3

    def recent_ms(self) -> tuple[float, ...]:
        """Milliseconds from `submit` to the end of the last jobs of the stage: quartiles; empty before the first.

        Jobs whose future was cancelled while they ran count as well.
        """
        ordered = sorted(self._recent_ms)
        return tuple(ordered[len(ordered) * quarter // 4] for quarter in (1, 2, 3)) if ordered else ()

    def alone(self) -> bool:
        """Whether no job waits and at most one runs, the one that asks, and the pools of other tasks are idle."""
        return self._running <= 1 and not self._queue.waiting and not any(pool.busy for pool in self.beside)

    @property
    def has_room(self) -> bool:
        """Whether a worker is free and no job waits."""
        return self._running < self.threads and not self._queue.waiting

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return self._running > 0 or self._queue.waiting > 0

    def check(self, caller: str, deadline: float | None, *, heavy: bool = False) -> None:
        """Refuse a job that would be late, or for which there is no place; `submit` checks too.

        Args:
            caller: whose turn it takes.
            deadline: on the monotonic clock, in seconds; None if it has none, or a late answer is wanted.
            heavy: whether its image is heavy.

        Raises:
            Overloaded: says when a place is likely.
            NotReady: if the pool is closed.
        """
        if self._closed:
            raise NotReady("the node is shutting down")
        now = time.monotonic()
        left_s = None if deadline is None else deadline - now
        self._queue.check((caller, deadline is not None, heavy), left_s, now)

    def reserve(self, caller: str, deadline: float | None, *, heavy: bool = False) -> Place:
        """Keep a place for a job that `check` found in time. Without a job, release it."""
        return Place(self._queue.admission, (caller, deadline is not None, heavy), time.monotonic())

    def submit(
        self,
        run: Callable[[], T],
        deadline: float | None = None,
        run_batch: RunBatch[T] | None = None,
        cost: DecodingCost = NO_COST,
        caller: str = "",
        place: Place | None = None,
    ) -> asyncio.Future[tuple[T, float]]:
        """Queue a job; the future gives its result and how many milliseconds it waited, or its error.

        The future gets `Overloaded` if the job is late when its turn comes, and others wait.

        Args:
            run: called on a worker thread or the loop.
            deadline: on the monotonic clock, in seconds; None if it has none, or a late answer is wanted.
            run_batch: called in place of `run`, with the `run` of several jobs whose `run_batch` is equal.
            cost: its cost; at most as many bytes as the memory budget has.
            caller: whose turn it takes.
            place: that was reserved for it.

        Raises:
            Overloaded, NotReady: as `check`.
        """
        if place is None or place.used:
            self.check(caller, deadline, heavy=cost.heavy)
            place = self.reserve(caller, deadline, heavy=cost.heavy)
        place.used = True
        future: asyncio.Future[tuple[T, float]] = self._loop.create_future()
        due = math.inf if deadline is None else deadline
        lane = (caller, deadline is not None, cost.heavy)
        job = Job(run, run_batch, future, time.monotonic(), due, lane, place, cost)
        with self._lock:
            self._queue.push(job)
        self._tokens.put(True)
        return future

    def close(self) -> None:
        """Finish what is queued, then stop the workers. Blocks until they are done."""
        self._closed = True
        for _ in self._threads:
            self._tokens.put(False)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        going_on = True
        while going_on:
            going_on = self._tokens.get()
            while self._run_next():
                pass

    def _run_next(self) -> bool:
        """Run the next jobs; returns whether there were any."""
        with self._lock:
            jobs, dropped = self._queue.take(time.monotonic(), self._memory.limit)
            self._running += bool(jobs)
        if dropped:
            self._on_loop(self._drop, dropped)
        if not jobs:
            return False
        needed = sum(job.cost.bytes for job in jobs)
        self._memory.wait_for(needed, jobs[0].due)
        started = time.monotonic()
        ended = _run(jobs)
        finished = time.monotonic()
        with self._lock:
            self._running -= 1
            self._queue.release(jobs)
        self._memory.give_back(needed)
        self._on_loop(self._finish, ended, started, finished)
        return True

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _finish(self, ended: Sequence[tuple[Job[T], T | BaseException]], started: float, finished: float) -> None:
        self._queue.ended([job for job, _ in ended], finished)
        for job, result in ended:
            if job.run_batch is not None:
                self._recent_ms.append((finished - job.queued_at) * 1e3)
            if job.future.done():  # cancelled meanwhile
                continue
            if isinstance(result, BaseException):
                job.future.set_exception(result)
            else:
                job.future.set_result((result, max(0.0, started - job.queued_at) * 1e3))

    def _drop(self, jobs: Sequence[Job[T]]) -> None:
        self._queue.ended(jobs, None)
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(TooLateToBegin("it waited too long to be in time, and others wait", 1.0))


def _run(jobs: Sequence[Job[T]]) -> list[tuple[Job[T], T | BaseException]]:
    """Run the jobs; gives the result or error of each."""
    results: Sequence[T | BaseException]
    try:
        if len(jobs) > 1 and (run_batch := jobs[0].run_batch) is not None:
            results = run_batch([job.run for job in jobs])
        else:
            results = [job.run() for job in jobs]
    except BaseException as error:  # noqa: BLE001 - the waiting requests get it, whatever it is
        results = [error] * len(jobs)
    return list(zip(jobs, results, strict=True))
