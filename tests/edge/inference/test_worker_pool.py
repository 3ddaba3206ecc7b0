"""The worker pool: order, bounds, errors, batches and shutdown on threads."""

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from edge.inference.job_queue import MAX_BATCH, batch_size
from edge.inference.worker_pool import WorkerPool
from hawkvision.core.errors import BadImage, NotReady, Overloaded
from tests.edge.batches import Batches
from tests.edge.bench import run


def test_each_job_gets_its_own_result() -> None:
    async def scenario() -> list[int]:
        pool: WorkerPool[int] = WorkerPool(threads=3, limit=100)
        futures = [pool.submit(functools.partial(pow, i, 2)) for i in range(50)]
        results = [value for value, _ in await asyncio.gather(*futures)]
        pool.close()
        return results

    assert run(scenario) == [i * i for i in range(50)]


def test_a_job_is_alone_until_another_waits_or_runs() -> None:
    async def scenario() -> list[bool]:
        pool: WorkerPool[bool] = WorkerPool(threads=2, limit=100)
        gates = [threading.Event() for _ in range(2)]
        begun = [threading.Event() for _ in range(2)]

        def job(number: int) -> bool:
            begun[number].set()
            assert gates[number].wait(30)
            return pool.alone()

        first = pool.submit(functools.partial(job, 0))
        await asyncio.to_thread(begun[0].wait)
        alone = [pool.alone()]
        second = pool.submit(functools.partial(job, 1))
        await asyncio.to_thread(begun[1].wait)
        alone.append(pool.alone())
        waiting = pool.submit(pool.alone)
        gates[0].set()
        await first
        alone += [(await first)[0], (await waiting)[0]]
        gates[1].set()
        alone.append((await second)[0])
        pool.close()
        return alone

    assert run(scenario) == [True, False, False, False, True]


def test_a_full_queue_sheds_and_says_when_to_retry() -> None:
    async def scenario() -> Overloaded:
        pool: WorkerPool[object] = WorkerPool(threads=1, limit=2)
        gate, started = threading.Event(), threading.Event()

        def block() -> bool:
            started.set()
            return gate.wait()

        blocker = pool.submit(block)
        await asyncio.to_thread(started.wait)
        waiting = [pool.submit(lambda: None) for _ in range(2)]
        with pytest.raises(Overloaded, match="3 requests are already waiting or under way") as caught:
            pool.submit(lambda: None)
        gate.set()
        await asyncio.gather(blocker, *waiting)
        await pool.submit(lambda: None)
        pool.close()
        return caught.value

    error = run(scenario)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s >= 1


def test_an_error_reaches_only_its_own_request() -> None:
    async def scenario() -> list[Any]:
        pool: WorkerPool[str] = WorkerPool(threads=2, limit=10)

        def broken() -> str:
            raise BadImage("not an image")

        results: list[Any] = list(
            await asyncio.gather(pool.submit(broken), pool.submit(lambda: "fine"), return_exceptions=True)
        )
        pool.close()
        return results

    failed, fine = run(scenario)
    assert isinstance(failed, BadImage)
    assert fine[0] == "fine"


def test_a_cancelled_request_is_never_run() -> None:
    async def scenario() -> list[str]:
        pool: WorkerPool[object] = WorkerPool(threads=1, limit=10)
        gate = threading.Event()
        ran: list[str] = []
        blocker = pool.submit(gate.wait)
        unwanted = pool.submit(lambda: ran.append("unwanted"))
        wanted = pool.submit(lambda: ran.append("wanted"))
        unwanted.cancel()
        gate.set()
        await asyncio.gather(blocker, wanted)
        pool.close()
        return ran

    assert run(scenario) == ["wanted"]


def test_closing_finishes_accepted_jobs_and_refuses_new_ones() -> None:
    async def scenario() -> tuple[int, bool]:
        pool: WorkerPool[int] = WorkerPool(threads=2, limit=50)
        futures = [pool.submit(functools.partial(pow, i, 1)) for i in range(20)]
        await asyncio.to_thread(pool.close)
        results = await asyncio.gather(*futures)
        with pytest.raises(NotReady):
            pool.submit(lambda: 1)
        return len(results), any(t.name.startswith("hawkvision-worker") for t in threading.enumerate())

    assert run(scenario) == (20, False)


async def behind_a_gate(pool: WorkerPool[Any], queue: Callable[[], list[asyncio.Future[Any]]]) -> list[Any]:
    """What came of jobs that all waited for the only worker, which nothing else waits for."""
    gate, busy = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        gate.wait()

    blocker = pool.submit(block)
    await asyncio.to_thread(busy.wait)
    futures = queue()
    gate.set()
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    await blocker
    pool.close()
    return [outcome if isinstance(outcome, BaseException) else outcome[0] for outcome in outcomes]


def test_waiting_jobs_run_in_one_batch_in_order_and_each_gets_its_own_result() -> None:
    batches = Batches()

    async def scenario() -> list[Any]:
        pool: WorkerPool[Any] = WorkerPool(threads=1, limit=100)
        return await behind_a_gate(
            pool, lambda: [pool.submit(batches.job(i), None, batches.together) for i in range(9)]
        )

    assert run(scenario) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert batches.ran == [[0, 1, 2, 3], [4, 5], [6, 7], [8]]


def test_with_a_batch_of_one_jobs_run_singly() -> None:
    batches = Batches()

    async def scenario() -> list[Any]:
        pool: WorkerPool[Any] = WorkerPool(threads=1, limit=100, max_batch=1)
        return await behind_a_gate(
            pool, lambda: [pool.submit(batches.job(i), None, batches.together) for i in range(9)]
        )

    assert run(scenario) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert batches.ran == [[i] for i in range(9)]


def test_in_a_batch_an_error_stays_with_its_job_and_a_cancelled_job_does_not_run() -> None:
    batches = Batches()

    async def scenario() -> list[Any]:
        pool: WorkerPool[Any] = WorkerPool(threads=1, limit=100)

        def queue() -> list[asyncio.Future[Any]]:
            futures = [pool.submit(batches.job(i), None, batches.together) for i in range(10, 18)]
            futures[1].cancel()
            return futures

        return await behind_a_gate(pool, queue)

    outcomes = run(scenario)
    assert [type(outcome) for outcome in outcomes[:4]] == [int, asyncio.CancelledError, int, BadImage]
    assert batches.ran[0] == [10, 12, 13, 14]


def test_workers_share_the_waiting_jobs() -> None:
    assert [batch_size(waiting) for waiting in (1, 2, 3, 4, 6, 8, 200)] == [1, 2, 2, 2, 3, 4, MAX_BATCH]
