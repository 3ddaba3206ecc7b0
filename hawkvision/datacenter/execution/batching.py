"""Dynamic batching: the requests that wait when the model becomes free are the next batch.

A batch closes when its inference starts, not by a timer as Ray Serve's `@serve.batch`. So a lone request does not
wait, batches grow with the load, and a request that was cancelled or expired while it waited takes no place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hawkvision.core.clock import Clock, Deadline
from hawkvision.core.errors import DeadlineMissed

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class BatchedResult(Generic[ResultT]):
    """A result, the time waited for the model and spent in it, and the size of the batch."""

    result: ResultT
    queue_ms: float
    infer_ms: float
    batch_size: int


@dataclass(slots=True)
class _Waiting(Generic[ItemT, ResultT]):
    item: ItemT
    deadline: Deadline | None
    arrived_at: float
    done: asyncio.Future[BatchedResult[ResultT]] = field(default_factory=asyncio.Future)


class Batcher(Generic[ItemT, ResultT]):
    """Runs items through `infer` in batches of at most `max_size`, one batch at a time, first come, first served.

    The caller bounds the queue: a replica admits `max_ongoing_requests` at once.
    """

    def __init__(
        self,
        infer: Callable[[list[ItemT]], Awaitable[list[ResultT]]],
        *,
        max_size: int,
        clock: Clock,
    ) -> None:
        self._infer = infer
        self._max_size = max_size
        self._clock = clock
        self._waiting: deque[_Waiting[ItemT, ResultT]] = deque()
        self._arrived = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._stopped = False

    async def submit(self, item: ItemT, deadline: Deadline | None) -> BatchedResult[ResultT]:
        """The item's result; cancellation takes the item out of the queue.

        Raises:
            DeadlineMissed: if the deadline passes before inference begins.
            Exception: as `infer` raised for the whole batch.
        """
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        waiting: _Waiting[ItemT, ResultT] = _Waiting(item, deadline, self._clock.now())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.done

    def stop(self, then: Callable[[], None]) -> None:
        """Run no further batch, and call `then` once none runs. Items that wait are not answered."""
        self._stopped = True
        if self._runner is None or self._runner.done():
            then()
            return
        self._arrived.set()
        self._runner.add_done_callback(lambda _: then())

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            if self._stopped:
                return
            batch = self._take()
            if batch:
                await self._infer_batch(batch)

    def _take(self) -> list[_Waiting[ItemT, ResultT]]:
        """The next batch: live requests in order of arrival."""
        batch: list[_Waiting[ItemT, ResultT]] = []
        now = self._clock.now()
        while self._waiting and len(batch) < self._max_size:
            waiting = self._waiting.popleft()
            if waiting.done.done():
                continue
            if waiting.deadline is not None and waiting.deadline.passed(now):
                waiting.done.set_exception(DeadlineMissed("the deadline passed before inference began"))
                continue
            batch.append(waiting)
        if not self._waiting and not self._stopped:
            self._arrived.clear()
        return batch

    async def _infer_batch(self, batch: list[_Waiting[ItemT, ResultT]]) -> None:
        started = self._clock.now()
        try:
            results = await self._infer([w.item for w in batch])
        except Exception as error:  # noqa: BLE001  each caller of the batch gets it; the loop must continue
            for waiting in batch:
                if not waiting.done.done():
                    waiting.done.set_exception(error)
            return
        infer_ms = (self._clock.now() - started) * 1e3
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.done.done():
                queue_ms = (started - waiting.arrived_at) * 1e3
                waiting.done.set_result(BatchedResult(result, queue_ms, infer_ms, len(batch)))
