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


def test_earliest_deadline_goes_first_and_no_deadline_is_not_starved() -> None:
    async def scenario() -> list[str]:
        pool: WorkerPool[object] = WorkerPool(threads=1, limit=100)
        gate = threading.Event()
        done: list[str] = []
        blocker = pool.submit(gate.wait)
        now = asyncio.get_running_loop().time()
        waiting = [
            pool.submit(functools.partial(done.append, name), deadline)
            for name, deadline in (("late", now + 60), ("undated", None), ("soon", now + 0.2), ("sooner", now + 0.1))
        ]
        gate.set()
        await asyncio.gather(blocker, *waiting)
        pool.close()
        return done

    assert run(scenario) == ["sooner", "soon", "undated", "late"]


def test_jobs_that_can_be_on_time_overtake_late_ones() -> None:
    async def scenario() -> list[str]:
        pool: WorkerPool[object] = WorkerPool(threads=1, limit=100)
        gate = threading.Event()
        done: list[str] = []
        blocker = pool.submit(gate.wait)
        now = asyncio.get_running_loop().time()
        waiting = [
            pool.submit(functools.partial(done.append, name), deadline)
            for name, deadline in (
                ("cannot_meet_target", now - 1),
                ("in time", now + 0.9),
                ("cannot_meet_target too", now - 2),
            )
        ]
        gate.set()
        await asyncio.gather(blocker, *waiting)
        pool.close()
        return done

    first, *rest = run(scenario)
    assert first == "in time"
    assert sorted(rest) == ["cannot_meet_target", "cannot_meet_target too"]


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
        with pytest.raises(Overloaded, match="2 requests are already waiting for 1 workers") as caught:
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


def test_wait_is_predicted_from_queue_and_service_time() -> None:
    async def scenario() -> tuple[float, float]:
        pool: WorkerPool[object] = WorkerPool(threads=1, limit=50)
        pause = threading.Event()
        await pool.submit(lambda: pause.wait(0.02))
        idle = pool.predicted_wait_ms()
        gate = threading.Event()
        jobs = [pool.submit(gate.wait)] + [pool.submit(lambda: None) for _ in range(10)]
        busy = pool.predicted_wait_ms()
        gate.set()
        await asyncio.gather(*jobs)
        pool.close()
        return idle, busy

    idle, busy = run(scenario)
    assert idle == 0.0
    assert busy >= 10 * 20 * 0.9


def test_a_full_queue_sheds_late_jobs_first() -> None:
    async def scenario() -> tuple[list[str], list[Any]]:
        pool: WorkerPool[object] = WorkerPool(threads=1, limit=3)
        gates = [threading.Event(), threading.Event()]
        busy = [threading.Event(), threading.Event()]
        done: list[str] = []

        def block(i: int) -> bool:
            busy[i].set()
            return gates[i].wait()

        blockers = [pool.submit(functools.partial(block, 0))]
        await asyncio.to_thread(busy[0].wait)
        now = asyncio.get_running_loop().time()
        late = [pool.submit(functools.partial(done.append, name), now - 1) for name in ("late", "late too")]
        blockers.append(pool.submit(functools.partial(block, 1), now + 60))
        gates[0].set()
        await asyncio.to_thread(busy[1].wait)  # the worker went past the late ones
        fresh = [pool.submit(functools.partial(done.append, name), now + 60) for name in ("a", "b", "c")]
        with pytest.raises(Overloaded):
            pool.submit(functools.partial(done.append, "d"), now + 60)
        gates[1].set()
        await asyncio.gather(*blockers, *fresh)
        outcomes = await asyncio.gather(*late, return_exceptions=True)
        pool.close()
        return done, outcomes

    done, outcomes = run(scenario)
    assert done == ["a", "b", "c"]
    assert [type(outcome) for outcome in outcomes] == [Overloaded, Overloaded]


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
    assert batches.ran[0] == [10, 12, 13]


def test_a_job_is_not_batched_if_that_makes_it_late_or_with_another_kind() -> None:
    batches, others = Batches(), Batches()

    async def scenario() -> list[Any]:
        pool: WorkerPool[Any] = WorkerPool(threads=1, limit=100)
        pause = threading.Event()
        await pool.submit(lambda: pause.wait(0.5))  # what a job takes, as far as the pool knows
        # Less than two jobs take, also if what the gate's took (nothing) has been heard of by then.
        soon = asyncio.get_running_loop().time() + 0.75
        return await behind_a_gate(
            pool,
            lambda: [
                pool.submit(batches.job(1), soon, batches.together),
                pool.submit(batches.job(2), soon + 60, batches.together),
                pool.submit(others.job(3), soon + 61, others.together),
                pool.submit(lambda: 0, soon + 62),
            ],
        )

    assert run(scenario) == [2, 4, 6, 0]
    assert (batches.ran, others.ran) == ([[1], [2]], [[3]])


def test_workers_share_the_waiting_jobs() -> None:
    assert [batch_size(waiting) for waiting in (1, 2, 3, 4, 6, 8, 200)] == [1, 2, 2, 2, 3, 4, MAX_BATCH]
