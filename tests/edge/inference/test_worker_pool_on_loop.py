"""The worker pool on the event loop: order, jobs that it leaves to threads, and shutdown."""

import asyncio
import functools
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
import uvloop

from edge.inference.worker_pool import MAX_ON_LOOP_S, WorkerPool
from hawkvision.core.errors import BadImage, NotReady
from tests.edge.batches import Batches
from tests.edge.bench import run


def here(allowed: Callable[[], bool] = lambda: True, cores: int = 1) -> WorkerPool[Any]:
    """A pool whose loop runs jobs itself while it is allowed to."""
    return WorkerPool(cores, 100, lambda _: allowed(), cores)


def on_the_loop() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_the_loop_runs_jobs_in_order_and_delivers_each_before_the_next() -> None:
    async def scenario() -> list[str]:
        pool, said = here(), list[str]()

        def job(name: str) -> str:
            said.append(f"{name} ran" if on_the_loop() else "on a thread")
            return name

        async def ask(name: str, deadline: float) -> None:
            said.append(f"{(await pool.submit(functools.partial(job, name), deadline))[0]} heard")

        now = asyncio.get_running_loop().time()
        await asyncio.gather(ask("late", now + 60), ask("soon", now + 30), ask("intermediate", now + 45))
        pool.close()
        return said

    assert run(scenario) == [
        "soon ran",
        "soon heard",
        "intermediate ran",
        "intermediate heard",
        "late ran",
        "late heard",
    ]


def test_jobs_that_arrive_while_the_loop_runs_one_form_the_next_batch() -> None:
    batches = Batches()

    async def scenario() -> list[Any]:
        pool = here()
        futures = [pool.submit(batches.job(i), None, batches.together) for i in range(9)]
        outcomes = await asyncio.gather(*futures)
        pool.close()
        return [outcome for outcome, _ in outcomes]

    assert run(scenario) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert batches.ran == [[0, 1, 2, 3], [4, 5], [6, 7], [8]]


def test_jobs_that_arrived_while_the_loop_ran_one_are_queued_before_the_next() -> None:
    running, sent, order = threading.Event(), threading.Event(), list[str]()

    def call(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(b"blocks")
            assert running.wait(30)
            connection.sendall(b"urgent")
            sent.set()
            assert connection.recv(1) == b"."

    def block() -> None:
        running.set()
        assert sent.wait(30)

    async def scenario() -> None:
        pool, soon = here(), asyncio.get_running_loop().time() + 100.0
        waiting: list[asyncio.Future[Any]] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(6)
            blocks = pool.submit(block, soon)
            waiting.append(pool.submit(lambda: order.append("later"), soon + 2))
            urgent = (await reader.readexactly(6)).decode()
            await pool.submit(lambda: order.append(urgent), soon + 1)
            await blocks
            writer.write(b".")

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await asyncio.to_thread(call, server.sockets[0].getsockname()[1])
            await asyncio.gather(*waiting)
        pool.close()

    uvloop.run(scenario())
    assert order == ["urgent", "later"]


def test_the_thread_runs_jobs_that_the_loop_may_not_and_the_loop_the_next() -> None:
    async def scenario() -> list[bool]:
        allowed = [False]
        pool, begun, gate = here(lambda: allowed[0]), threading.Event(), threading.Event()

        def waiting() -> bool:
            begun.set()
            assert gate.wait(30)
            return on_the_loop()

        first, second = pool.submit(waiting), pool.submit(on_the_loop)
        assert await asyncio.to_thread(begun.wait, 30)
        allowed[0] = True
        gate.set()
        ran_here = [(await first)[0], (await second)[0]]
        pool.close()
        return ran_here

    assert run(scenario) == [False, True]


def test_the_loop_leaves_long_jobs_to_the_thread() -> None:
    async def scenario() -> list[bool]:
        pool = here()
        await pool.submit(lambda: threading.Event().wait(2 * MAX_ON_LOOP_S))
        ran_here = [(await pool.submit(on_the_loop))[0] for _ in range(20)]
        pool.close()
        return ran_here

    ran_here = run(scenario)
    assert (ran_here[0], ran_here[-1]) == (False, True)


def test_the_loop_leaves_long_batches_to_the_thread() -> None:
    places: list[bool] = []

    def together(jobs: Sequence[Any]) -> list[int | Exception]:
        places.append(on_the_loop())
        return [0 for _ in jobs]

    async def scenario() -> None:
        pool = here()
        pause = threading.Event()
        await pool.submit(lambda: pause.wait(0.4 * MAX_ON_LOOP_S))  # as long as each takes, as far as the pool knows
        await asyncio.gather(*(pool.submit(lambda: 0, None, together) for _ in range(9)))
        pool.close()

    run(scenario)
    assert places[0] is False


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("allowed", [True, False])
def test_closing_a_pool_that_uses_the_loop_finishes_accepted_jobs(allowed: bool, cores: int) -> None:
    async def scenario() -> list[int]:
        pool = here(lambda: allowed, cores)
        futures = [pool.submit(functools.partial(pow, i, 2)) for i in range(50)]
        await asyncio.to_thread(pool.close)
        with pytest.raises(NotReady):
            pool.submit(lambda: 0)
        return [value for value, _ in await asyncio.gather(*futures)]

    assert run(scenario) == [i * i for i in range(50)]


def test_an_error_on_the_loop_reaches_only_its_own_request() -> None:
    async def scenario() -> list[Any]:
        pool = here()

        def broken() -> None:
            raise BadImage("broken")

        futures = [pool.submit(lambda: 1), pool.submit(broken), pool.submit(lambda: 2), pool.submit(lambda: 3)]
        futures[2].cancel()
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        pool.close()
        return [type(outcome) for outcome in outcomes]

    assert run(scenario) == [tuple, BadImage, asyncio.CancelledError, tuple]


async def alone_on_the_loop(pool: WorkerPool[Any]) -> bool:
    """Whether the loop runs at least one of a thousand jobs, at a few hundred jobs a second."""
    for _ in range(1000):
        await asyncio.sleep(0.003)  # the gap that the pool is to see
        if (await pool.submit(on_the_loop))[0]:
            return True
    return False


@asynccontextmanager
async def running_what_comes_alone(allowed: Callable[[], bool] = lambda: True) -> AsyncIterator[WorkerPool[Any]]:
    """A pool on two cores; before the block and again after it, its loop runs what comes alone."""
    with closing(here(allowed, cores=2)) as pool:
        assert await alone_on_the_loop(pool)
        yield pool
        assert await alone_on_the_loop(pool)


def test_with_several_cores_the_loop_runs_lone_jobs_and_threads_the_others() -> None:
    both = threading.Barrier(2)

    def meet() -> bool:
        both.wait(30)  # which nobody does whose companion waits for the loop
        return on_the_loop()

    async def scenario() -> list[bool]:
        ran_here: list[bool] = []
        async with running_what_comes_alone() as pool:
            for _ in range(20):
                ran_here += [ran for ran, _ in await asyncio.gather(pool.submit(meet), pool.submit(meet))]
        return ran_here

    assert not any(run(scenario))


def test_with_several_cores_threads_run_jobs_that_the_loop_may_not() -> None:
    async def scenario() -> list[bool]:
        allowed = True
        async with running_what_comes_alone(lambda: allowed) as pool:
            allowed = False
            ran_here = [(await pool.submit(on_the_loop))[0] for _ in range(20)]
            allowed = True
        return ran_here

    assert not any(run(scenario))


def test_with_several_cores_threads_run_jobs_that_would_delay_the_next() -> None:
    def long() -> bool:
        threading.Event().wait(0.02)  # more than an eighth of the longest gap that counts
        return on_the_loop()

    async def scenario() -> list[bool]:
        pool = here(cores=2)
        seen = [(await pool.submit(long))[0] for _ in range(12)]
        pool.close()
        return seen

    assert not any(run(scenario)[1:])
