"""The worker pool: threads that decode images and run models, fed from one bounded queue (`edge.inference.job_queue`).

Threads suffice, because decoding and inference release the interpreter lock. While images compete, each model call uses
one intra-op thread: N cores run N images, and no image waits at another's barrier. An image that is alone may use
several threads (`inference.adaptive_parallelism`).

The event loop itself may run short jobs, which spares them two hand-overs between threads. With one core and one worker
the loop and the thread take turns: the loop sends the last result, reads what has arrived, and runs the next jobs. With
several cores the loop runs only a job that is alone, and only while few jobs arrive.
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
from hawkvision.inference.adaptive_parallelism import usable_cores
from hawkvision.inference.core_placement import CorePlacement
from hawkvision.system.memory import MemoryBudget

T = TypeVar("T")

SERVICE_GAIN: Final = 0.1
"""Weight of the newest job in the smoothed service time."""
MAX_ON_LOOP_S: Final = 0.03
"""Longest expected time of a batch that the loop runs: everything else on the loop waits that long."""
GAP_GAIN: Final = 0.1
"""Weight of the newest gap between two jobs in the smoothed gap."""
MAX_GAP_S: Final = 0.1
"""A longer gap counts as this, so that a burst is noticed within about ten jobs."""
MAX_ARRIVALS_MEANWHILE: Final = 0.125
"""With several cores, the loop runs a job only if at most so many others are expected to arrive while it runs."""


class WorkerPool(Generic[T]):
    """`threads` workers behind a queue of at most `limit` waiting jobs. Made and used on one event loop."""

    def __init__(
        self,
        threads: int,
        limit: int,
        may_run_on_loop: Callable[[Callable[[], T]], bool] | None = None,
        cores: int | None = None,
        max_batch: int = MAX_BATCH,
        memory: MemoryBudget | None = None,
    ) -> None:
        """Start the workers.

        Args:
            threads: number of workers.
            limit: jobs that may wait.
            may_run_on_loop: asked with each submitted job whether the event loop may run it now; None leaves all jobs
                to threads.
            cores: for the loop and the threads together; None counts those that this process may use.
            max_batch: jobs that a worker runs together; 1 where a batch saves no time.
            memory: from which jobs' bytes are taken while they run; None has no bound.

        Raises:
            ValueError: for less than one thread or place.
        """
        if threads < 1 or limit < 1:
            raise ValueError(f"expected at least one thread and one place, got {threads} and {limit}")
        self.threads = threads
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._memory = MemoryBudget() if memory is None else memory
        self._queue: JobQueue[T] = JobQueue(threads, max_batch, self._memory, self._give_up)
        self._memory.when_freed(self._repeat_turns)
        # One empty token per queued job, or jobs taken for the thread, or None to stop. A SimpleQueue hands over in
        # half the time of a Condition.
        self._tokens: queue.SimpleQueue[Sequence[Job[T]] | None] = queue.SimpleQueue()
        self._may_run_on_loop = may_run_on_loop
        self._take_turns = may_run_on_loop is not None and threads == 1 and (cores or usable_cores()) == 1
        """Whether loop and thread share one core and run jobs in turns."""
        self._turn_due = False
        """Whether a turn of the loop is scheduled or, if they take turns, one of the thread has not ended."""
        self._numbers = 0
        self._running = 0
        self._apart = CorePlacement()
        self._service_s = 0.0
        """Smoothed time of a light job."""
        self._gap_s = 0.0
        """Smoothed time from one job to the next; 0 before the first."""
        self._last_submit = -math.inf
        self._closed = False
        self._threads = [
            threading.Thread(target=self._live, name=f"hawkvision-worker-{i}", daemon=True) for i in range(threads)
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
        """Whether no job waits and at most one runs: the one that asks."""
        return self._running <= 1 and not self._queue.waiting

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
        if self._queue.waiting >= self._limit:
            self._make_room()
        now = time.monotonic()
        self._gap_s += GAP_GAIN * (min(now - self._last_submit, MAX_GAP_S) - self._gap_s)
        self._last_submit = now
        future: asyncio.Future[tuple[T, float]] = self._loop.create_future()
        self._numbers += 1
        due = now + VIRTUAL_DEADLINE_S if deadline is None else deadline
        job = Job(due, self._numbers, run, run_batch, future, now, deadline is not None, cost, late_is_useless)
        with self._lock:
            self._queue.push(job)
        if self._may_run_on_loop is not None and self._prefers_loop():
            self._schedule_turn()
        else:
            self._tokens.put(())
        return future

    def close(self) -> None:
        """Finish what is queued, then stop the workers. Blocks until they are done."""
        with self._lock:
            self._closed = True
            if self._may_run_on_loop is not None:  # the loop takes no more turns; a surplus token does no harm
                for _ in range(self._queue.waiting):
                    self._tokens.put(())
            for _ in self._threads:
                self._tokens.put(None)
        for thread in self._threads:
            thread.join()
        for job in self._queue.remaining():  # users of the same memory outside the pool kept it until the end
            self._fail_later(job, NotReady("the node is shutting down"))

    # -------------------------------------------------------------------------------------------- on threads

    def _live(self) -> None:
        self._apart.join()
        try:
            self._work()
        finally:
            self._apart.leave()

    def _work(self) -> None:
        while True:
            taken = self._tokens.get()
            started = time.monotonic()
            with self._lock:
                jobs = taken or self._queue.take(started, self._service_s)
                if taken is None and not jobs:
                    return
                if not jobs:
                    continue
                self._running += 1
            if taken is None:  # stop only after the jobs that had no memory before
                self._tokens.put(None)
            with self._apart:
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
                self._tokens.put(())

    # ------------------------------------------------------------------------------------------- on the loop

    def _schedule_turn(self) -> None:
        """Schedule a turn of the loop, after it has read and queued what has arrived."""
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._loop.call_soon, self._turn)

    def _prefers_loop(self) -> bool:
        """Whether the loop should run the next job: it has the only core, or few jobs would wait for it."""
        alone = self._running == 0 and self._queue.waiting <= 1
        return self._take_turns or (alone and self._service_s <= MAX_ARRIVALS_MEANWHILE * self._gap_s)

    def _turn(self) -> None:
        """Run the next jobs here, or pass them to a thread; `_finish` schedules the next turn."""
        self._turn_due = False
        started = time.monotonic()
        with self._lock:
            if not self._prefers_loop():
                self._tokens.put(())
                return
            jobs = [] if self._closed else self._queue.take(started, self._service_s)
            if not jobs:
                return
            if not self._fits_loop(jobs):
                self._turn_due = self._take_turns
                self._tokens.put(jobs)
                return
            self._running += 1
        ended = _run(jobs)
        self._release(jobs)
        self._finish(ended, started, time.monotonic())

    def _fits_loop(self, jobs: Sequence[Job[T]]) -> bool:
        may = self._may_run_on_loop
        short = self._service_s * len(jobs) <= MAX_ON_LOOP_S and not jobs[0].cost.heavy
        return may is not None and short and all(may(job.run) for job in jobs)

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
        if self._take_turns:
            self._turn_due = False
            if self._queue.waiting and not self._closed:
                self._schedule_turn()

    def _make_room(self) -> None:
        """Shed the job that has been late the longest.

        Raises:
            Overloaded: if every waiting job can still be on time.
        """
        wait_s = max(1.0, math.ceil(self._service_s * self._limit / self.threads))
        full = Overloaded(f"{self._limit} requests are already waiting for {self.threads} workers", wait_s)
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
