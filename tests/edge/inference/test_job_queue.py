"""The queue of the worker pool in virtual time: goodput under overload, turns, and what a pause does."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from edge.inference.job_queue import NO_COST, Job, JobQueue, Place
from hawkvision.core.errors import Overloaded
from hawkvision.imaging.decoding_cost import DecodingCost

SERVICE_S = 0.01
HEAVY = DecodingCost(0, heavy=True)


@dataclass
class Arrival:
    """One request, and what became of it."""

    at: float
    caller: str = ""
    deadline_s: float | None = 0.3
    cost: DecodingCost = NO_COST
    service_s: float = SERVICE_S
    ended: float | None = None
    refused: bool = False

    @property
    def good(self) -> bool:
        return self.ended is not None and (self.deadline_s is None or self.ended <= self.at + self.deadline_s)


def arrivals(rate: float, seconds: float, seed: int = 0, **more: object) -> list[Arrival]:
    """Arrivals of a Poisson process."""
    draw, at, found = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        found.append(Arrival(at, **more))  # type: ignore[arg-type]
    return found


def _itself(request: Arrival) -> Arrival:
    return request


@dataclass
class Simulation:
    """Workers in virtual time; a batch takes as long as its jobs one by one."""

    workers: int = 1
    limit: int = 256
    now: float = 0.0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self, *requests: list[Arrival]) -> list[Arrival]:
        """The requests, after all of them have ended."""
        loop = asyncio.new_event_loop()
        queue: JobQueue[Arrival] = JobQueue(self.workers, self.limit, 4)
        idle, events = self.workers, [(each.at, next(self._numbers), each) for line in requests for each in line]
        heapq.heapify(events)
        running: list[tuple[float, int, list[Job[Arrival]]]] = []

        def together(jobs: object) -> list[Arrival]:
            raise AssertionError(jobs)

        def start() -> None:
            nonlocal idle
            while idle:
                jobs, dropped = queue.take(self.now, 1 << 40)
                queue.ended(dropped, None)
                for job in dropped:
                    job.run().refused = True
                if not jobs:
                    return
                idle -= 1
                took = sum(job.run().service_s for job in jobs)
                heapq.heappush(running, (self.now + took, next(self._numbers), jobs))

        while events or running:
            if running and (not events or running[0][0] <= events[0][0]):
                self.now, _, jobs = heapq.heappop(running)
                idle += 1
                queue.release(jobs)
                queue.ended(jobs, self.now)
                for job in jobs:
                    job.run().ended = self.now
            else:
                self.now, _, request = heapq.heappop(events)
                lane = (request.caller, request.deadline_s is not None, request.cost.heavy)
                try:
                    queue.check(lane, request.deadline_s, self.now)
                except Overloaded:
                    request.refused = True
                    continue
                due = math.inf if request.deadline_s is None else self.now + request.deadline_s
                place = Place(queue.admission, lane, self.now)
                run, future = partial(_itself, request), loop.create_future()
                queue.push(Job(run, together, future, self.now, due, lane, place, request.cost))
            start()
        loop.close()
        assert queue.admission.inside == queue.waiting == 0
        return [each for line in requests for each in line]


def share(of: list[Arrival], begin: float = 1.0, end: float = math.inf) -> float:
    """The good ones of those that came in between."""
    found = [each.good for each in of if begin <= each.at < end]
    return sum(found) / len(found)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("level", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("deadline_s", [0.1, 0.3, 2.0])
def test_under_overload_nearly_all_work_is_in_time(workers: int, level: float, deadline_s: float) -> None:
    capacity = workers / SERVICE_S
    asked = Simulation(workers).run(arrivals(level * capacity, 6.0, deadline_s=deadline_s))
    good, late = sum(each.good and each.at >= 1.0 for each in asked), [e for e in asked if e.ended and not e.good]
    assert good >= 0.9 * capacity * 5.0
    assert len(late) <= 0.02 * good


@pytest.mark.parametrize("level", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("service_s", [0.1, 0.14])
def test_with_a_deadline_of_two_or_three_requests_nearly_all_work_is_in_time(level: float, service_s: float) -> None:
    asked, draw = arrivals(level / service_s, 120.0), random.Random(0)
    for each in asked:
        each.service_s = service_s * max(0.5, draw.gauss(1.0, 0.2))
    Simulation().run(asked)
    good, late = sum(each.good for each in asked), sum(each.ended is not None and not each.good for each in asked)
    assert good >= (0.75 if level < 2.0 else 0.8) * 120.0 / service_s
    assert late <= 0.03 * good


def test_below_capacity_nobody_is_refused() -> None:
    assert share(Simulation(2).run(arrivals(0.7 * 2 / SERVICE_S, 5.0)), 0.0) == 1.0


def test_a_caller_that_floods_takes_nothing_from_others() -> None:
    flood, calm = arrivals(4 / SERVICE_S, 5.0, 1, caller="flood"), arrivals(0.2 / SERVICE_S, 5.0, 2, caller="calm")
    hasty = arrivals(0.1 / SERVICE_S, 5.0, 3, caller="hasty", deadline_s=0.1)
    Simulation().run(flood, calm, hasty)
    assert share(calm) >= 0.99
    assert share(hasty) >= 0.8
    assert sum(each.good for each in flood) >= 0.6 * 5.0 / SERVICE_S


def test_callers_that_flood_have_equal_shares() -> None:
    lines = [arrivals((1 + i) / SERVICE_S, 5.0, i, caller=str(i)) for i in range(3)]
    Simulation().run(*lines)
    counts = [sum(each.good for each in line) for line in lines]
    assert max(counts) <= 1.1 * min(counts)


def test_without_deadlines_the_queue_is_bounded_and_those_with_one_are_still_in_time() -> None:
    patient = arrivals(3 / SERVICE_S, 5.0, 1, deadline_s=None)
    hurried = arrivals(0.3 / SERVICE_S, 5.0, 2)
    Simulation(limit=64).run(patient, hurried)
    assert all(each.refused or each.ended is not None for each in patient)
    assert max(each.ended - each.at for each in patient if each.ended) <= 2.2 * 66 * SERVICE_S
    assert share(hurried) >= 0.97


def test_large_images_do_not_keep_out_small_ones() -> None:
    small: list[Arrival] = []
    for seed in range(6):
        large = [Arrival(i * 0.02, cost=HEAVY, deadline_s=None, service_s=0.5) for i in range(100)]
        small += Simulation(workers=2).run(large, arrivals(0.4 / SERVICE_S, 5.0, seed))[len(large) :]
        assert Counter(each.refused for each in large)[True] >= 60  # at most sixteen for each worker wait
    assert share(small, 0.6) >= 0.9


def test_one_pause_of_the_process_is_forgotten_within_a_second() -> None:
    asked = arrivals(0.6 / SERVICE_S, 8.0)
    next(each for each in asked if each.at > 2.0).service_s = 4.0
    Simulation().run(asked)
    assert share(asked, 7.0) == 1.0


def test_after_a_pause_an_idle_queue_refuses_nobody() -> None:
    asked = [Arrival(1.0, service_s=4.0), *(Arrival(6.0 + i * 0.5) for i in range(20))]
    Simulation().run(asked)
    assert all(each.good for each in asked[1:])


def test_after_overload_all_is_as_before_within_a_second() -> None:
    asked = [*arrivals(4 / SERVICE_S, 3.0), *(Arrival(3.0 + i * 2 * SERVICE_S) for i in range(200))]
    Simulation().run(asked)
    assert share(asked, 3.5) == 1.0


def test_a_job_is_not_batched_if_that_makes_it_late_or_with_another_kind() -> None:
    queue: JobQueue[int] = JobQueue(1, 100, 4)
    queue.admission.interval_s = 0.5
    loop = asyncio.new_event_loop()
    lane = ("", True, False)

    def one(jobs: object) -> list[int]:
        raise AssertionError(jobs)

    def other(jobs: object) -> list[int]:
        raise AssertionError(jobs)

    for due, together in ((0.75, one), (60.0, one), (61.0, one), (62.0, other), (63.0, other), (64.0, None)):
        place = Place(queue.admission, lane, 0.0)
        queue.push(Job(int, together, loop.create_future(), 0.0, due, lane, place, NO_COST))
    taken = [[job.due for job in queue.take(0.0, 1 << 40)[0]] for _ in range(4)]
    loop.close()
    assert taken == [[0.75], [60.0, 61.0], [62.0, 63.0], [64.0]]
