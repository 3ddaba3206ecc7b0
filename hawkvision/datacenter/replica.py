"""One replica of one variant: encoded pictures in, calibrated probabilities out. Knows nothing of Ray.

Pictures arrive encoded and are decoded here, not at the door: 30 KB of JPEG cross processes in about 1.1 ms where a
300 x 300 tensor takes 1.4 ms (Ray's gRPC transport) or 4.2 ms (its object store), the door's one event loop stays
free, and decoding scales with the replicas. Decoding comes before batching, so a bad picture fails alone.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from hawkvision.artifacts import load_variant
from hawkvision.cascade.scores import Probabilities, average, softmax
from hawkvision.clock import MonotonicClock
from hawkvision.config import DatacenterConfig
from hawkvision.datacenter.batching import Batched, Batcher
from hawkvision.errors import DeadlineMissed, HawkVisionError, RequestError
from hawkvision.manifest import Variant, artifact_path, cache_dir
from hawkvision.types import Logits, Pixels
from hawkvision.vision.backend import Backend
from hawkvision.vision.backends import BackendKind, open_backend
from hawkvision.vision.image import load_input
from hawkvision.vision.wide import divides, open_wide

# Two threads decode while one infers: decoding is about a third of the work of a small variant, never more than half.
_DECODE_THREADS = 2


class Views(StrEnum):
    """Which images of a picture a variant looks at; of both, the probabilities are averaged."""

    UPRIGHT = "upright"
    MIRROR = "mirror"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class VariantSettings:
    """All that a replica needs to know; travels to it in Ray's deployment record."""

    task: str
    variant: Variant
    classes: int
    backend: BackendKind
    providers: tuple[str, ...]
    cache_dir: Path | None
    max_batch_size: int
    batch_wait_ms: float
    max_pixels: int
    intra_op_threads: int


@dataclass(frozen=True, slots=True)
class VariantAnswer:
    """One picture's probabilities (1, classes) and where the time went, in milliseconds."""

    probabilities: Probabilities
    decode_ms: float
    queue_ms: float
    infer_ms: float
    batch_size: int


def settings_of(variant: Variant, classes: int, config: DatacenterConfig, *, alone: bool = True) -> VariantSettings:
    """A variant's part of the tier's settings; one that is never `alone`, in committees only, needs no more threads."""
    return VariantSettings(
        task=config.task,
        variant=variant,
        classes=classes,
        backend=config.backend,
        providers=config.providers,
        cache_dir=config.cache_dir,
        max_batch_size=config.max_batch_size,
        batch_wait_ms=config.batch_wait_ms,
        max_pixels=config.max_pixels,
        intra_op_threads=config.intra_op_threads if alone else 1,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The images of one picture (1 or 2, height, width, 3), and whether no other variant looks at it meanwhile."""

    images: Pixels
    alone: bool


class Replica:
    """A loaded, warmed-up variant with its decoding threads and its batcher."""

    def __init__(self, settings: VariantSettings) -> None:
        """Load and verify the model and run it once, so that the first request finds it warm.

        Raises:
            ArtifactError: if the model file is missing or is not the one the manifest names.
            BackendError: if the backend cannot load it.
        """
        self._settings = settings
        variant = settings.variant
        cache = cache_dir(settings.cache_dir)
        if settings.backend != "noop":
            load_variant(cache, settings.task, variant)  # for its check of the hash
        self._backend = self._open(cache, 1)
        self._wide: Backend | None = None
        """For a picture that neither others wait with nor other variants look at."""
        if divides(settings.backend, settings.providers):
            # Replicas load beside each other: what one measured of threads would be the others' doing.
            self._wide = open_wide(
                self._backend, lambda threads: self._open(cache, threads), settings.intra_op_threads, known=True
            )
        for backend in (self._backend, self._wide):
            if backend is not None:
                backend.infer(np.zeros((1, *backend.input_shape), np.uint8))
        self._decoding = ThreadPoolExecutor(_DECODE_THREADS, "decode")
        self._inferring = ThreadPoolExecutor(1, "infer")
        self._batcher: Batcher[_Asked, Probabilities] = Batcher(
            self._infer_batch,
            max_size=settings.max_batch_size,
            wait_s=settings.batch_wait_ms / 1e3,
            clock=MonotonicClock(),
        )

    def _open(self, cache: Path, threads: int) -> Backend:
        settings, variant = self._settings, self._settings.variant
        path = artifact_path(cache, settings.task, variant.name)
        return open_backend(
            settings.backend, path, variant.input, settings.classes, settings.providers, threads=threads
        )

    async def classify(
        self, picture: bytes, views: Views, expires_at: float, *, alone: bool = True
    ) -> VariantAnswer | HawkVisionError:
        """The probabilities of the picture, of its mirror image, or the average of both.

        `alone` says that no other variant looks at the picture meanwhile. It may have several cores then, unless other
        pictures wait for this one; members of a committee share out the cores by themselves.

        `expires_at` is a time of day (`time.time()`), because it counts the wait in Ray's router too; the nodes of a
        cluster are assumed to agree to within milliseconds. A picture that cannot be read and a missed deadline come
        back as values: Ray would log each raised error with its traceback, and let bad callers fill the disk.
        """
        started = time.perf_counter()
        left_s = expires_at - time.time()
        if left_s <= 0.0:
            return DeadlineMissed(f"the deadline passed {-left_s * 1e3:.1f} ms before decoding began")
        loop = asyncio.get_running_loop()
        expires_monotonic = time.monotonic() + left_s
        try:
            images = await loop.run_in_executor(self._decoding, self._images, picture, views)
            decode_ms = (time.perf_counter() - started) * 1e3
            done: Batched[Probabilities] = await self._batcher.submit(_Asked(images, alone), expires_monotonic)
        except (RequestError, DeadlineMissed) as error:
            return error
        return VariantAnswer(done.result, decode_ms, done.queue_ms, done.infer_ms, done.batch_size)

    def _images(self, picture: bytes, views: Views) -> Pixels:
        """(1 or 2, height, width, 3): the picture as the variant wants it, its mirror image, or both."""
        spec, max_pixels = self._settings.variant.input, self._settings.max_pixels
        upright, _ = load_input(picture, spec, max_pixels=max_pixels)
        match views:
            case Views.UPRIGHT:
                return upright[None]
            case Views.MIRROR:
                return np.ascontiguousarray(upright[None, :, ::-1])
            case Views.BOTH:
                return np.stack((upright, upright[:, ::-1]))

    async def _infer_batch(self, batch: list[_Asked]) -> list[Probabilities]:
        loop = asyncio.get_running_loop()
        backend, images = self._backend, [asked.images for asked in batch]
        if self._wide is not None and len(batch) == 1 and batch[0].alone:
            backend = self._wide
        logits: Logits = await loop.run_in_executor(
            self._inferring, backend.infer, images[0] if len(images) == 1 else np.concatenate(images)
        )
        rows = softmax(logits, self._settings.variant.temperature)
        ends = np.cumsum([len(its) for its in images])
        return [_mean_of_views(rows[end - len(its) : end]) for its, end in zip(images, ends, strict=True)]


def _mean_of_views(rows: Probabilities) -> Probabilities:
    """(1, classes) from the (views, classes) of one picture."""
    return average([rows[i : i + 1] for i in range(len(rows))])
