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
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from edge.inference.job_queue import MAX_BATCH, NO_COST, VIRTUAL_DEADLINE_S, Job, JobQueue, RunBatch
from hawkvision.core.errors import DeadlineMissed, NotReady, Overloaded
from hawkvision.imaging.decoding_cost import DecodingCost
from hawkvision.system.memory import MemoryBudget

T = TypeVar("T")

SERVICE_GAIN: Final = 0.1
"""Weight of the newest job in the smoothed service time."""


class WorkerPool(Generic[T]):
    """`threads` workers behind a queue of at most `limit` waiting jobs. Made and used on one event loop."""

    def __init__(
        self,
        threads: int,
        limit: int,
        max_batch: int = MAX_BATCH,
        memory: MemoryBudget | None = None,
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
        self._queue: JobQueue[T] = JobQueue(threads, max_batch, self._memory, self._give_up)
        self._memory.when_freed(self._repeat_turns)
        # True per queued job, or False to stop. A SimpleQueue hands over in half the time of a Condition.
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._numbers = 0
        self._running = 0
        self._service_s = 0.0
        """Smoothed time of a light job."""
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
        return self._service_s * 1e3

    def predicted_wait_ms(self) -> float:
        """How long a job submitted now would wait, behind all that can still be on time."""
        ahead = self._queue.ahead + max(0, self._running - self.threads + 1)
        return (self._service_s * ahead + self._queue.heavy_s) * 1e3 / self.threads

    def alone(self) -> bool:
        """Whether no job waits and at most one runs, the one that asks, and the pools of other tasks are idle."""
        return self._running <= 1 and not self._queue.waiting and not any(pool.busy for pool in self.beside)

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return self._running > 0 or self._queue.waiting > 0

    def submit(
        self,
        run: Callable[[], T],
        deadline: float | None = None,
        run_batch: RunBatch[T] | None = None,
        cost: DecodingCost = NO_COST,
        *,
        late_is_useless: bool = False,
    ) -> asyncio.Future[tuple[T, float]]:
        """Queue a job; the future gives its result and how many milliseconds it waited, or its error.

        The future gets `DeadlineMissed` if the job is heavy, late and then useless.

        Args:
            run: called on a worker thread or the loop.
            deadline: on the monotonic clock, in seconds; orders the queue.
            run_batch: called in place of `run`, with the `run` of several jobs whose `run_batch` is equal.
            cost: its cost; at most as many bytes as the memory budget has.
            late_is_useless: whether it need not run if it cannot end by the deadline.

        Raises:
            Overloaded: if `limit` jobs wait and none of them is late; says when a place is likely. A late job makes
                room instead, and its future gets the error.
            NotReady: if the pool is closed.
        """
        if self._closed:
            raise NotReady("the node is shutting down")
        if self._queue.waiting >= self.limit:
            self._make_room()
        now = time.monotonic()
        future: asyncio.Future[tuple[T, float]] = self._loop.create_future()
        self._numbers += 1
        due = now + VIRTUAL_DEADLINE_S if deadline is None else deadline
        job = Job(due, self._numbers, run, run_batch, future, now, deadline is not None, cost, late_is_useless)
        with self._lock:
            self._queue.push(job)
        self._tokens.put(True)
        return future

    def close(self) -> None:
        """Finish what is queued, then stop the workers. Blocks until they are done."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._tokens.put(False)
        for thread in self._threads:
            thread.join()
        for job in self._queue.remaining():  # users of the same memory outside the pool kept it until the end
            self._fail_later(job, NotReady("the node is shutting down"))

    def _work(self) -> None:
        while True:
            going_on = self._tokens.get()
            started = time.monotonic()
            with self._lock:
                jobs = self._queue.take(started, self._service_s)
                if not jobs and not going_on:
                    return
                if not jobs:
                    continue
                self._running += 1
            if not going_on:  # stop only after the jobs that had no memory before
                self._tokens.put(False)
            ended = _run(jobs)
            finished = time.monotonic()
            self._release(jobs)
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._finish, ended, started, finished)

    def _release(self, jobs: Sequence[Job[T]]) -> None:
        """Record that jobs have ended, and give their memory back."""
        with self._lock:
            self._running -= 1
            self._queue.ended(jobs)
        self._memory.give_back(sum(job.cost.bytes for job in jobs))

    def _repeat_turns(self) -> None:
        """Memory was freed: repeat the turns that found none."""
        if self._queue.missed_turns:
            with self._lock:
                missed = self._queue.claim_missed_turns()
            for _ in range(missed):
                self._tokens.put(True)

    def _finish(self, ended: Sequence[tuple[Job[T], T | BaseException]], started: float, finished: float) -> None:
        for job, result in ended:
            if job.future.done():  # cancelled meanwhile
                continue
            service_s = (finished - started) / len(ended)
            if not job.cost.heavy:
                self._service_s += (SERVICE_GAIN if self._service_s else 1.0) * (service_s - self._service_s)
            if isinstance(result, BaseException):
                job.future.set_exception(result)
            else:
                job.future.set_result((result, max(0.0, started - job.queued_at) * 1e3))

    def _make_room(self) -> None:
        """Shed the job that has been late the longest.

        Raises:
            Overloaded: if every waiting job can still be on time.
        """
        wait_s = max(1.0, math.ceil(self._service_s * self.limit / self.threads))
        full = Overloaded(f"{self.limit} requests are already waiting for {self.threads} workers", wait_s)
        with self._lock:
            shed = self._queue.shed()
        if shed is None:
            raise full
        if not shed.future.done():
            shed.future.set_exception(full)

    def _give_up(self, job: Job[T]) -> None:
        decode_ms = job.cost.heavy_s * 1e3
        self._fail_later(
            job, DeadlineMissed(f"not started: to decode it takes about {decode_ms:.0f} ms, too long by now")
        )

    def _fail_later(self, job: Job[T], error: Exception) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_fail, job.future, error)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _run(jobs: Sequence[Job[T]]) -> list[tuple[Job[T], T | BaseException]]:
    """Run the jobs that are not cancelled; gives the result or error of each."""
    wanted = [job for job in jobs if not job.future.cancelled()]
    results: Sequence[T | BaseException]
    try:
        if len(wanted) > 1 and (run_batch := wanted[0].run_batch) is not None:
            results = run_batch([job.run for job in wanted])
        else:
            results = [job.run() for job in wanted]
    except BaseException as error:  # noqa: BLE001 - the waiting requests get it, whatever it is
        results = [error] * len(wanted)
    return list(zip(wanted, results, strict=True))
