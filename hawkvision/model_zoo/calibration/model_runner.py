"""Running a cascade's models over a data set, for calibration, certification, reports and studies.

Datacenter stages run on images as edge nodes send them, edge stages on the original images, as they are served and
certified. For small images the two are the same. Tensors are cached under the hashes of images and model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from os import sched_getaffinity
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from hawkvision.core.errors import ConfigError, RequestError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.placement import placement
from hawkvision.imaging.preprocessing import load_input, probe
from hawkvision.inference.backend_registry import BackendKind, open_backend
from hawkvision.inference.backends.interface import Backend, joined
from hawkvision.model_zoo.predictions import CascadePredictions as CascadePredictions
from hawkvision.model_zoo.predictions import (
    VariantInput,
    VariantTensors,
    VariantViews,
    Views,
    read_tensors,
    tensors_path,
    write_tensors,
)
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import LabelledImages, UnlabelledImages
from hawkvision.models.manifest import Manifest, Variant
from hawkvision.system.graph_limits import one_run
from hawkvision.tasks.decoders.decoder import Decoder
from hawkvision.tasks.decoders.registry import open_decoder
from hawkvision.tasks.kind import TaskKind

MAX_PIXELS: Final = 50_000_000
BATCH: Final = 8
PIXELS: Final = 2
"""Version of the preprocessing; cached tensors of other versions are not used."""

AnyImages: TypeAlias = LabelledImages | UnlabelledImages
Chosen: TypeAlias = NDArray[np.intp]


CERTIFIED_BACKEND: Final[BackendKind] = "onnxruntime"
"""The backend with which certificates are made, on the CPU."""


def run_stages(
    kind: TaskKind[Any],
    manifest: Manifest,
    images: AnyImages,
    *,
    edge: Sequence[str] = (),
    datacenter: Sequence[str] = (),
    shrink: bool = True,
    backend: BackendKind = CERTIFIED_BACKEND,
    cache: Path,
    chosen: Chosen | None = None,
    name: str = "",
) -> CascadePredictions:
    """Run every variant that the stages need over the images, or read its tensors from the cache.

    Args:
        kind: of the task.
        manifest: of the task.
        images: encoded images; their labels are not used.
        edge: variants and ensembles that edge nodes run.
        datacenter: variants and ensembles that the datacenter runs.
        shrink: whether edge nodes make large images smaller before they send them.
        backend: what runs the models, with one thread; only results of the certified one are cached.
        cache: the folder of built models and cached tensors.
        chosen: indices of the images to run, rising; None means all.
        name: of the images, beside the variant in the progress shown and in the cache.

    Raises:
        ArtifactError: if a model is missing or not the manifest's.
        ConfigError: naming an image that cannot be read.
    """
    chosen = np.arange(len(images)) if chosen is None else chosen
    views: dict[VariantInput, VariantViews] = {}
    with Progress(transient=True) as progress, ThreadPoolExecutor(len(sched_getaffinity(0))) as pool:
        sent = _as_sent(kind, manifest, images, chosen, shrink, pool) if datacenter else None
        for key, flip in _wanted(manifest, edge, datacenter, reduced=sent is not None).items():
            variant, data = manifest.variant(key.variant), sent if key.reduced and sent is not None else images
            indices = hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest()
            kept = tensors_path(cache, manifest.task, variant, (PIXELS, data.sha256, indices, name, flip))
            found = read_tensors(kept, len(chosen)) if backend == CERTIFIED_BACKEND else None
            if found is None:
                bar = progress.add_task(f"{variant.name} {name}".strip(), total=len(chosen))
                decode = open_decoder(variant, len(kind.labels))
                with one_run(variant.name):
                    runner = open_backend(
                        backend, load_variant(cache, manifest.task, variant), variant.input, manifest.classes
                    )
                run = _VariantRun(runner, decode, variant, data, chosen, flip)
                found = run.over_all(pool, lambda done, bar=bar: progress.advance(bar, done))  # type: ignore[misc]
                if backend == CERTIFIED_BACKEND:
                    write_tensors(kept, found)
            views[key] = _views(kind, variant, data, chosen, found)
    return CascadePredictions(kind, manifest, chosen, views, reduced=sent is not None)


def _wanted(
    manifest: Manifest, edge: Sequence[str], datacenter: Sequence[str], *, reduced: bool
) -> dict[VariantInput, bool]:
    """The inputs to run, and whether mirror images are needed too."""
    wanted: dict[VariantInput, bool] = {}
    for stages, smaller in ((edge, False), (datacenter, reduced)):
        for stage in stages:
            ensemble = manifest.ensemble(stage)
            for variant in manifest.members(stage):
                key = VariantInput(variant.name, smaller)
                wanted[key] = wanted.get(key, False) or (ensemble is not None and ensemble.horizontal_flip)
    return wanted


def _as_sent(
    kind: TaskKind[Any], manifest: Manifest, images: AnyImages, chosen: Chosen, shrink: bool, pool: ThreadPoolExecutor
) -> AnyImages | None:
    """The images with the chosen ones as edge nodes send them; None if all are sent unchanged.

    Raises:
        ConfigError: naming an image that cannot be read.
    """
    reducer = Reducer(manifest.datacenter_inputs, MAX_PIXELS, whole=kind.located, shrinks=shrink)

    def sent(index: int) -> bytes:
        body = images.bodies[index]
        try:
            return reducer.reduced(body, probe(body))
        except RequestError as error:
            raise ConfigError(f"{images.called(index)}: {error}") from None

    bodies = list(images.bodies)
    for index, body in zip(chosen, pool.map(sent, map(int, chosen)), strict=True):
        bodies[index] = body
    if bodies == list(images.bodies):
        return None
    digest = hashlib.sha256(b"".join(hashlib.sha256(body).digest() for body in bodies)).hexdigest()
    return replace(images, bodies=bodies, sha256=digest)


def _views(
    kind: TaskKind[Any], variant: Variant, images: AnyImages, chosen: Chosen, found: VariantTensors
) -> VariantViews:
    """A variant's tensors as the kind reads them, with places in the images."""
    upright = kind.raw(found.upright)
    mirrored = None if found.mirrored is None else [kind.unmirror(each) for each in kind.raw(found.mirrored)]
    if kind.located:
        headers = [probe(images.bodies[index]) for index in chosen]
        places = [placement(header, variant.input).to_image for header in headers]
        upright = [kind.place(each, place) for each, place in zip(upright, places, strict=True)]
        if mirrored is not None:
            mirrored = [kind.place(each, place) for each, place in zip(mirrored, places, strict=True)]
    return Views(upright, mirrored, found.cost_ms)


class _VariantRun:
    """One variant over the chosen images."""

    def __init__(
        self,
        runner: Backend,
        decode: Decoder,
        variant: Variant,
        images: AnyImages,
        chosen: Chosen,
        flip: bool,
    ) -> None:
        self._runner = runner
        self._decode = decode
        self._variant = variant
        self._images = images
        self._chosen = chosen
        self._flip = flip

    def over_all(self, pool: ThreadPoolExecutor, advance: Callable[[int], None]) -> VariantTensors:
        def batch(start: int) -> tuple[Tensors, Tensors | None, float]:
            inputs = np.stack([self._input(int(i)) for i in self._chosen[start : start + BATCH]])
            before = time.thread_time()
            with one_run(self._variant.name, len(inputs) * (1 + self._flip)):
                upright = self._decode(self._runner.infer(inputs))
                spent = time.thread_time() - before
                mirrored = self._mirrored(inputs) if self._flip else None
            advance(len(inputs))
            return upright, mirrored, spent * 1e3 / len(inputs)

        try:
            parts = list(pool.map(batch, range(0, len(self._chosen), BATCH)))
        finally:
            self._runner.close()
        mirrored = [part for _, part, _ in parts if part is not None]
        return Views(
            joined([part for part, _, _ in parts]),
            joined(mirrored) if self._flip else None,
            float(np.median([spent for _, _, spent in parts])),
        )

    def _mirrored(self, inputs: Pixels) -> Tensors:
        return self._decode(self._runner.infer(np.ascontiguousarray(inputs[:, :, ::-1])))

    def _input(self, index: int) -> Pixels:
        try:
            return load_input(self._images.bodies[index], self._variant.input, max_pixels=MAX_PIXELS)[0]
        except RequestError as error:
            raise ConfigError(f"{self._images.called(index)}: {error}") from None
