"""The worker pool's queue: jobs ordered by deadline, and which of them a worker takes next.

Earliest deadline first is optimal as long as every deadline can be met (Liu and Layland, JACM 1973). A job without a
deadline gets a virtual one, so that it is not starved. Under overload that order alone makes every job late. So a job
that can no longer be on time leaves the order. It runs when nothing else waits or on every `LATE_TURN`-th turn, and it
is the first to be shed.

Jobs of one kind that wait together run in one batch if all of them are then still on time. No job waits for companions.

A job declares its cost (`imaging.decoding_cost`). It starts only when its memory is free. Smaller jobs may overtake it
up to `memory.OVERTAKEN_MOST` times. Heavy jobs wait in a line of their own, and one worker leaves them alone while
others wait, so that a light job waits for at most one heavy job. A heavy job that cannot end before its deadline does
not start if it is useless then. Heavy jobs are never batched, which would hold several decoded images in memory.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeAlias, TypeVar

from hawkvision.imaging.decoding_cost import DecoderKind, DecodingCost
from hawkvision.system.memory import OVERTAKEN_MOST, MemoryBudget

T = TypeVar("T")

VIRTUAL_DEADLINE_S: Final = 1.0
"""Deadline of a job that has none: others overtake it for at most one second."""
LATE_TURN: Final = 16
"""One turn in so many goes to a late job, so that late jobs are answered under lasting overload too."""
MAX_BATCH: Final = 4
"""Jobs that one worker runs together; a larger batch saves no more time for each image."""
MAX_SEARCHED: Final = 8
"""Jobs that are examined for one that needs no more memory than is free."""
NO_COST: Final = DecodingCost(0, 0.0, DecoderKind.JPEG, 0)
"""DecodingCost of a job that decodes nothing."""

RunBatch: TypeAlias = Callable[[Sequence[Any]], Sequence[T | Exception]]
"""Runs several jobs; gives the result or error of each, in order."""


@dataclass(order=True, slots=True)
class Job(Generic[T]):
    """One job in the queue."""

    due: float
    """Its deadline, or a virtual one, on the monotonic clock; sorts the queue."""
    number: int
    run: Callable[[], T] = field(compare=False)
    run_batch: RunBatch[T] | None = field(compare=False)
    future: asyncio.Future[tuple[T, float]] = field(compare=False)
    queued_at: float = field(compare=False)
    has_deadline: bool = field(compare=False)
    cost: DecodingCost = field(compare=False)
    late_is_useless: bool = field(compare=False)
    overtaken: int = field(compare=False, default=0)
    """How often others went first because its memory was not free."""


class JobQueue(Generic[T]):
    """Waiting jobs. Not thread-safe: the pool holds a lock around every call that changes it."""

    def __init__(self, workers: int, max_batch: int, memory: MemoryBudget, give_up: Callable[[Job[T]], None]) -> None:
        """Start empty.

        Args:
            workers: of the pool.
            max_batch: jobs that a worker runs together.
            memory: from which the jobs' bytes are taken while they run.
            give_up: called with a job that is discarded because it would be late and useless.
        """
        self.heavy_s = 0.0
        """Expected seconds of the heavy jobs that wait or run."""
        self._workers = workers
        self._max_batch = max_batch
        self._memory = memory
        self._give_up = give_up
        self._light: list[Job[T]] = []
        self._heavy: list[Job[T]] = []
        self._late: deque[Job[T]] = deque()
        self._heavy_running = 0
        self._heavy_last = False
        """Whether the job that started last is heavy."""
        self._turns = 0
        self.missed_turns = 0
        """Turns without a job because no job's memory was free."""

    @property
    def waiting(self) -> int:
        """Number of jobs."""
        return len(self._light) + len(self._heavy) + len(self._late)

    @property
    def ahead(self) -> int:
        """Number of light jobs that can still be on time."""
        return len(self._light)

    def push(self, job: Job[T]) -> None:
        """Add a job."""
        self.heavy_s += job.cost.heavy_s
        heapq.heappush(self._heavy if job.cost.heavy else self._light, job)

    def take(self, now: float, service_s: float) -> list[Job[T]]:
        """The jobs to run next, with their memory taken.

        Empty if those that this turn was for were shed or joined another batch, or if no job's memory is free.

        Args:
            now: on the monotonic clock.
            service_s: expected time of one light job.
        """
        for line in (self._light, self._heavy):
            while line and self._is_late(line[0], now, service_s):
                job = heapq.heappop(line)
                if not self._discard(job, now):
                    self._late.append(job)
        self._turns += 1
        on_time = bool(self._light or self._heavy)
        if self._late and (not on_time or self._turns % LATE_TURN == 0):
            while self._late and self._discard(self._late[0], now):
                self._late.popleft()
            if self._late and self._take_memory(self._late[0]):
                return [self._start(self._late.popleft())]
        jobs = self._take_batch(now, service_s) if on_time else []
        if not jobs and self.waiting:
            self.missed_turns += 1
        return jobs

    def ended(self, jobs: Sequence[Job[T]]) -> None:
        """Record that jobs have run; the caller gives their memory back."""
        self._forget_work(sum(job.cost.heavy_s for job in jobs))
        self._heavy_running -= sum(job.cost.heavy for job in jobs)

    def claim_missed_turns(self) -> int:
        """How many turns found no memory since the last call."""
        missed, self.missed_turns = self.missed_turns, 0
        return missed

    def shed(self) -> Job[T] | None:
        """Remove the job that has been late the longest, if there is one."""
        job = self._late.popleft() if self._late else None
        if job is not None:
            self._forget_work(job.cost.heavy_s)
        return job

    def remaining(self) -> list[Job[T]]:
        """All waiting jobs."""
        return [*self._light, *self._heavy, *self._late]

    def _take_batch(self, now: float, service_s: float) -> list[Job[T]]:
        """The first job, and of those behind it this worker's share that can run with it on time."""
        share = batch_size(math.ceil(len(self._light) / self._workers), self._max_batch)
        first = self._first()
        if first is None:
            return []
        jobs = [first]
        if first.cost.heavy:
            return jobs
        run_batch = first.run_batch
        must_end = first.due if first.has_deadline else math.inf
        while run_batch is not None and len(jobs) < share and self._light:
            following = self._light[0]
            if following.has_deadline:
                must_end = min(must_end, following.due)
            if following.run_batch != run_batch or now + service_s * (len(jobs) + 1) > must_end:
                break
            if not self._take_memory(following):
                break
            jobs.append(heapq.heappop(self._light))
        return jobs

    def _first(self) -> Job[T] | None:
        """The first job whose memory is free; none while one before it was overtaken too often."""
        lines = [line for line in (self._light, self._heavy) if line]
        if len(lines) > 1:
            enough = self._heavy_running >= max(1, self._workers - 1) or self._heavy_last
            starved = self._heavy[0].overtaken >= OVERTAKEN_MOST
            if starved or (not enough and self._heavy[0] < self._light[0]):
                lines.reverse()
        passed: list[tuple[list[Job[T]], Job[T]]] = []
        found: Job[T] | None = None
        for line in lines:
            searched = 0
            while line and found is None and searched < MAX_SEARCHED:
                job = heapq.heappop(line)
                searched += 1
                if self._take_memory(job):
                    found = job
                    break
                passed.append((line, job))
                if job.overtaken >= OVERTAKEN_MOST:
                    break
            if found is not None or (passed and passed[-1][1].overtaken >= OVERTAKEN_MOST):
                break
        for line, job in passed:
            job.overtaken += found is not None
            heapq.heappush(line, job)
        return None if found is None else self._start(found)

    def _start(self, job: Job[T]) -> Job[T]:
        self._heavy_last = job.cost.heavy
        self._heavy_running += job.cost.heavy
        return job

    def _take_memory(self, job: Job[T]) -> bool:
        """Take the job's memory; a cancelled job needs none."""
        if job.future.cancelled():
            self._forget_work(job.cost.heavy_s)
            job.cost = NO_COST
        return not job.cost.bytes or self._memory.take(job.cost.bytes)

    def _discard(self, job: Job[T], now: float) -> bool:
        """Whether a heavy job would end late and be useless; it is then given up."""
        if not (job.late_is_useless and job.cost.heavy) or now + job.cost.heavy_s <= job.due:
            return False
        self._forget_work(job.cost.heavy_s)
        self._give_up(job)
        return True

    def _forget_work(self, heavy_s: float) -> None:
        self.heavy_s = max(0.0, self.heavy_s - heavy_s)

    @staticmethod
    def _is_late(job: Job[T], now: float, service_s: float) -> bool:
        ends = now + service_s + job.cost.heavy_s
        return job.has_deadline and ends > job.due and not job.future.cancelled()


def batch_size(waiting: int, most: int = MAX_BATCH) -> int:
    """How many of the jobs that wait for one worker it runs together: half of them, but two of two or three.

    A larger share would let the first wait for the last; a smaller one would save less time.
    """
    return min(most, max(min(2, waiting), waiting // 2))
