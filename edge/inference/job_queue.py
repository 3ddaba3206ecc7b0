"""The worker pool's queue: who gets in, in what order jobs run, and which are dropped.

`hawkvision.system.admission` keeps it so short that jobs can be on time. Callers take turns, and so do a caller's jobs
with and without a deadline and its heavy images, which leave a worker to others while there are any. A job that is late
all the same is dropped when its turn comes, unless nobody else waits or its caller wants late answers.

Jobs of one kind that wait together run in one batch if all of them are then still on time. No job waits for companions.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

from hawkvision.core.errors import Overloaded
from hawkvision.imaging.decoding_cost import DecodingCost
from hawkvision.system.admission import Admission

T = TypeVar("T")

MAX_BATCH: Final = 4
"""Jobs that one worker runs together; a larger batch saves no more time for each image."""
HEAVY_MOST: Final = 16
"""Heavy jobs inside, for each worker."""
LIGHT_S: Final = 1.0
"""Seconds after a light job for which a worker is kept free of heavy ones, if there are several workers."""
NO_COST: Final = DecodingCost(0, heavy=False)
"""Cost of a job that decodes nothing."""

Lane: TypeAlias = tuple[str, bool, bool]
"""Whose turn a job takes: its caller, whether it has a deadline, and whether it is heavy."""
RunBatch: TypeAlias = Callable[[Sequence[Any]], Sequence[T | Exception]]
"""Runs several jobs; gives the result or error of each, in order."""


class Place:
    """A place inside the pool, until its job has ended or it is released."""

    def __init__(self, admission: Admission, lane: Lane, now: float) -> None:
        """Take it."""
        self.lane = lane
        self.used = False
        """Whether it is a job's, or released."""
        self._admission = admission
        admission.enter(lane, now)

    def release(self) -> None:
        """Give it up if no job has it."""
        if not self.used:
            self.used = True
            self._admission.leave([self.lane], None)


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """One job in the queue."""

    run: Callable[[], T]
    run_batch: RunBatch[T] | None
    future: asyncio.Future[tuple[T, float]]
    queued_at: float
    due: float
    """On the queue's clock; infinite without a deadline, or if a late answer is wanted."""
    lane: Lane
    place: Place
    cost: DecodingCost


class JobQueue(Generic[T]):
    """Waiting jobs. The event loop admits and ends them; `push` and `take` need a lock around them."""

    def __init__(self, workers: int, limit: int, max_batch: int) -> None:
        """Start empty.

        Args:
            workers: of the pool.
            limit: jobs that may wait.
            max_batch: jobs that a worker runs together.
        """
        self.admission = Admission(limit + workers, workers)
        self.waiting = 0
        """Number of jobs."""
        self._workers = workers
        self._max_batch = max_batch
        self._lanes: OrderedDict[Lane, deque[Job[T]]] = OrderedDict()
        """The next turn's first."""
        self._heavy = self._heavy_running = 0
        self._heavy_last = False
        """Whether the job that started last is heavy."""
        self._light_until = 0.0
        """Until when a worker is kept free of heavy jobs."""

    def check(self, lane: Lane, left_s: float | None, now: float) -> None:
        """Refuse a job that would be late, or for which there is no place.

        Raises:
            Overloaded: says when a place is likely.
        """
        if lane[2] and self._heavy >= HEAVY_MOST * self._workers:
            raise Overloaded(f"{self._heavy} large images are already waiting", 1.0)
        self.admission.check(lane, left_s, now)

    def push(self, job: Job[T]) -> None:
        """Add a job that has a place."""
        self._heavy += job.cost.heavy
        if not job.cost.heavy:
            self._light_until = job.queued_at + LIGHT_S
        self._lanes.setdefault(job.lane, deque()).append(job)
        self.waiting += 1

    def take(self, now: float, memory: int) -> tuple[list[Job[T]], list[Job[T]]]:
        """The jobs to run next, none if no job may start now, and those that are dropped because they are late.

        Together they need at most so many bytes of memory, if there are several.
        """
        jobs: list[Job[T]] = []
        dropped: list[Job[T]] = []
        service_s = self.admission.interval_s * self._workers
        share = batch_size(math.ceil(self.waiting / self._workers), self._max_batch)
        must_end = math.inf
        while len(jobs) < share and (lane := self._next_lane(now)) is not None:
            job = self._lanes[lane][0]
            live = not job.future.cancelled()
            if live and jobs:
                ends, needed = now + service_s * (len(jobs) + 1), sum(each.cost.bytes for each in (*jobs, job))
                alike = job.run_batch is not None and job.run_batch == jobs[0].run_batch and not job.cost.heavy
                if not alike or ends > min(must_end, job.due) or needed > memory:
                    break
            self._pop(lane)
            if not live or (now + service_s > job.due and (jobs or self._next_lane(now) is not None)):
                dropped.append(job)
                continue
            must_end = min(must_end, job.due)
            jobs.append(job)
            if job.cost.heavy or job.run_batch is None:
                break
        if jobs:
            self._heavy_last = jobs[0].cost.heavy
        self._heavy_running += sum(job.cost.heavy for job in jobs)
        return jobs, dropped

    def ended(self, jobs: Sequence[Job[T]], at: float | None) -> None:
        """Record that jobs have run, or were dropped (None); on the event loop."""
        self._heavy -= sum(job.cost.heavy for job in jobs)
        self.admission.leave([job.place.lane for job in jobs], at)

    def release(self, jobs: Sequence[Job[T]]) -> None:
        """Let other heavy jobs start; on the worker's thread, with the lock."""
        self._heavy_running -= sum(job.cost.heavy for job in jobs)

    def _next_lane(self, now: float) -> Lane | None:
        light = next((lane for lane in self._lanes if not lane[2]), None)
        barred = self._heavy_running >= max(1, self._workers - 1) and now < self._light_until
        if light is not None and (barred or self._heavy_last):
            return light
        return None if barred else next(iter(self._lanes), None)

    def _pop(self, lane: Lane) -> None:
        """Take the lane's first job; the lane's next turn comes after those of the others."""
        self._lanes[lane].popleft()
        self.waiting -= 1
        if self._lanes[lane]:
            self._lanes.move_to_end(lane)
        else:
            del self._lanes[lane]


def batch_size(waiting: int, most: int = MAX_BATCH) -> int:
    """How many of the jobs that wait for one worker it runs together: half of them, but two of two or three.

    A larger share would let the first wait for the last; a smaller one would save less time.
    """
    return min(most, max(min(2, waiting), waiting // 2))
