"""Running a cascade's models over a data set, for calibration, certification, reports and studies.

Datacenter stages run on images as edge nodes send them, edge stages on the original images, as they are served and
certified. For small images the two are the same. Logits are cached under the hashes of images and model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import sched_getaffinity
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from hawkvision.cascade.certification.predictions import StagePredictions
from hawkvision.core.errors import ConfigError, RequestError
from hawkvision.core.types import LOGITS, Logits, Pixels
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.preprocessing import load_input, probe
from hawkvision.inference.backend_registry import ON_THE_CPU, BackendKind, open_backend
from hawkvision.inference.backends.interface import Backend, OnnxPrecision
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import LabelledImages, UnlabelledImages
from hawkvision.models.manifest import Ensemble, Manifest, Variant
from hawkvision.system.files import sha256_of
from hawkvision.tasks.class_scores import Probabilities, average, log_probabilities, softmax, tempered, unsure

MAX_PIXELS: Final = 50_000_000
BATCH: Final = 8
PIXELS: Final = 2
"""Version of the preprocessing; cached logits of other versions are not used."""

AnyImages: TypeAlias = LabelledImages | UnlabelledImages
Chosen: TypeAlias = NDArray[np.intp]
Corruption: TypeAlias = Callable[[Pixels, int], Pixels]
"""Maps input pixels (height, width, 3) and the image's index to pixels of the same shape; deterministic."""


@dataclass(frozen=True, slots=True)
class ModelExecution:
    """How models run: backend, providers of ONNX Runtime, images and threads per inference, and its precision."""

    backend: BackendKind = "onnxruntime"
    providers: tuple[str, ...] = ON_THE_CPU
    batch: int = BATCH
    threads: int = 1
    precision: OnnxPrecision = "model"

    def open(self, manifest: Manifest, variant: Variant, cache: Path) -> Backend:
        """A variant, ready to run.

        Raises:
            ArtifactError: if the model is missing or not the manifest's.
        """
        model = load_variant(cache, manifest.task, variant)
        return open_backend(
            self.backend, model, variant.input, manifest.classes, self.providers, self.threads, self.precision
        )


CERTIFIED_EXECUTION: Final = ModelExecution()
"""The execution with which certificates are made."""


@dataclass(frozen=True, slots=True)
class VariantLogits:
    """One variant's logits (n, classes) on every image, and on its mirror image if an ensemble needs it."""

    upright: Logits
    mirrored: Logits | None
    cost_ms: float
    """Processor time of one view of one image."""


VariantInput: TypeAlias = tuple[str, bool]
"""A variant, and whether its input was downscaled to be sent."""


class CascadePredictions:
    """Predictions of several stages for the same images."""

    def __init__(self, manifest: Manifest, views: dict[VariantInput, VariantLogits], *, differs: bool) -> None:
        """`differs`: whether some of the images are downscaled to be sent."""
        self._manifest = manifest
        self._views = views
        self._differs = differs

    def logits(self, stage: str) -> Logits:
        """A stage's logits (n, classes); an ensemble's are the logarithm of its averaged probabilities.

        Where the first member of a conditional ensemble answers alone, they are its logits at its temperature.
        """
        ensemble = self._manifest.ensemble(stage)
        if ensemble is None:
            return self._view(stage, stage).upright
        views = list(self._ensemble_views(ensemble))
        averaged = log_probabilities(average(views, ensemble.temperature))
        if ensemble.accept_confidence is None:
            return averaged
        first = self._manifest.variant(ensemble.members[0])
        alone = tempered(self._view(stage, first.name).upright, first.temperature)
        return np.where(unsure(views[0], ensemble.accept_confidence)[:, np.newaxis], averaged, alone)

    def served(self, stage: str) -> StagePredictions:
        """A stage as the datacenter serves it, with the manifest's temperature."""
        ensemble = self._manifest.ensemble(stage)
        temperature = 1.0 if ensemble else self._manifest.variant(stage).temperature
        return StagePredictions(stage, softmax(self.logits(stage), temperature), round(self.cost_ms(stage), 3))

    def cost_ms(self, stage: str) -> float:
        """Mean processor time of one image: all members, and both views if the ensemble mirrors.

        The other members of a conditional ensemble count as often as they run.
        """
        first, *others = (self._view(stage, v.name).cost_ms for v in self._manifest.members(stage))
        return self._views_of(stage) * (first + self._asked(stage) * sum(others))

    def _asked(self, stage: str) -> float:
        """The share of the images that a stage's other members run on, 0..1."""
        ensemble = self._manifest.ensemble(stage)
        if ensemble is None or ensemble.accept_confidence is None:
            return 1.0
        first = next(self._ensemble_views(ensemble))
        known = ~np.isnan(first).any(axis=1)
        return float(unsure(first[known], ensemble.accept_confidence).mean())

    def reused_ms(self, first: str, second: str) -> float:
        """The part of the second stage's cost that the first has already paid
        (`datacenter.stages.cascade_executor`).
        """
        if self._views_of(first) > self._views_of(second):
            return 0.0  # the average of both views does not give the upright image's alone
        shared = set(self._manifest.members(first)) & set(self._manifest.members(second))
        return round(self._views_of(first) * sum(self._view(second, v.name).cost_ms for v in shared), 3)

    def _views_of(self, stage: str) -> int:
        ensemble = self._manifest.ensemble(stage)
        return 2 if ensemble is not None and ensemble.horizontal_flip else 1

    def _view(self, stage: str, member: str) -> VariantLogits:
        return self._views[member, self._differs and stage in self._manifest.cascade.dc]

    def _ensemble_views(self, ensemble: Ensemble) -> Iterator[Probabilities]:
        for member in ensemble.members:
            temperature = self._manifest.variant(member).temperature
            logits = self._view(ensemble.name, member)
            yield softmax(logits.upright, temperature)
            if ensemble.horizontal_flip and logits.mirrored is not None:
                yield softmax(logits.mirrored, temperature)


def run_stages(
    manifest: Manifest,
    stages: Sequence[str],
    images: AnyImages,
    *,
    execution: ModelExecution = CERTIFIED_EXECUTION,
    cache: Path,
    chosen: Chosen | None = None,
    corruption: Corruption | None = None,
    name: str = "",
) -> CascadePredictions:
    """Run every variant that the stages need over the images, or read its logits from the cache.

    Args:
        manifest: of the task.
        stages: variants and ensembles.
        images: encoded images; their labels are not used.
        execution: how the models run; only results of the certified execution are cached.
        cache: the folder of built models and cached logits.
        chosen: indices of the images to run, rising; the logits of all others are NaN. None means all.
        corruption: applied to each input, for studies of drift.
        name: of the corruption, for the cache.

    Raises:
        ArtifactError: if a model is missing or not the manifest's.
        ConfigError: naming an image that cannot be read.
    """
    chosen = np.arange(len(images)) if chosen is None else chosen
    views: dict[VariantInput, VariantLogits] = {}
    with Progress(transient=True) as progress, ThreadPoolExecutor(len(sched_getaffinity(0))) as pool:
        remote = set(stages) & set(manifest.cascade.dc)
        sent = _as_sent(manifest, images, chosen, pool) if remote else None
        for (member, smaller), flip in _wanted(manifest, stages, set() if sent is None else remote).items():
            variant, data = manifest.variant(member), sent if smaller and sent is not None else images
            facts = (PIXELS, data.sha256, hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest(), name, flip)
            kept = _kept_path(cache, manifest.task, variant, facts) if execution == CERTIFIED_EXECUTION else None
            found = _read(kept, len(images), manifest.classes) if kept else None
            if found is None:
                bar = progress.add_task(f"{member} {name}".strip(), total=len(chosen))
                runner = execution.open(manifest, variant, cache)
                run = _VariantRun(runner, variant, data, chosen, execution.batch, flip, corruption)
                found = run.over_all(pool, lambda done, bar=bar: progress.advance(bar, done))  # type: ignore[misc]
                if kept:
                    _write(kept, found)
            views[member, smaller] = found
    return CascadePredictions(manifest, views, differs=sent is not None)


def _wanted(manifest: Manifest, stages: Sequence[str], remote: set[str]) -> dict[VariantInput, bool]:
    """The inputs to run, and whether mirror images are needed too; `remote` stages run on images as sent."""
    wanted: dict[VariantInput, bool] = {}
    for stage in stages:
        ensemble = manifest.ensemble(stage)
        for variant in manifest.members(stage):
            key = variant.name, stage in remote
            wanted[key] = wanted.get(key, False) or (ensemble is not None and ensemble.horizontal_flip)
    return wanted


def _as_sent(manifest: Manifest, images: AnyImages, chosen: Chosen, pool: ThreadPoolExecutor) -> AnyImages | None:
    """The images with the chosen ones as edge nodes send them; None if all are sent unchanged.

    Raises:
        ConfigError: naming an image that cannot be read.
    """
    reducer = Reducer(manifest.datacenter_inputs, MAX_PIXELS)

    def sent(index: int) -> bytes:
        body = images.bodies[index]
        try:
            return reducer.reduced(body, probe(body))
        except RequestError as error:
            raise ConfigError(f"{images.name}: image {index}: {error}") from None

    bodies = list(images.bodies)
    for index, body in zip(chosen, pool.map(sent, map(int, chosen)), strict=True):
        bodies[index] = body
    if bodies == list(images.bodies):
        return None
    digest = hashlib.sha256(b"".join(hashlib.sha256(body).digest() for body in bodies)).hexdigest()
    return replace(images, bodies=bodies, sha256=digest)


class _VariantRun:
    """One variant over the chosen images."""

    def __init__(
        self,
        runner: Backend,
        variant: Variant,
        images: AnyImages,
        chosen: Chosen,
        batch: int,
        flip: bool,
        corruption: Corruption | None,
    ) -> None:
        self._runner = runner
        self._batch = batch
        self._variant = variant
        self._images = images
        self._chosen = chosen
        self._flip = flip
        self._corruption = corruption

    def over_all(self, pool: ThreadPoolExecutor, advance: Callable[[int], None]) -> VariantLogits:
        def batch(start: int) -> tuple[Logits, Logits | None, float]:
            inputs = np.stack([self._input(int(i)) for i in self._chosen[start : start + self._batch]])
            before = time.thread_time()
            upright = self._runner.infer(inputs)[LOGITS]
            spent = time.thread_time() - before
            mirrored = self._runner.infer(np.ascontiguousarray(inputs[:, :, ::-1]))[LOGITS] if self._flip else None
            advance(len(inputs))
            return upright, mirrored, spent * 1e3 / len(inputs)

        try:
            parts = list(pool.map(batch, range(0, len(self._chosen), self._batch)))
        finally:
            self._runner.close()
        mirrored = [part for _, part, _ in parts if part is not None]
        return VariantLogits(
            self._placed([part for part, _, _ in parts]),
            self._placed(mirrored) if self._flip else None,
            float(np.median([spent for _, _, spent in parts])),
        )

    def _placed(self, parts: Sequence[Logits]) -> Logits:
        """Logits of the chosen images at their indices among all; NaN elsewhere."""
        found = np.concatenate(parts)
        everywhere = np.full((len(self._images), found.shape[1]), np.nan, np.float32)
        everywhere[self._chosen] = found
        return everywhere

    def _input(self, index: int) -> Pixels:
        try:
            pixels = load_input(self._images.bodies[index], self._variant.input, max_pixels=MAX_PIXELS)[0]
        except RequestError as error:
            raise ConfigError(f"{self._images.name}: image {index}: {error}") from None
        return pixels if self._corruption is None else self._corruption(pixels, index)


def _kept_path(cache: Path, task: str, variant: Variant, facts: Sequence[str | int]) -> Path:
    key = sha256_of(msgspec.json.encode([variant.sha256, variant.input, *facts], order="sorted"))
    return cache / "looks" / task / f"{variant.name}-{key[:20]}.npz"


def _read(path: Path, n: int, classes: int) -> VariantLogits | None:
    """Cached logits; None if there are none, or the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            upright, mirrored, cost = archive["upright"], archive["mirrored"], float(archive["cost_ms"])
            digest = str(archive["sha256"])
    except (OSError, ValueError, KeyError, EOFError):
        return None
    if upright.shape != (n, classes) or digest != _digest(upright, mirrored):
        return None
    return VariantLogits(upright, mirrored if mirrored.size else None, cost)


def _write(path: Path, views: VariantLogits) -> None:
    mirrored = np.empty((0, 0), np.float32) if views.mirrored is None else views.mirrored
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    digest = _digest(views.upright, mirrored)
    np.savez(part, upright=views.upright, mirrored=mirrored, cost_ms=views.cost_ms, sha256=digest)
    part.replace(path)


def _digest(upright: NDArray[np.float32], mirrored: NDArray[np.float32]) -> str:
    return hashlib.sha256(upright.tobytes() + mirrored.tobytes()).hexdigest()
