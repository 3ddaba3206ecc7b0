"""The pixels and the memory that images may take: bounded by their headers, before anything is decoded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from hawkvision.core.errors import TooLarge
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.imaging.decoding_cost import DecodingCost, DecodingScales, check_memory, cost_of
from hawkvision.imaging.image_header import Encoded, ImageHeader
from hawkvision.system.memory import MemoryBudget, MemoryParts


class DecodingLimits:
    """The limits of one task. Used on one event loop; its memory on any thread."""

    def __init__(self, task: str, scales: DecodingScales, metrics: EdgeMetrics) -> None:
        """Prepare; memory is unbounded until `divide`.

        Args:
            task: for metrics.
            scales: of the node's models.
            metrics: where to count.
        """
        self.memory = MemoryBudget()
        """For decoding."""
        self.parts: MemoryParts | None = None
        self._scales = scales
        self._task = task
        self._metrics = metrics
        metrics.decoding_bytes.labels(task).set_function(lambda: self.memory.in_use)
        metrics.decoding_peak_bytes.labels(task).set_function(lambda: self.memory.peak)

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
            if self.parts is not None:
                check_memory(cost, header, self.parts.request)
        except TooLarge:
            self._metrics.refused_costs.labels(self._task).inc()
            raise
        return cost

    @asynccontextmanager
    async def beside(self, body: Encoded, header: ImageHeader, min_side: int, until: float) -> AsyncGenerator[None]:
        """Hold the memory to decode an image outside the worker pool; waits until it is free.

        Args:
            body: the image.
            header: of it.
            min_side: see `decode`.
            until: on the loop's clock; waits no longer.

        Raises:
            DeadlineMissed: if there is no memory by then.
            Overloaded: if there is never so much memory, or too many wait for it.
        """
        async with self.memory.held(cost_of(body, header, [min_side]).bytes, until):
            yield
