"""One loaded variant: pixels in, calibrated probabilities out, in batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import numpy as np

from hawkvision.core.clock import Deadline, MonotonicClock
from hawkvision.core.errors import BackendError
from hawkvision.core.types import LOGITS, Pixels, Tensors
from hawkvision.datacenter.execution.batching import BatchedResult, Batcher
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.fingerprints import VariantRun
from hawkvision.tasks.class_scores import Probabilities, average, softmax

HEALTH_LIMIT_S: Final = 8.0
"""How long one check waits for an inference, its wait for others included. Serve replaces a replica after three failed
checks in a row, so a machine that is starved of processor time has three times as long."""
_RECENT_S: Final = 10.0
"""An inference that succeeded so long ago shows that the model works; so an idle model infers every ten seconds."""


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
        self._succeeded_at = time.monotonic()
        self._check: asyncio.Task[object] | None = None
        """The inference of a blank image that runs or waits, for one check or several."""
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

    async def check_health(self, limit_s: float) -> None:
        """Infer a blank image, unless an inference has succeeded lately.

        Raises:
            BackendError: if the inference fails, or takes longer than the limit.
        """
        if time.monotonic() - self._succeeded_at < _RECENT_S:
            return
        if self._check is None or self._check.done():
            blank = np.zeros((1, *self._narrow.input_shape), np.uint8)
            self._check = asyncio.create_task(self.classify(blank, None, alone=True))
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self._check)
        except TimeoutError:
            raise BackendError(f"{self.run.name}: no inference has ended within {limit_s:g} s") from None
        except Exception as error:
            raise BackendError(f"{self.run.name}: a blank image failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Free the backends once no inference runs; requests that wait for one are not answered."""
        self._batcher.stop(self._close_backends)

    def _close_backends(self) -> None:
        for backend in (self._narrow, self.wide):
            if backend is not None:
                backend.close()

    async def _infer(self, batch: list[_Views]) -> list[Probabilities]:
        images = [views.images for views in batch]
        lone = self.wide is not None and len(batch) == 1 and batch[0].alone
        infer: Callable[[Pixels], Tensors] = self.wide.infer if lone and self.wide is not None else self._narrow.infer
        loop = asyncio.get_running_loop()
        tensors = await loop.run_in_executor(
            self._threads, infer, images[0] if len(images) == 1 else np.concatenate(images)
        )
        self._succeeded_at = time.monotonic()
        rows = softmax(tensors[LOGITS], self._temperature)
        ends = np.cumsum([len(views) for views in images])
        return [_mean(rows[end - len(views) : end]) for views, end in zip(images, ends, strict=True)]


def _mean(rows: Probabilities) -> Probabilities:
    """(1, classes) from the (views, classes) of one image."""
    return average([rows[i : i + 1] for i in range(len(rows))])
