"""Dynamic batching: whatever waits when the model becomes free is the next batch.

Ray Serve's own `@serve.batch` closes a batch by a timer, before the model is free: with a wait of 2 ms every lone
request pays 2 ms, and with a wait of 0 batches of one pile up behind the running one. Here the batch closes at the
moment inference starts, so a lone request waits for nobody, load makes batches grow by itself, and requests that were
cancelled or expired while waiting are dropped at the last possible moment and take no place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hawkvision.core.clock import Clock
from hawkvision.core.errors import DeadlineMissed

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Batched(Generic[ResultT]):
    """A result with what its caller may want to know: time waited for the model, time in it, size of the batch."""

    result: ResultT
    queue_ms: float
    infer_ms: float
    batch_size: int


@dataclass(slots=True)
class _Waiting(Generic[ItemT, ResultT]):
    item: ItemT
    expires_at: float
    arrived_at: float
    done: asyncio.Future[Batched[ResultT]] = field(default_factory=asyncio.Future)


class Batcher(Generic[ItemT, ResultT]):
    """Runs items through `infer` in batches of at most `max_size`, one batch at a time, first come first served.

    The queue's bound is the caller's: a replica admits `max_ongoing_requests` at once, so no more can wait here.
    `wait_s` is how long a batch that is not full may wait for company once the model is free.
    """

    def __init__(
        self,
        infer: Callable[[list[ItemT]], Awaitable[list[ResultT]]],
        *,
        max_size: int,
        wait_s: float,
        clock: Clock,
    ) -> None:
        self._infer = infer
        self._max_size = max_size
        self._wait_s = wait_s
        self._clock = clock
        self._waiting: deque[_Waiting[ItemT, ResultT]] = deque()
        self._arrived = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def submit(self, item: ItemT, expires_at: float) -> Batched[ResultT]:
        """The item's result; cancelling the caller takes the item out of the queue.

        Raises:
            DeadlineMissed: if the clock passed `expires_at` before inference began.
            Exception: whatever `infer` raised for the whole batch.
        """
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        waiting: _Waiting[ItemT, ResultT] = _Waiting(item, expires_at, self._clock.now())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.done

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            if self._wait_s > 0.0 and len(self._waiting) < self._max_size:
                await asyncio.sleep(self._wait_s)
            batch = self._take()
            if batch:
                await self._infer_batch(batch)

    def _take(self) -> list[_Waiting[ItemT, ResultT]]:
        """The next batch: live requests only, in order of arrival."""
        batch: list[_Waiting[ItemT, ResultT]] = []
        now = self._clock.now()
        while self._waiting and len(batch) < self._max_size:
            waiting = self._waiting.popleft()
            if waiting.done.done():
                continue
            if now >= waiting.expires_at:
                waiting.done.set_exception(DeadlineMissed("the deadline passed before inference began"))
                continue
            batch.append(waiting)
        if not self._waiting:
            self._arrived.clear()
        return batch

    async def _infer_batch(self, batch: list[_Waiting[ItemT, ResultT]]) -> None:
        started = self._clock.now()
        try:
            results = await self._infer([w.item for w in batch])
        except Exception as error:  # noqa: BLE001  each caller of the batch gets it; the loop must live on
            for waiting in batch:
                if not waiting.done.done():
                    waiting.done.set_exception(error)
            return
        infer_ms = (self._clock.now() - started) * 1e3
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.done.done():
                queue_ms = (started - waiting.arrived_at) * 1e3
                waiting.done.set_result(Batched(result, queue_ms, infer_ms, len(batch)))
