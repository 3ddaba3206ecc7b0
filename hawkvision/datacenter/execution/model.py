"""The variants of one group, loaded and verified: pixels in, calibrated outputs of the task kind out, in batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np

from hawkvision.core.clock import Deadline, MonotonicClock
from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels
from hawkvision.datacenter.execution.batching import BatchedResult, Batcher
from hawkvision.datacenter.execution.group_settings import WIDE, GroupSettings
from hawkvision.datacenter.stages.ensemble import Augmentation
from hawkvision.imaging.decoding_cost import DecodingCost, DecodingScales
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.placement import placement
from hawkvision.imaging.preprocessing import load_inputs
from hawkvision.inference.adaptive_parallelism import divides, open_wide, usable_cores
from hawkvision.inference.backend_registry import backend_name, execution_of, open_backend
from hawkvision.inference.backends.interface import Backend
from hawkvision.inference.batch_sizes import prepares_sizes, with_fixed_batches
from hawkvision.models.artifacts import load_variant
from hawkvision.models.fingerprints import BETWEEN, VariantRun, statement
from hawkvision.models.manifest import Variant, cache_dir
from hawkvision.system.files import sha256_of
from hawkvision.tasks.kind import Output, TaskKind, ToImage
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


BATCH_ON_CPU: Final = 8
"""Requests in a batch, if neither the settings nor a measurement say so. On a CPU batches hardly save time."""


class ModelSet:
    """Loaded, verified and warmed-up variants. Closes them after `retire`, once the last image has left."""

    def __init__(self, settings: GroupSettings, threads: int, inferring: Executor) -> None:
        """Load the variants and run each once; they infer on `inferring`, which has so many threads.

        Raises:
            ArtifactError: if a model file is missing or is not the one the manifest names.
            BackendError: if the backend cannot load it, or it does not return what the task kind expects.
            ManifestError: if the task's kind or a decoder is not installed.
        """
        self.settings = settings
        self.kind = settings.task_kind()
        """Of the task."""
        self._images = 0
        self._retired = self._closed = False
        # The longest job first makes the shortest schedule (Graham, 1969); the largest is also worth the most alone.
        largest_first = sorted(settings.variants, key=lambda variant: -(variant.bytes or 0))
        self.models: dict[str, Model] = {}
        try:
            for variant in largest_first:
                self.models[variant.name] = load_model(variant, self.kind, settings, threads, inferring)
        except BaseException:
            self._close()
            raise
        self.statement = statement([model.run for model in self.models.values()])
        """What this process runs; each answer carries it."""
        self.backends = tuple(dict.fromkeys(model.backend for model in self.models.values()))
        self.specs = {variant.name: variant.input for variant in settings.variants}
        self._scales = DecodingScales(self.specs.values(), settings.max_pixels, settings.max_pixels_whole)

    def __str__(self) -> str:
        return ", ".join(f"{name} ({model.backend})" for name, model in self.models.items())

    @property
    def in_use(self) -> int:
        """The images that use the variants now."""
        return self._images

    @property
    def closed(self) -> bool:
        """Whether the variants have been told to close."""
        return self._closed

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the variants open for an image while the block lasts."""
        self._images += 1
        try:
            yield
        finally:
            self._images -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """Close the variants as soon as no image uses them; call it once, when others have taken their place."""
        self._retired = True
        self._close_if_unused()

    def cost(self, image: bytes, header: ImageHeader) -> DecodingCost:
        """What it costs to decode an image for all variants.

        Raises:
            TooLarge: if it has too many pixels.
        """
        return self._scales.cost(image, header)

    def to_image(self, name: str, header: ImageHeader) -> ToImage | None:
        """What maps places in a variant's input to the image; None for kinds without places."""
        return placement(header, self.specs[name]).to_image if self.kind.located else None

    def inputs(self, image: bytes, names: Sequence[str], header: ImageHeader) -> Generator[Pixels]:
        """The input of each of these variants, in order; each step decodes or scales."""
        specs = [self.specs[name] for name in names]
        return load_inputs(image, specs, max_pixels=self.settings.max_pixels, header=header)

    def _close_if_unused(self) -> None:
        if self._retired and not self._images:
            self._close()

    def _close(self) -> None:
        self._closed = True
        for model in self.models.values():
            model.close()


def load_model(
    variant: Variant, kind: TaskKind[Any], settings: GroupSettings, threads: int, inferring: Executor
) -> Model:
    """A variant, loaded and verified; it infers on `inferring`, which has so many threads.

    Raises:
        ArtifactError: if the model file is missing or is not the one that the manifest names.
        BackendError: if the backend cannot load it, or it does not return what the task kind expects.
        ManifestError: if its decoder is not installed.
    """
    cache = cache_dir(None if settings.cache_dir is None else Path(settings.cache_dir))
    data = b"" if settings.backend == "noop" else load_variant(cache, settings.task, variant)

    def opened(intra_op: int) -> Backend:
        return open_backend(
            settings.backend, data, variant.input, len(kind.labels), settings.providers, intra_op, settings.precision
        )

    narrow, wide = opened(1), None
    if divides(settings.backend, settings.providers):
        # `known`: replicas load at the same time, so a measurement of threads would include the other replicas.
        wanted = settings.intra_op_threads or min(WIDE, usable_cores())
        wide = open_wide(narrow, opened, min(wanted, threads), known=True)
    execution = BETWEEN.join(dict.fromkeys(execution_of(settings.backend, each) for each in (narrow, wide) if each))
    batched, most = _for_batches(narrow, settings)
    return Model(
        batched,
        wide,
        OutputDecoder(variant, kind),
        inferring,
        max_batch_size=most,
        backend=backend_name(settings.backend, narrow),
        run=VariantRun.of(variant, sha256_of(data) if data else None, execution),
    )


def _for_batches(backend: Backend, settings: GroupSettings) -> tuple[Backend, int]:
    """The backend as batches run on it, and the most requests in a batch."""
    if not prepares_sizes(settings.backend, settings.providers):
        return backend, settings.max_batch_size or BATCH_ON_CPU
    fixed = with_fixed_batches(backend, settings.max_batch_size)
    return fixed, settings.max_batch_size or fixed.sizes[-1]
