"""One loaded variant: pixels in, calibrated probabilities out, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from hawkvision.cascade.confidence.scores import Probabilities, average, softmax
from hawkvision.core.clock import Deadline, MonotonicClock
from hawkvision.core.types import Logits, Pixels
from hawkvision.datacenter.execution.batching import BatchedResult, Batcher
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.fingerprints import VariantRun


@dataclass(frozen=True, slots=True)
class _Views:
    """The views of one image (1 or 2, height, width, 3), and whether no other variant runs on it meanwhile."""

    images: Pixels
    alone: bool


class Model:
    """A variant's backend and its batcher; models may share the inference threads."""

    def __init__(
        self,
        narrow: Backend,
        wide: Backend | None,
        temperature: float,
        threads: Executor,
        *,
        max_batch_size: int,
        batch_wait_s: float,
        backend: str,
        run: VariantRun,
    ) -> None:
        """Run each backend on one view and on two, to warm it up.

        Args:
            narrow: the model on one thread.
            wide: the model on several threads, for a lone image on which no other variant runs.
            temperature: calibrates the probabilities.
            threads: run inference, one batch at a time.
            max_batch_size: requests in a batch.
            batch_wait_s: the longest that an incomplete batch waits for more requests.
            backend: the backend's name.
            run: what is loaded, for the statement.
        """
        self.backend = backend
        self.run = run
        self._narrow = narrow
        self.wide = wide
        self._temperature = temperature
        self._threads = threads
        for each in (narrow, wide):
            if each is not None:
                for images in (1, 2):
                    each.infer(np.zeros((images, *each.input_shape), np.uint8))
        self._batcher: Batcher[_Views, Probabilities] = Batcher(
            self._infer, max_size=max_batch_size, wait_s=batch_wait_s, clock=MonotonicClock()
        )

    async def classify(self, images: Pixels, deadline: Deadline | None, *, alone: bool) -> BatchedResult[Probabilities]:
        """The mean probabilities (1, classes) of an image's views (1 or 2, height, width, 3).

        The deadline is on `MonotonicClock`.

        Raises:
            DeadlineMissed: if the deadline passes before inference begins.
        """
        return await self._batcher.submit(_Views(images, alone), deadline)

    async def _infer(self, batch: list[_Views]) -> list[Probabilities]:
        images = [views.images for views in batch]
        lone = self.wide is not None and len(batch) == 1 and batch[0].alone
        infer: Callable[[Pixels], Logits] = self.wide.infer if lone and self.wide is not None else self._narrow.infer
        loop = asyncio.get_running_loop()
        logits = await loop.run_in_executor(
            self._threads, infer, images[0] if len(images) == 1 else np.concatenate(images)
        )
        rows = softmax(logits, self._temperature)
        ends = np.cumsum([len(views) for views in images])
        return [_mean(rows[end - len(views) : end]) for views, end in zip(images, ends, strict=True)]


def _mean(rows: Probabilities) -> Probabilities:
    """(1, classes) from the (views, classes) of one image."""
    return average([rows[i : i + 1] for i in range(len(rows))])
