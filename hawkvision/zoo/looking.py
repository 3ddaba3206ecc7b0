"""Running a ladder over labelled pictures, once: what calibration, certification, reports and studies start from.

Logits are kept in the cache under the hashes of pictures and model, so that the next command that needs them has them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import sched_getaffinity
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from hawkvision.artifacts import load_variant, sha256_of
from hawkvision.cascade.profiling import Looked
from hawkvision.cascade.scores import Probabilities, average, log_probabilities, softmax
from hawkvision.errors import ConfigError, RequestError
from hawkvision.manifest import Manifest, Variant
from hawkvision.pictures import LabelledPictures, UnlabelledPictures
from hawkvision.types import Logits, Pixels
from hawkvision.vision.backend import Backend
from hawkvision.vision.backends import BackendKind, open_backend
from hawkvision.vision.image import load_input

MAX_PIXELS: Final = 50_000_000
BATCH: Final = 8

AnyPictures: TypeAlias = LabelledPictures | UnlabelledPictures
Chosen: TypeAlias = NDArray[np.intp]
Corruption: TypeAlias = Callable[[Pixels, int], Pixels]
"""Input pixels (height, width, 3) and the picture's number to other pixels of the same shape; deterministic."""


@dataclass(frozen=True, slots=True)
class Views:
    """One variant's logits (n, classes) on every picture, and on its mirror image if a committee wants it."""

    upright: Logits
    mirrored: Logits | None
    cost_ms: float
    """Processor time of one view of one picture."""


class Looks:
    """What every variant of some rungs said of the same pictures."""

    def __init__(self, manifest: Manifest, views: dict[str, Views]) -> None:
        self._manifest = manifest
        self._views = views

    def logits(self, rung: str) -> Logits:
        """A rung's logits (n, classes); a committee's are the logarithm of its averaged probabilities."""
        committee = self._manifest.committee(rung)
        if committee is None:
            return self._views[rung].upright
        views = list(self._committee_views(committee.members, mirrored=committee.horizontal_flip))
        return log_probabilities(average(views, committee.temperature))

    def served(self, rung: str) -> Looked:
        """A rung as the datacenter serves it: with the manifest's temperature."""
        committee = self._manifest.committee(rung)
        temperature = 1.0 if committee else self._manifest.variant(rung).temperature
        return Looked(rung, softmax(self.logits(rung), temperature), round(self.cost_ms(rung), 3))

    def cost_ms(self, rung: str) -> float:
        """Processor time of one picture: all members, and both views if the committee mirrors."""
        committee = self._manifest.committee(rung)
        views = 2 if committee is not None and committee.horizontal_flip else 1
        return views * sum(self._views[variant.name].cost_ms for variant in self._manifest.members(rung))

    def _committee_views(self, members: Sequence[str], *, mirrored: bool) -> Iterator[Probabilities]:
        for member in members:
            temperature = self._manifest.variant(member).temperature
            yield softmax(self._views[member].upright, temperature)
            flipped = self._views[member].mirrored
            if mirrored and flipped is not None:
                yield softmax(flipped, temperature)


def look(
    manifest: Manifest,
    rungs: Sequence[str],
    pictures: AnyPictures,
    *,
    backend: BackendKind = "onnxruntime",
    cache: Path,
    chosen: Chosen | None = None,
    corruption: Corruption | None = None,
    name: str = "",
) -> Looks:
    """Run every variant that the rungs need over the pictures, or take from the cache what it said.

    Args:
        manifest: of the task.
        rungs: variants and committees.
        pictures: encoded pictures; their labels are not looked at.
        backend: what runs the models; only ONNX Runtime's results are kept.
        cache: where built models lie, and logits are kept.
        chosen: numbers of the pictures that matter, rising; the logits of all others are NaN. None means all.
        corruption: applied to each input, for studies of drift.
        name: of the corruption, for the cache.

    Raises:
        ArtifactError: if a model is missing or not the manifest's.
        ConfigError: naming a picture that cannot be read.
    """
    variants = {variant.name: variant for rung in rungs for variant in manifest.members(rung)}
    flipped = {
        member for rung in rungs if (c := manifest.committee(rung)) and c.horizontal_flip for member in c.members
    }
    chosen = np.arange(len(pictures)) if chosen is None else chosen
    results: dict[str, Views] = {}
    with Progress(transient=True) as progress, ThreadPoolExecutor(len(sched_getaffinity(0))) as pool:
        for variant in variants.values():
            flip = variant.name in flipped
            facts = (pictures.sha256, hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest(), name, flip)
            kept = _kept_path(cache, manifest.task, variant, facts) if backend == "onnxruntime" else None
            views = _read(kept, len(pictures), manifest.classes) if kept else None
            if views is None:
                bar = progress.add_task(f"{variant.name} {name}".strip(), total=len(chosen))
                run = _Run(manifest, variant, pictures, chosen, backend, cache, flip, corruption)
                views = run.over_all(pool, lambda done, bar=bar: progress.advance(bar, done))  # type: ignore[misc]
                if kept:
                    _write(kept, views)
            results[variant.name] = views
    return Looks(manifest, results)


class _Run:
    """One variant over the chosen pictures."""

    def __init__(
        self,
        manifest: Manifest,
        variant: Variant,
        pictures: AnyPictures,
        chosen: Chosen,
        backend: BackendKind,
        cache: Path,
        flip: bool,
        corruption: Corruption | None,
    ) -> None:
        model = load_variant(cache, manifest.task, variant)
        self._runner: Backend = open_backend(backend, model, variant.input, manifest.classes, threads=1)
        self._variant = variant
        self._pictures = pictures
        self._chosen = chosen
        self._flip = flip
        self._corruption = corruption

    def over_all(self, pool: ThreadPoolExecutor, advance: Callable[[int], None]) -> Views:
        def batch(start: int) -> tuple[Logits, Logits | None, float]:
            inputs = np.stack([self._input(int(i)) for i in self._chosen[start : start + BATCH]])
            before = time.thread_time()
            upright = self._runner.infer(inputs)
            spent = time.thread_time() - before
            mirrored = self._runner.infer(np.ascontiguousarray(inputs[:, :, ::-1])) if self._flip else None
            advance(len(inputs))
            return upright, mirrored, spent * 1e3 / len(inputs)

        try:
            parts = list(pool.map(batch, range(0, len(self._chosen), BATCH)))
        finally:
            self._runner.close()
        mirrored = [part for _, part, _ in parts if part is not None]
        return Views(
            self._placed([part for part, _, _ in parts]),
            self._placed(mirrored) if self._flip else None,
            float(np.median([spent for _, _, spent in parts])),
        )

    def _placed(self, parts: Sequence[Logits]) -> Logits:
        """Logits of the chosen pictures in their places among all."""
        found = np.concatenate(parts)
        everywhere = np.full((len(self._pictures), found.shape[1]), np.nan, np.float32)
        everywhere[self._chosen] = found
        return everywhere

    def _input(self, index: int) -> Pixels:
        try:
            pixels = load_input(self._pictures.bodies[index], self._variant.input, max_pixels=MAX_PIXELS)[0]
        except RequestError as error:
            raise ConfigError(f"{self._pictures.name}: picture {index}: {error}") from None
        return pixels if self._corruption is None else self._corruption(pixels, index)


def _kept_path(cache: Path, task: str, variant: Variant, facts: Sequence[str | bool]) -> Path:
    key = sha256_of(msgspec.json.encode([variant.sha256, variant.input, *facts], order="sorted"))
    return cache / "looks" / task / f"{variant.name}-{key[:20]}.npz"


def _read(path: Path, n: int, classes: int) -> Views | None:
    """What an earlier run said; None if there is none, or the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            upright, mirrored, cost = archive["upright"], archive["mirrored"], float(archive["cost_ms"])
            digest = str(archive["sha256"])
    except (OSError, ValueError, KeyError, EOFError):
        return None
    if upright.shape != (n, classes) or digest != _digest(upright, mirrored):
        return None
    return Views(upright, mirrored if mirrored.size else None, cost)


def _write(path: Path, views: Views) -> None:
    mirrored = np.empty((0, 0), np.float32) if views.mirrored is None else views.mirrored
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    digest = _digest(views.upright, mirrored)
    np.savez(part, upright=views.upright, mirrored=mirrored, cost_ms=views.cost_ms, sha256=digest)
    part.replace(path)


def _digest(upright: NDArray[np.float32], mirrored: NDArray[np.float32]) -> str:
    return hashlib.sha256(upright.tobytes() + mirrored.tobytes()).hexdigest()
