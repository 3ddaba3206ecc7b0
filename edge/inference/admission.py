"""Admission control: bounds the memory and time of images, estimated from their headers before decoding.

    header ─ DecodingScales.cost ─┬─ too many pixels, or more memory than one request may have ──► 413
                                  ├─ heavy ─ admit ─┬─ more work than a request may bring ───────► 413
                                  │                 ├─ cannot be decoded before its deadline ────► 504
                                  │                 └─ more work than waits at most ─────────────► 429
                                  └─ worker pool: starts when its bytes are free (`edge.inference.worker_pool`)

A request is admitted as a whole, with all of its images. They enter the queue in turns (`Turns`): images of other
requests go between them, and two heavy images of one request are never decoded at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hawkvision.core.errors import DeadlineMissed, Overloaded, TooLarge
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import OnMiss
from hawkvision.imaging.decoding_cost import DecodingCost, DecodingRates, DecodingScales, cost_of
from hawkvision.imaging.image_header import Encoded, ImageHeader
from hawkvision.system.memory import MemoryBudget, MemoryParts

Refusal: TypeAlias = Literal["pixels", "memory", "request_work", "waiting_work", "deadline"]
"""Why an image was refused: too many pixels; more memory than a request may have; more work than a request may bring;
more work than may wait; no time to decode it."""
LIGHT_TURNS: Final = 2
"""Light images of one request in the queue at once, for each worker: one runs, and one is ready."""


class WorkFull(Overloaded):
    """The expected time of all waiting and running images reached its bound."""


@dataclass(slots=True)
class Admitted:
    """A request's share of the waiting work."""

    left_s: float


class Admission:
    """Estimates the cost of images, and bounds the total of those admitted. Used on one event loop."""

    def __init__(
        self,
        task: str,
        scales: DecodingScales,
        rates: DecodingRates,
        metrics: EdgeMetrics,
        workers: int,
        limit_s: float,
    ) -> None:
        """Prepare; memory is unbounded until `divide`.

        Args:
            task: for metrics.
            scales: of the node's models.
            rates: of decoding, learned while it runs.
            metrics: where to count.
            workers: number of workers that decode.
            limit_s: largest expected work for each worker, in seconds.
        """
        self.rates = rates
        self.memory = MemoryBudget()
        """For decoding."""
        self.parts: MemoryParts | None = None
        self._scales = scales
        self._workers = workers
        self._limit_s = limit_s
        self._work_s = 0.0
        self._inside = 0
        """Requests with heavy images."""
        self._task = task
        self._metrics = metrics
        self._refused = metrics.refused_costs
        metrics.decoding_bytes.labels(task).set_function(lambda: self.memory.in_use)
        metrics.decoding_peak_bytes.labels(task).set_function(lambda: self.memory.peak)
        metrics.decoding_work.labels(task).set_function(lambda: self._work_s)

    def divide(self, parts: MemoryParts) -> None:
        """Set the memory budget."""
        self.parts = parts
        self.memory.limit = parts.decoding
        for part in ("total", "bodies", "decoding", "request"):
            self._metrics.memory_budget.labels(self._task, part).set(getattr(parts, part))

    def cost(self, body: Encoded, header: ImageHeader) -> DecodingCost:
        """The cost of decoding an image at the edge.

        Raises:
            TooLarge: for too many pixels, or more bytes than one request may have.
        """
        try:
            cost = self._scales.cost(body, header)
        except TooLarge:
            self._refuse("pixels")
            raise
        self.check_memory(cost.bytes, header)
        return cost

    def check_memory(self, size: int, header: ImageHeader) -> None:
        """Refuse an image that can never be decoded.

        Raises:
            TooLarge: if it is more than one request may have.
        """
        if self.parts is not None and size > self.parts.request:
            self._refuse("memory")
            raise TooLarge(
                f"to decode the image of {header.width}x{header.height} pixels takes up to {size} bytes of memory; "
                f"one request may have {self.parts.request}"
            )

    @asynccontextmanager
    async def beside(self, body: Encoded, header: ImageHeader, min_side: int, until: float) -> AsyncGenerator[None]:
        """Hold the memory to decode an image outside the worker pool; waits until it is free.

        Args:
            body: the image.
            header: of it.
            min_side: see `decode`.
            until: on the loop's clock; the image must be decoded by then.

        Raises:
            DeadlineMissed: if it cannot be decoded by then.
            Overloaded: if there is never so much memory, or too many wait for it.
        """
        cost = cost_of(body, header, [min_side], self.rates)
        async with self.memory.held(cost.bytes, until):
            if cost.heavy and asyncio.get_running_loop().time() + cost.heavy_s > until:
                self.count_late()
                raise DeadlineMissed(f"to decode it takes about {cost.heavy_s * 1e3:.0f} ms, longer than is left")
            yield

    @contextmanager
    def admit(self, costs: Sequence[DecodingCost]) -> Iterator[Admitted | None]:
        """Admit a request with all of its images while the block runs; gives None if no image is heavy.

        Raises:
            TooLarge: if they bring more work than one request may.
            Overloaded: if it exceeds the bound together with the work admitted before; says when that is likely done.
        """
        work_s = sum(cost.heavy_s for cost in costs)
        if not work_s:
            yield None
            return
        if (alone_s := sum(map(self.rates.alone, costs))) > self._limit_s:
            self._refuse("request_work")
            raise TooLarge(
                f"to decode the request's {len(costs)} image(s) takes about {alone_s:.1f} s of processor time; "
                f"one request may take {self._limit_s:g} s"
            )
        if self._inside and self._work_s + work_s > self._limit_s * self._workers:
            self._refuse("waiting_work")
            wait_s = max(1.0, math.ceil(self._work_s / self._workers))
            raise WorkFull(f"images that take about {self._work_s:.1f} s to decode are waiting already", wait_s)
        self._work_s += work_s
        self._inside += 1
        admitted = Admitted(work_s)
        try:
            yield admitted
        finally:
            self.decoded(admitted, admitted.left_s)
            self._inside -= 1
            if not self._inside:
                self._work_s = 0.0  # clear rounding errors

    def decoded(self, admitted: Admitted, heavy_s: float) -> None:
        """Record that so much of a request's work is done."""
        done_s = min(heavy_s, admitted.left_s)
        admitted.left_s -= done_s
        self._work_s = max(0.0, self._work_s - done_s)

    def check_time(self, heavy_s: float, left_ms: float | None, on_miss: OnMiss) -> None:
        """Refuse images that cannot be decoded in time, unless the caller waits for late answers.

        Raises:
            DeadlineMissed: if they cannot.
        """
        if left_ms is not None and heavy_s * 1e3 > max(0.0, left_ms) and on_miss is not OnMiss.WAIT:
            self.count_late()
            raise DeadlineMissed(
                f"not started: to decode it takes about {heavy_s * 1e3:.0f} ms, "
                f"and {max(0.0, left_ms):.0f} ms are left before the deadline"
            )

    def count_late(self) -> None:
        """Count an image that was not decoded because it would have been late."""
        self._refuse("deadline")

    def _refuse(self, reason: Refusal) -> None:
        self._refused.labels(self._task, reason).inc()


class Turns:
    """One request's places in the queue: one for a heavy image, and some for light ones."""

    def __init__(self, workers: int, admitted: Admitted | None) -> None:
        self.admitted = admitted
        """The request's share of the waiting work."""
        self._heavy = asyncio.Semaphore(1)
        self._light = asyncio.Semaphore(LIGHT_TURNS * workers)

    def of(self, cost: DecodingCost) -> asyncio.Semaphore:
        """The place to hold while an image waits or is decoded."""
        return self._heavy if cost.heavy else self._light
