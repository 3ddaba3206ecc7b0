"""The loaded variants of one group under one set of settings; a replica replaces them as a whole."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hawkvision.core.types import Pixels
from hawkvision.datacenter.execution.group_settings import WIDE, GroupSettings
from hawkvision.datacenter.execution.model import Model
from hawkvision.imaging.decoding_cost import DecodingCost, DecodingRates, DecodingScales
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
from hawkvision.tasks.kind import TaskKind, ToImage
from hawkvision.tasks.serving import OutputDecoder

BATCH_ON_CPU: Final = 8
"""Requests in a batch, if neither the settings nor a measurement say so. On a CPU batches hardly save time."""


class ModelSet:
    """Loaded, verified and warmed-up variants. Closes them after `retire`, once the last image has left."""

    def __init__(self, settings: GroupSettings, threads: int, inferring: Executor, rates: DecodingRates) -> None:
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
        self._scales = DecodingScales(self.specs.values(), rates, settings.max_pixels, settings.max_pixels_whole)

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
        OutputDecoder.of(variant, kind),
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
