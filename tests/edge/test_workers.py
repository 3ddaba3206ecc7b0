"""The worker pool: order, bounds, errors, shutdown."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from edge.workers import WorkerPool
from hawkvision.errors import BadImage, NotReady, Overloaded

T = TypeVar("T")


def run(scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(scenario())


def test_results_come_back_to_the_one_who_asked() -> None:
    async def scenario() -> list[int]:
        pool: WorkerPool[int] = WorkerPool(threads=3, limit=100)
        futures = [pool.submit(functools.partial(pow, i, 2)) for i in range(50)]
        results = [value for value, _ in await asyncio.gather(*futures)]
        pool.close()
        return results

    assert run(scenario) == [i * i for i in range(50)]


def test_earliest_deadline_goes_first_and_no_deadline_is_not_starved() -> None:
    async def scenario() -> list[str]:
        pool: WorkerPool[object] = WorkerPool(threads=1, limit=100)
        gate = threading.Event()
        done: list[str] = []
        blocker = pool.submit(gate.wait)
        now = asyncio.get_running_loop().time()
        waiting = [
            pool.submit(functools.partial(done.append, name), deadline)
            for name, deadline in (("late", now + 60), ("patient", None), ("soon", now + 0.2), ("sooner", now + 0.1))
        ]
        gate.set()
        await asyncio.gather(blocker, *waiting)
        pool.close()
        return done

    assert run(scenario) == ["sooner", "soon", "patient", "late"]


def test_what_can_no_longer_be_in_time_lets_pass_what_can() -> None:
    async def scenario() -> list[str]:
        pool: WorkerPool[object] = WorkerPool(threads=1, limit=100)
        gate = threading.Event()
        done: list[str] = []
        blocker = pool.submit(gate.wait)
        now = asyncio.get_running_loop().time()
        waiting = [
            pool.submit(functools.partial(done.append, name), deadline)
            for name, deadline in (("hopeless", now - 1), ("in time", now + 0.9), ("hopeless too", now - 2))
        ]
        gate.set()
        await asyncio.gather(blocker, *waiting)
        pool.close()
        return done

    first, *rest = run(scenario)
    assert first == "in time"
    assert sorted(rest) == ["hopeless", "hopeless too"]


def test_full_queue_sheds_and_says_when_to_come_back() -> None:
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
            raise BadImage("not a picture")

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


def test_closing_finishes_what_was_accepted_and_takes_no_more() -> None:
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


def test_a_full_queue_sheds_first_who_is_late_already() -> None:
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
