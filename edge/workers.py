"""The worker pool: threads that decode and infer, fed from one bounded queue ordered by deadline.

Threads suffice because decoding and inference release the interpreter lock; where pictures compete, each model call
uses one intra-op thread, so that N cores run N pictures and no picture waits for another's barrier (one that is alone
may have several: `vision.wide`). Earliest deadline first is optimal on a queue that can be met at all (Liu and Layland,
JACM 1973); requests without a deadline get a virtual one, so that they are not starved.

Under overload that order alone is the worst there is: those at the front are just too late, and so is everybody behind
them. So a job that can no longer be in time leaves the line; it is run when nobody else waits, or every sixteenth turn,
and it is the first to be shed. Measured with one worker at 1.5 times its capacity, which can meet 67 % of the
deadlines: 66 % met, against 4 % by the order alone.

Where jobs wait, a worker takes several of a kind at once and runs them together, if all of them are still in time then:
a model that is given four pictures needs a ninth less time for each (`MAX_TOGETHER`). Nobody waits for companions.

With one core a thread beside the event loop gains nothing, and the loop breaks into its inference for each picture that
comes. So the loop itself may run short jobs (`here`): it sends what came of the last, takes in what came meanwhile, and
runs the next. A node on one core of a Xeon, at 60 % of what it can answer, has a P50 of 6.6 and a P99 of 23 ms that way
(mobilenet_v2_int8), 7.1 and 27 by a thread; with efficientnet_lite0_int8 8.2 and 29, 8.9 and 33 (12 turns of 3 s each,
one after the other). It answers as many, within the 2 % that these turns can show.

With several cores it runs what comes alone, as long as few come (`FEW`), and the picture is spared two hand-overs. On
two cores of that Xeon, at 8, 15 and 30 pictures a second, P50 is 4.3, 4.1 and 3.9 ms that way, 4.6, 4.5 and 4.2 by a
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

from hawkvision.errors import NotReady, Overloaded
from hawkvision.vision.apart import Apart
from hawkvision.vision.wide import usable_cores

T = TypeVar("T")

PATIENCE_S = 1.0
"""Virtual deadline of a request that has none: it is overtaken for at most one second."""
LATE_TURN = 16
"""One turn in so many goes to a job that is late already, so that late ones are answered under lasting overload too."""
SERVICE_GAIN = 0.1
"""Weight of the newest picture in the smoothed service time."""
MAX_TOGETHER: Final = 4
"""Jobs that one worker runs together. ONNX Runtime's time per picture, one thread of a shared EPYC core, at 1, 2, 4 and
8 pictures: mobilenet_v2_int8 3.68, 3.38, 3.27 and 3.28 ms; efficientnet_lite0_int8 4.48, 4.19, 4.02 and 4.06 ms (least
of 37 runs each). The logits are those of one at a time, bit for bit, with each of the ladders' 18 models. Our own int8
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
bound, at 60, 120 and 200 pictures a second, P50 was 9, 20 and 4 % below that of threads, and P99 8, 6 and 9 % above."""

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


class WorkerPool(Generic[T]):
    """`threads` workers behind a queue of at most `limit` waiting jobs. Made and used on one event loop."""

    def __init__(
        self,
        threads: int,
        limit: int,
        here: Callable[[Callable[[], T]], bool] | None = None,
        cores: int | None = None,
        most_together: int = MAX_TOGETHER,
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
        self._apart = Apart()
        self._service_s = 0.0
        self._gap_s = 0.0
        """Smoothed time from one job to the next; 0 before the first."""
        self._last = -math.inf
        """When the last was submitted."""
        self._closed = False
        self._threads = [
            threading.Thread(target=self._live, name=f"hawkvision-worker-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._heap) + len(self._late)

    @property
    def service_ms(self) -> float:
        """Smoothed time that a worker takes for one job; 0 before the first."""
        return self._service_s * 1e3

    def predicted_wait_ms(self) -> float:
        """How long a job put in now would wait for a worker, behind all that can still be in time."""
        ahead = len(self._heap) + max(0, self._running - len(self._threads) + 1)
        return self._service_s * 1e3 * ahead / len(self._threads)

    def alone(self) -> bool:
        """Whether nobody waits, and no more than one worker has something to do: the one that asks, if one does."""
        return self._running <= 1 and not self.waiting

    def submit(
        self, run: Callable[[], T], deadline: float | None = None, together: Together[T] | None = None
    ) -> asyncio.Future[tuple[T, float]]:
        """Queue a job; the future gives (result, milliseconds waited) or what the job raised.

        Args:
            run: called on a worker thread.
            deadline: on the monotonic clock, seconds; only orders the queue.
            together: called in place of `run` with the `run` of several jobs that were submitted with equal `together`.

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
        job = _Job(due, self._numbers, run, together, future, now, deadline is not None)
        with self._lock:
            heapq.heappush(self._heap, job)
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

    def _live(self) -> None:
        self._apart.join()
        try:
            self._work()
        finally:
            self._apart.leave()

    def _work(self) -> None:
        while (taken := self._tokens.get()) is not None:
            started = time.monotonic()
            with self._lock:
                jobs = taken or self._take(started)
                if not jobs:
                    continue
                self._running += 1
            with self._apart:
                ended = _run(jobs)
            finished = time.monotonic()
            with self._lock:
                self._running -= 1
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
        with self._lock:
            self._running -= 1
        self._finish(ended, started, time.monotonic())

    def _may_run_here(self, jobs: Sequence[_Job[T]]) -> bool:
        here = self._here
        brief = self._service_s * len(jobs) <= MOST_HERE_S
        return here is not None and brief and all(here(job.run) for job in jobs)

    def _take(self, now: float) -> list[_Job[T]]:
        """The next jobs, with the lock held; none if those that this turn was for were shed, or taken together."""
        while self._heap and self._is_late(self._heap[0], now):
            self._late.append(heapq.heappop(self._heap))
        self._turns += 1
        if self._late and (not self._heap or self._turns % LATE_TURN == 0):
            return [self._late.popleft()]
        return self._take_together(now) if self._heap else []

    def _take_together(self, now: float) -> list[_Job[T]]:
        """The first job of the line, and of those behind it this worker's share that can be run with it in time."""
        share = together_of(math.ceil(len(self._heap) / len(self._threads)), self._most_together)
        jobs = [heapq.heappop(self._heap)]
        together = jobs[0].together
        must_end = jobs[0].due if jobs[0].has_deadline else math.inf
        while together is not None and len(jobs) < share:
            following = self._heap[0]
            if following.has_deadline:
                must_end = min(must_end, following.due)
            if following.together != together or now + self._service_s * (len(jobs) + 1) > must_end:
                break
            jobs.append(heapq.heappop(self._heap))
        return jobs

    def _is_late(self, job: _Job[T], now: float) -> bool:
        return job.has_deadline and now + self._service_s > job.due and not job.future.cancelled()

    def _make_room(self) -> None:
        """Shed the job that has been late the longest, if there is one.

        Raises:
            Overloaded: if all that wait can still be in time.
        """
        wait_s = max(1.0, math.ceil(self._service_s * self._limit / len(self._threads)))
        full = Overloaded(f"{self._limit} requests are already waiting for {len(self._threads)} workers", wait_s)
        with self._lock:
            shed = self._late.popleft() if self._late else None
        if shed is None:
            raise full
        if not shed.future.done():
            shed.future.set_exception(full)

    def _finish(self, ended: Sequence[tuple[_Job[T], T | BaseException]], started: float, finished: float) -> None:
        for job, result in ended:
            if job.future.done():  # cancelled meanwhile
                continue
            service_s = (finished - started) / len(ended)
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
