"""The worker pool: threads that decode and infer, fed from one bounded queue ordered by deadline.

Threads suffice because decoding and inference release the interpreter lock; where images compete, each model call
uses one intra-op thread, so that N cores run N images and no image waits for another's barrier (one that is alone
may have several: `inference.adaptive_parallelism`). Earliest deadline first is optimal on a queue that can be met at
all (Liu and Layland, JACM 1973); requests without a deadline get a virtual one, so that they are not starved.

Under overload that order alone is the worst there is: those at the front are just too late, and so is everybody behind
them. So a job that can no longer be in time leaves the line; it is run when nobody else waits, or every sixteenth turn,
and it is the first to be shed. Measured with one worker at 1.5 times its capacity, which can meet 67 % of the
deadlines: 66 % met, against 4 % by the order alone.

Where jobs wait, a worker takes several of a kind at once and runs them together, if all of them are still in time then:
a model that is given four images needs a ninth less time for each (`MAX_TOGETHER`). Nobody waits for companions.

A job says what it costs (`imaging.decoding_cost`). It is not begun before its bytes are free; meanwhile others go that
need less, so many times (`memory.OVERTAKEN_MOST`) that it is not starved. Of heavy ones the time is known better than
the mean, and one that cannot end before its deadline is not begun where nobody wants it late. They wait in a line of
their own, and while others wait one worker does not take from it: so nobody waits for more than one of them, however
many there are. They are never run with others, for that saves a tenth of some milliseconds, and would keep several
rasters in memory.

With one core a thread beside the event loop gains nothing, and the loop breaks into its inference for each image that
comes. So the loop itself may run short jobs (`here`): it sends what came of the last, takes in what came meanwhile, and
runs the next. A node on one core of a Xeon, at 60 % of what it can answer, has a P50 of 6.6 and a P99 of 23 ms that way
(mobilenet_v2_int8), 7.1 and 27 by a thread; with efficientnet_lite0_int8 8.2 and 29, 8.9 and 33 (12 turns of 3 s each,
one after the other). It answers as many, within the 2 % that these turns can show.

With several cores it runs what comes alone, as long as few come (`FEW`), and the image is spared two hand-overs. On
two cores of that Xeon, at 8, 15 and 30 images a second, P50 is 4.3, 4.1 and 3.9 ms that way, 4.6, 4.5 and 4.2 by a
thread, P99 8.4, 8.7 and 10.1, 8.8, 9.9 and 10.1 (efficientnet_lite0_int8, 14 turns of 3 s each).
"""

from __future__ import annotations

import asyncio
import heapq
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeAlias, TypeVar

from hawkvision.core.errors import DeadlineMissed, NotReady, Overloaded
from hawkvision.imaging.decoding_cost import DecoderKind, DecodingCost
from hawkvision.inference.adaptive_parallelism import usable_cores
from hawkvision.inference.core_placement import CorePlacement
from hawkvision.system.memory import OVERTAKEN_MOST, MemoryBudget

T = TypeVar("T")

PATIENCE_S = 1.0
"""Virtual deadline of a request that has none: it is overtaken for at most one second."""
LATE_TURN = 16
"""One turn in so many goes to a job that is late already, so that late ones are answered under lasting overload too."""
SERVICE_GAIN = 0.1
"""Weight of the newest image in the smoothed service time."""
MAX_TOGETHER: Final = 4
"""Jobs that one worker runs together. ONNX Runtime's time per image, one thread of a shared EPYC core, at 1, 2, 4 and
8 images: mobilenet_v2_int8 3.68, 3.38, 3.27 and 3.28 ms; efficientnet_lite0_int8 4.48, 4.19, 4.02 and 4.06 ms (least
of 37 runs each). The logits are those of one at a time, bit for bit, with each of the cascades' 18 models. Our own int8
kernels gain nothing: a node answers as many a second of either, and at 60 % of that P50 is 6.1 ms one at a time, 7.1
together (means of 4 turns of 6 s each)."""

MOST_HERE_S: Final = 0.03
"""What jobs that the loop runs itself may be expected to take, together: all else that it does waits so long."""

GAP_GAIN: Final = 0.1
"""Weight of the newest gap between two jobs in the smoothed one."""
LONGEST_GAP_S: Final = 0.1
"""A gap counts for no more, so that a crowd is noticed within some ten jobs."""
FEW: Final = 0.125
"""With several cores, how many others may be expected while the loop runs a job: they have to wait for it. Without this
bound, at 60, 120 and 200 images a second, P50 was 9, 20 and 4 % below that of threads, and P99 8, 6 and 9 % above."""

FREE: Final = DecodingCost(0, 0.0, DecoderKind.JPEG, 0)
"""Of a job that decodes nothing."""
SEARCHED_MOST: Final = 8
"""Jobs that are looked at for one that needs no more memory than is free."""

Together: TypeAlias = Callable[[Sequence[Any]], Sequence[T | Exception]]
"""Runs several jobs: each one's result, or what it raised, in order."""


@dataclass(order=True, slots=True)
class _Job(Generic[T]):
    due: float
    """Its deadline, or a virtual one; sorts the queue."""
    number: int
    run: Callable[[], T] = field(compare=False)
    together: Together[T] | None = field(compare=False)
    future: asyncio.Future[tuple[T, float]] = field(compare=False)
    queued_at: float = field(compare=False)
    has_deadline: bool = field(compare=False)
    cost: DecodingCost = field(compare=False)
    late_is_useless: bool = field(compare=False)
    overtaken: int = field(compare=False, default=0)
    """How often others went before it, because its bytes were not free."""


class WorkerPool(Generic[T]):
    """`threads` workers behind a queue of at most `limit` waiting jobs. Made and used on one event loop."""

    def __init__(
        self,
        threads: int,
        limit: int,
        here: Callable[[Callable[[], T]], bool] | None = None,
        cores: int | None = None,
        most_together: int = MAX_TOGETHER,
        memory: MemoryBudget | None = None,
    ) -> None:
        """Start the workers.

        Args:
            threads: of them.
            limit: jobs that may wait.
            here: whether the event loop may stand still for a job now; asked with what was submitted, for each. None
                has all run by threads.
            cores: for the loop and the threads together; None counts those that this process may use. With one, and one
                thread, the loop runs all that it may, in turns with that thread, else what comes alone.
            most_together: jobs that a worker runs together; 1 where that saves nothing, for then the first waits for
                the last.
            memory: from which jobs' bytes are taken while they run; None has no bound.

        Raises:
            ValueError: for less than one thread or place.
        """
        if threads < 1 or limit < 1:
            raise ValueError(f"expected at least one thread and one place, got {threads} and {limit}")
        self._limit = limit
        self._most_together = most_together
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._heap: list[_Job[T]] = []
        self._large: list[_Job[T]] = []
        """The heavy ones, ordered alike."""
        self._large_running = 0
        self._large_last = False
        """Whether the job that was begun last is heavy."""
        self._late: deque[_Job[T]] = deque()
        self._turns = 0
        # An empty token per queued job, or jobs that were taken for the thread, or None to stop: measured, 11 µs for a
        # hand-over and back, a Condition takes 20.
        self._tokens: queue.SimpleQueue[Sequence[_Job[T]] | None] = queue.SimpleQueue()
        self._here = here
        self._in_turns = here is not None and threads == 1 and (cores or usable_cores()) == 1
        self._turning = False
        """Whether a turn of the loop's is due, or one of the thread's, if they take turns, is not over."""
        self._numbers = 0
        self._running = 0
        self._apart = CorePlacement()
        self._memory = MemoryBudget() if memory is None else memory
        self._memory.when_freed(self._look_again)
        self._owed = 0
        """Turns that came to nothing, for no job's bytes were free."""
        self._service_s = 0.0
        """Smoothed, of those that are not heavy."""
        self._heavy_s = 0.0
        """Of the heavy ones that wait or run."""
        self._gap_s = 0.0
        """Smoothed time from one job to the next; 0 before the first."""
        self._last = -math.inf
        """When the last was submitted."""
        self._closed = False
        self.threads = threads
        self._threads = [
            threading.Thread(target=self._live, name=f"hawkvision-worker-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._heap) + len(self._large) + len(self._late)

    @property
    def service_ms(self) -> float:
        """Smoothed time that a worker takes for one job; 0 before the first."""
        return self._service_s * 1e3

    def predicted_wait_ms(self) -> float:
        """How long a job put in now would wait for a worker, behind all that can still be in time."""
        ahead = len(self._heap) + max(0, self._running - len(self._threads) + 1)
        return (self._service_s * ahead + self._heavy_s) * 1e3 / len(self._threads)

    def alone(self) -> bool:
        """Whether nobody waits, and no more than one worker has something to do: the one that asks, if one does."""
        return self._running <= 1 and not self.waiting

    def submit(
        self,
        run: Callable[[], T],
        deadline: float | None = None,
        together: Together[T] | None = None,
        cost: DecodingCost = FREE,
        *,
        late_is_useless: bool = False,
    ) -> asyncio.Future[tuple[T, float]]:
        """Queue a job; the future gives (result, milliseconds waited) or what the job raised.

        The future gets `DeadlineMissed` if the job is heavy, late and useless then.

        Args:
            run: called on a worker thread.
            deadline: on the monotonic clock, seconds; only orders the queue.
            together: called in place of `run` with the `run` of several jobs that were submitted with equal `together`.
            cost: what it takes; no more bytes than the budget of memory has.
            late_is_useless: whether it need not be run if it cannot end by the deadline.

        Raises:
            Overloaded: if `limit` jobs are waiting and none of them is late; says when a place is likely. A job that is
                late makes room instead, and its future gets the error.
            NotReady: if the pool is closed.
        """
        if self._closed:
            raise NotReady("the node is shutting down")
        if self.waiting >= self._limit:
            self._make_room()
        now = time.monotonic()
        self._gap_s += GAP_GAIN * (min(now - self._last, LONGEST_GAP_S) - self._gap_s)
        self._last = now
        future: asyncio.Future[tuple[T, float]] = self._loop.create_future()
        self._numbers += 1
        due = now + PATIENCE_S if deadline is None else deadline
        job = _Job(due, self._numbers, run, together, future, now, deadline is not None, cost, late_is_useless)
        with self._lock:
            self._heavy_s += cost.heavy_s
            heapq.heappush(self._large if cost.heavy else self._heap, job)
        if self._here is not None and self._for_the_loop():
            self._turn_soon()
        else:
            self._tokens.put(())
        return future

    def close(self) -> None:
        """Finish what is queued, then stop the workers. Blocks until they are done."""
        with self._lock:
            self._closed = True
            if self._here is not None:  # the loop takes no more turns; a token too many is none too few
                for _ in range(self.waiting):
                    self._tokens.put(())
            for _ in self._threads:
                self._tokens.put(None)
        for thread in self._threads:
            thread.join()
        for job in (*self._heap, *self._large, *self._late):  # others than we kept their memory until the end
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_fail, job.future, NotReady("the node is shutting down"))

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
                jobs = taken or self._take(started)
                if taken is None and not jobs:
                    return
                if not jobs:
                    continue
                self._running += 1
            if taken is None:  # the last turn finds what earlier ones had no memory for
                self._tokens.put(None)
            with self._apart:
                ended = _run(jobs)
            finished = time.monotonic()
            self._ran(jobs)
            # A loop that closed meanwhile has nobody waiting.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._finish, ended, started, finished)

    def _turn_soon(self) -> None:
        """Have the loop see to those that wait, if it is not about to; not before what has come is read and in line."""
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._loop.call_soon, self._turn)

    def _for_the_loop(self) -> bool:
        """Whether the loop is to run what is next: it has the only core, or nobody else needs it before long."""
        alone = self._running == 0 and self.waiting <= 1
        return self._in_turns or (alone and self._service_s <= FEW * self._gap_s)

    def _turn(self) -> None:
        """Run the next jobs on the loop, or have a thread run them; then `_finish` sees to those behind them."""
        self._turning = False
        started = time.monotonic()
        with self._lock:
            if not self._for_the_loop():
                self._tokens.put(())
                return
            jobs = [] if self._closed else self._take(started)
            if not jobs:
                return
            if not self._may_run_here(jobs):
                self._turning = self._in_turns
                self._tokens.put(jobs)
                return
            self._running += 1
        ended = _run(jobs)
        self._ran(jobs)
        self._finish(ended, started, time.monotonic())

    def _ran(self, jobs: Sequence[_Job[T]]) -> None:
        """They are not running any more, and their memory is free."""
        with self._lock:
            self._running -= 1
            self._heavy_s = max(0.0, self._heavy_s - sum(job.cost.heavy_s for job in jobs))
            self._large_running -= sum(job.cost.heavy for job in jobs)
        self._memory.give_back(sum(job.cost.bytes for job in jobs))

    def _look_again(self) -> None:
        """Memory came back: have the turns that came to nothing for want of it."""
        if self._owed:
            with self._lock:
                owed, self._owed = self._owed, 0
            for _ in range(owed):
                self._tokens.put(())

    def _may_run_here(self, jobs: Sequence[_Job[T]]) -> bool:
        here = self._here
        brief = self._service_s * len(jobs) <= MOST_HERE_S and not jobs[0].cost.heavy
        return here is not None and brief and all(here(job.run) for job in jobs)

    def _take(self, now: float) -> list[_Job[T]]:
        """The next jobs, with the lock held and their bytes taken.

        None if those that this turn was for were shed, or taken together, or if nobody's bytes are free.
        """
        for line in (self._heap, self._large):
            while line and self._is_late(line[0], now):
                job = heapq.heappop(line)
                if not self._give_up(job, now):
                    self._late.append(job)
        self._turns += 1
        in_line = bool(self._heap or self._large)
        if self._late and (not in_line or self._turns % LATE_TURN == 0):
            while self._late and self._give_up(self._late[0], now):
                self._late.popleft()
            if self._late and self._take_bytes(self._late[0]):
                return [self._begun(self._late.popleft())]
        jobs = self._take_together(now) if in_line else []
        if not jobs and self.waiting:
            self._owed += 1
        return jobs

    def _give_up(self, job: _Job[T], now: float) -> bool:
        """Whether it would be of no use any more, and takes long; then whoever asked is told so."""
        if not (job.late_is_useless and job.cost.heavy) or now + job.cost.heavy_s <= job.due:
            return False
        self._heavy_s = max(0.0, self._heavy_s - job.cost.heavy_s)
        error = DeadlineMissed(
            f"not started: to decode it takes about {job.cost.heavy_s * 1e3:.0f} ms, too long by now"
        )
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_fail, job.future, error)
        return True

    def _take_bytes(self, job: _Job[T]) -> bool:
        """Take what it needs of the memory; nothing if nobody waits for it any more."""
        if job.future.cancelled():
            self._heavy_s = max(0.0, self._heavy_s - job.cost.heavy_s)
            job.cost = FREE
        return not job.cost.bytes or self._memory.take(job.cost.bytes)

    def _first(self) -> _Job[T] | None:
        """The first in line whose bytes are free, unless one before it was overtaken too often."""
        lines = [line for line in (self._heap, self._large) if line]
        if len(lines) > 1:
            enough = self._large_running >= max(1, len(self._threads) - 1) or self._large_last
            starved = self._large[0].overtaken >= OVERTAKEN_MOST
            if starved or (not enough and self._large[0] < self._heap[0]):
                lines.reverse()
        passed: list[tuple[list[_Job[T]], _Job[T]]] = []
        found: _Job[T] | None = None
        for line in lines:
            searched = 0
            while line and found is None and searched < SEARCHED_MOST:
                job = heapq.heappop(line)
                searched += 1
                if self._take_bytes(job):
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
        return None if found is None else self._begun(found)

    def _begun(self, job: _Job[T]) -> _Job[T]:
        """Note that it is taken from its line."""
        self._large_last = job.cost.heavy
        self._large_running += job.cost.heavy
        return job

    def _take_together(self, now: float) -> list[_Job[T]]:
        """The first job of the line, and of those behind it this worker's share that can be run with it in time."""
        share = together_of(math.ceil(len(self._heap) / len(self._threads)), self._most_together)
        first = self._first()
        if first is None:
            return []
        jobs = [first]
        if first.cost.heavy:
            return jobs
        together = first.together
        must_end = jobs[0].due if jobs[0].has_deadline else math.inf
        while together is not None and len(jobs) < share and self._heap:
            following = self._heap[0]
            if following.has_deadline:
                must_end = min(must_end, following.due)
            if following.together != together or now + self._service_s * (len(jobs) + 1) > must_end:
                break
            if not self._take_bytes(following):
                break
            jobs.append(heapq.heappop(self._heap))
        return jobs

    def _is_late(self, job: _Job[T], now: float) -> bool:
        ends = now + self._service_s + job.cost.heavy_s
        return job.has_deadline and ends > job.due and not job.future.cancelled()

    def _make_room(self) -> None:
        """Shed the job that has been late the longest, if there is one.

        Raises:
            Overloaded: if all that wait can still be in time.
        """
        wait_s = max(1.0, math.ceil(self._service_s * self._limit / len(self._threads)))
        full = Overloaded(f"{self._limit} requests are already waiting for {len(self._threads)} workers", wait_s)
        with self._lock:
            shed = self._late.popleft() if self._late else None
            if shed is not None:
                self._heavy_s = max(0.0, self._heavy_s - shed.cost.heavy_s)
        if shed is None:
            raise full
        if not shed.future.done():
            shed.future.set_exception(full)

    def _finish(self, ended: Sequence[tuple[_Job[T], T | BaseException]], started: float, finished: float) -> None:
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
        if self._in_turns:
            self._turning = False
            if self.waiting and not self._closed:
                self._turn_soon()


def together_of(waiting: int, most: int = MAX_TOGETHER) -> int:
    """How many of the jobs that wait for one worker it runs together: half of them, but two of two or three.

    Simulated with the times of `MAX_TOGETHER`, 0.45 ms of decoding each and Poisson arrivals at 0.3, 0.6, 0.8, 0.9 and
    0.95 of what one at a time can serve, the 99th percentile is 12.0, 21.6, 36.3, 50.8 and 62.0 ms. One at a time it is
    12.0, 22.7, 45.0, 78.0 and 132.9; taking all that wait, up to four, 13.7, 23.6, 37.6, 50.1 and 60.2, for then the
    first waits for the last.
    """
    return min(most, max(min(2, waiting), waiting // 2))


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _run(jobs: Sequence[_Job[T]]) -> list[tuple[_Job[T], T | BaseException]]:
    """What each job gives or raises; those that nobody waits for any more are left out, and not run."""
    wanted = [job for job in jobs if not job.future.cancelled()]
    results: Sequence[T | BaseException]
    try:
        if len(wanted) > 1 and (together := wanted[0].together) is not None:
            results = together([job.run for job in wanted])
        else:
            results = [job.run() for job in wanted]
    except BaseException as error:  # noqa: BLE001 - the waiting requests get it, whatever it is
        results = [error] * len(wanted)
    return list(zip(wanted, results, strict=True))
