from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine

import pytest

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed
from hawkvision.datacenter.execution.batching import Batcher
from tests.clocks import ManualClock


def in_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Run an asynchronous test in a loop of its own."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class Model:
    """Doubles numbers; holds every batch until `gate` opens, and keeps the batches it was given."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.busy = asyncio.Event()

    async def infer(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.busy.set()
        await self.gate.wait()
        if -1 in items:
            raise ValueError("minus one")
        return [2 * i for i in items]


def batcher(model: Model, clock: ManualClock | None = None) -> Batcher[int, int]:
    return Batcher(model.infer, max_size=3, clock=clock or ManualClock())


async def behind_a_busy_model(model: Model, b: Batcher[int, int], items: list[int]) -> list[asyncio.Task[int]]:
    """Items submitted while the model works on a first one, 0."""

    async def one(item: int) -> int:
        return (await b.submit(item, None)).result

    tasks = [asyncio.create_task(one(0))]
    await model.busy.wait()
    tasks += [asyncio.create_task(one(i)) for i in items]
    await asyncio.sleep(0)
    return tasks


@in_loop
async def test_batches_form_while_the_model_is_busy() -> None:
    model = Model()
    tasks = await behind_a_busy_model(model, batcher(model), [1, 2, 3, 4])
    model.gate.set()
    assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8]
    assert model.batches == [[0], [1, 2, 3], [4]]


@in_loop
async def test_cancelled_request_takes_no_place() -> None:
    model = Model()
    tasks = await behind_a_busy_model(model, batcher(model), [1, 2, 3, 4])
    tasks[2].cancel()
    await asyncio.sleep(0)
    model.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert model.batches == [[0], [1, 3, 4]]


@in_loop
async def test_expired_request_takes_no_place() -> None:
    model, clock = Model(), ManualClock()
    b = batcher(model, clock)
    first = (await behind_a_busy_model(model, b, []))[0]
    late, live = asyncio.create_task(b.submit(1, Deadline(5.0))), asyncio.create_task(b.submit(2, Deadline(50.0)))
    await asyncio.sleep(0)
    clock.advance(5.0)
    model.gate.set()
    await asyncio.gather(first, live)
    with pytest.raises(DeadlineMissed):
        await late
    assert model.batches == [[0], [2]]


@in_loop
async def test_failed_batch_fails_its_callers_and_no_others() -> None:
    model = Model()
    tasks = await behind_a_busy_model(model, batcher(model), [1, -1, 2, 3])
    model.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(r, ValueError) for r in results] == [False, True, True, True, False]


@in_loop
async def test_result_tells_wait_and_batch_size() -> None:
    model, clock = Model(), ManualClock()
    b = batcher(model, clock)
    first = (await behind_a_busy_model(model, b, []))[0]
    second = asyncio.create_task(b.submit(1, None))
    await asyncio.sleep(0)
    clock.advance(0.25)
    model.gate.set()
    await first
    done = await second
    assert (done.queue_ms, done.batch_size) == (250.0, 1)


@in_loop
async def test_a_stopped_batcher_ends_the_running_batch_before_it_reports_and_starts_no_other() -> None:
    model = Model()
    b = batcher(model)
    tasks = await behind_a_busy_model(model, b, [1])
    ended = asyncio.Event()
    b.stop(ended.set)
    await asyncio.sleep(0)
    assert not ended.is_set()
    model.gate.set()
    assert await tasks[0] == 0
    await asyncio.wait_for(ended.wait(), 60.0)
    assert model.batches == [[0]]
    tasks[1].cancel()


@in_loop
async def test_an_idle_batcher_stops_at_once() -> None:
    model, ended = Model(), asyncio.Event()
    model.gate.set()
    b = batcher(model)
    assert (await b.submit(1, None)).result == 2
    b.stop(ended.set)
    await asyncio.wait_for(ended.wait(), 60.0)
