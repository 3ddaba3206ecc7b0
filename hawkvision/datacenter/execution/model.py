"""One variant, loaded: images in, calibrated probabilities out, in batches. Knows nothing of images' formats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from hawkvision.cascade.confidence.scores import Probabilities, average, softmax
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.types import Logits, Pixels
from hawkvision.datacenter.execution.batching import Batched, Batcher
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.fingerprints import VariantRun


@dataclass(frozen=True, slots=True)
class _Asked:
    """The images of one image (1 or 2, height, width, 3), and whether no other variant looks at it meanwhile."""

    images: Pixels
    alone: bool


class Model:
    """A variant's backend and its batcher; inference runs on threads that models may share."""

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
        """Run each backend on one image and on two, an image with its mirror image, so that the first request finds it
        warm.

        Args:
            narrow: the model on one thread.
            wide: the same on several, for an image that neither others wait with nor other variants look at.
            temperature: that calibrates its probabilities.
            threads: on which it infers, one batch at a time.
            max_batch_size: requests in a batch.
            batch_wait_s: how long a batch that is not full waits for company.
            backend: its name.
            run: what is loaded.
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
        self._batcher: Batcher[_Asked, Probabilities] = Batcher(
            self._infer, max_size=max_batch_size, wait_s=batch_wait_s, clock=MonotonicClock()
        )

    async def classify(self, images: Pixels, expires_at: float, *, alone: bool) -> Batched[Probabilities]:
        """The mean (1, classes) of one image's images (1 or 2, height, width, 3); `expires_at` is monotonic.

        Raises:
            DeadlineMissed: if that passes before inference began.
        """
        return await self._batcher.submit(_Asked(images, alone), expires_at)

    async def _infer(self, batch: list[_Asked]) -> list[Probabilities]:
        images = [asked.images for asked in batch]
        lone = self.wide is not None and len(batch) == 1 and batch[0].alone
        infer: Callable[[Pixels], Logits] = self.wide.infer if lone and self.wide is not None else self._narrow.infer
        loop = asyncio.get_running_loop()
        logits = await loop.run_in_executor(
            self._threads, infer, images[0] if len(images) == 1 else np.concatenate(images)
        )
        rows = softmax(logits, self._temperature)
        ends = np.cumsum([len(its) for its in images])
        return [_mean(rows[end - len(its) : end]) for its, end in zip(images, ends, strict=True)]


def _mean(rows: Probabilities) -> Probabilities:
    """(1, classes) from the (views, classes) of one image."""
    return average([rows[i : i + 1] for i in range(len(rows))])
