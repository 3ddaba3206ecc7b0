"""One loaded variant: pixels in, calibrated outputs of the task kind out, in batches."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np

from hawkvision.core.clock import Deadline, MonotonicClock
from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels
from hawkvision.datacenter.execution.batching import BatchedResult, Batcher
from hawkvision.datacenter.stages.ensemble import Augmentation
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.fingerprints import VariantRun
from hawkvision.tasks.kind import Output, ToImage
from hawkvision.tasks.serving import OutputDecoder

HEALTH_LIMIT_S: Final = 8.0
"""How long one check waits for an inference, its wait for others included. Serve replaces a replica after three failed
checks in a row, so a machine that is starved of processor time has three times as long."""
_RECENT_S: Final = 10.0
"""An inference that succeeded so long ago shows that the model works; so an idle model infers every ten seconds."""


@dataclass(frozen=True, slots=True)
class _Views:
    """The views of one image, and whether no other variant runs on it meanwhile."""

    images: Pixels
    """(1 or 2, height, width, 3)."""
    views: Augmentation
    to_image: ToImage | None
    alone: bool


class Model:
    """A variant's backend and its batcher; models may share the inference threads."""

    def __init__(
        self,
        narrow: Backend,
        wide: Backend | None,
        decoder: OutputDecoder,
        threads: Executor,
        *,
        max_batch_size: int,
        backend: str,
        run: VariantRun,
    ) -> None:
        """Run each backend on one view and on two, to warm it up.

        Args:
            narrow: the model on one thread.
            wide: the model on several threads, for a lone image on which no other variant runs.
            decoder: makes outputs of the backend's tensors.
            threads: run inference, one batch at a time.
            max_batch_size: requests in a batch.
            backend: the backend's name.
            run: what is loaded, for the statement.

        Raises:
            BackendError: if the model cannot be run, or does not return what the decoder and the task kind expect.
        """
        self.backend = backend
        self.run = run
        self._narrow = narrow
        self.wide = wide
        self._decoder = decoder
        self._threads = threads
        for each in (narrow, wide):
            if each is not None:
                for images in (1, 2):
                    decoder(each.infer(np.zeros((images, *each.input_shape), np.uint8)))
        self._succeeded_at = time.monotonic()
        self._check: asyncio.Task[object] | None = None
        """The inference of a blank image that runs or waits, for one check or several."""
        self._batcher: Batcher[_Views, Output] = Batcher(self._infer, max_size=max_batch_size, clock=MonotonicClock())

    async def infer(
        self, upright: Pixels, to_image: ToImage | None, views: Augmentation, deadline: Deadline | None, *, alone: bool
    ) -> BatchedResult[Output]:
        """The output for an image's views, combined if there are two; places in it are those in the upright image.

        Args:
            upright: the image as the model's input (height, width, 3).
            to_image: maps places in that to the image; None for kinds without places.
            views: those to evaluate.
            deadline: on `MonotonicClock`.
            alone: whether no other variant runs on the image meanwhile.

        Raises:
            DeadlineMissed: if the deadline passes before inference begins.
        """
        return await self._batcher.submit(_Views(_images(upright, views), views, to_image, alone), deadline)

    async def check_health(self, limit_s: float) -> None:
        """Infer a blank image, unless an inference has succeeded lately.

        Raises:
            BackendError: if the inference fails, or takes longer than the limit.
        """
        if time.monotonic() - self._succeeded_at < _RECENT_S:
            return
        if self._check is None or self._check.done():
            blank = np.zeros(self._narrow.input_shape, np.uint8)
            self._check = asyncio.create_task(self.infer(blank, None, Augmentation.UPRIGHT, None, alone=True))
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

    async def _infer(self, batch: list[_Views]) -> list[Output]:
        lone = self.wide is not None and len(batch) == 1 and batch[0].alone
        backend = self.wide if lone and self.wide is not None else self._narrow
        outputs = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, backend, batch)
        self._succeeded_at = time.monotonic()
        return outputs

    def _run(self, backend: Backend, batch: list[_Views]) -> list[Output]:
        """Blocks; on an inference thread."""
        images = [views.images for views in batch]
        outputs = iter(self._decoder(backend.infer(images[0] if len(images) == 1 else np.concatenate(images))))
        return [self._combined([next(outputs) for _ in views.images], views) for views in batch]

    def _combined(self, outputs: list[Output], of: _Views) -> Output:
        """One output from those of an image's views, in their order."""
        kind = self._decoder.kind
        if of.views is not Augmentation.UPRIGHT:
            outputs[-1] = kind.unmirror(outputs[-1])
        if of.to_image is not None:
            outputs = [kind.place(output, of.to_image) for output in outputs]
        return outputs[0] if len(outputs) == 1 else kind.combine(outputs, (1.0, 1.0), 1.0)


def _images(upright: Pixels, views: Augmentation) -> Pixels:
    """(1 or 2, height, width, 3): the image, its mirror image, or both."""
    match views:
        case Augmentation.UPRIGHT:
            return upright[None]
        case Augmentation.MIRROR:
            return _mirrored(upright)[None]
        case Augmentation.BOTH:
            return np.stack((upright, _mirrored(upright)))


def _mirrored(upright: Pixels) -> Pixels:
    """Equals `upright[:, ::-1]`, whose copy by NumPy is slow enough to hold up the event loop."""
    mirrored: Pixels = cv2.flip(upright, 1)
    return mirrored
