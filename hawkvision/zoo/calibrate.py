"""`hawkvision calibrate`: run a ladder over labelled pictures, and write what was measured and certified.

Beside the profile goes `held_out.json`, the numbers of the pictures that nothing was fitted or certified on, so that
`python -m loadgen evaluate` can test the promise on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import sched_getaffinity
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.progress import Progress

from hawkvision.artifacts import load_variant, write_atomic
from hawkvision.cascade.profile import (
    Profile,
    ProfileData,
    RungProfile,
    dump_profile,
)
from hawkvision.cascade.profiling import Split, profile_pair, profile_rung, split_indices
from hawkvision.cascade.scores import Probabilities, average, log_probabilities, softmax
from hawkvision.errors import ConfigError, RequestError
from hawkvision.manifest import Manifest, Variant, load_labels, load_manifest
from hawkvision.pictures import LabelledPictures, read_pictures
from hawkvision.types import Logits
from hawkvision.vision.backend import Backend
from hawkvision.vision.backends import BackendKind, open_backend
from hawkvision.vision.image import load_input

MAX_PIXELS: Final = 50_000_000
BATCH: Final = 8
FEWEST_PICTURES: Final = 100
"""Below this nothing can be certified: a drop of ε needs at least 3/ε pictures."""


class HeldOut(msgspec.Struct, frozen=True):
    """The pictures kept out of a profile, by number, and the file they are numbers of."""

    data_sha256: str
    indices: list[int]


@dataclass(frozen=True, slots=True)
class _Looked:
    """One variant's logits on every picture, and on its mirror image if a committee wants it."""

    upright: Logits
    mirrored: Logits | None


def calibrate(
    task: str,
    data: Path,
    out: Path,
    *,
    edges: Sequence[str] = (),
    best: str | None = None,
    seed: int,
    backend: BackendKind = "onnxruntime",
    models: Path,
    cache: Path,
) -> Profile:
    """Measure the ladder of `task` on labelled pictures and write its profile to `out`.

    Args:
        task: whose manifest and models are meant.
        data: npz file or directory (`hawkvision.pictures`).
        out: the profile; `held_out.json` goes beside it.
        edges: edge rungs to certify; none means the ladder's.
        best: the rung to certify against; None means the ladder's best.
        seed: of the split into profile, certification and held-out pictures.
        backend: what runs the models.
        models: where manifests lie.
        cache: where built models lie.

    Raises:
        HawkVisionError: for bad data, unknown or missing models, or too few pictures.
    """
    manifest = load_manifest(task, models)
    pictures = read_pictures(data, load_labels(manifest, models))
    if len(pictures) < FEWEST_PICTURES:
        raise ConfigError(f"{data}: {len(pictures)} pictures certify nothing; expected at least {FEWEST_PICTURES}")
    edges, best = tuple(edges) or manifest.ladder.edge, best or manifest.best
    split = split_indices(pictures.sources, seed)
    looked = _look_with_all(manifest, (*edges, best), pictures, backend, cache)
    measured: dict[str, tuple[RungProfile, Probabilities]] = {}
    for name in dict.fromkeys((*edges, best)):
        models_of = {variant.name: variant.sha256 or "" for variant in manifest.members(name)}
        logits = _rung_logits(manifest, name, looked)
        measured[name] = profile_rung(
            name, models_of, manifest.fingerprint(name), logits, pictures.labels, split, pictures.sha256
        )
    profile = Profile(
        format=1,
        task=task,
        data=_describe(pictures, split, seed),
        rungs=tuple(rung for rung, _ in measured.values()),
        pairs=tuple(
            profile_pair(edge, best, measured[edge][1], measured[best][1], pictures.labels, split) for edge in edges
        ),
    )
    write_atomic(out, dump_profile(profile))
    held_out = HeldOut(pictures.sha256, split.held_out.tolist())
    write_atomic(out.with_name("held_out.json"), msgspec.json.encode(held_out) + b"\n")
    return profile


def _describe(pictures: LabelledPictures, split: Split, seed: int) -> ProfileData:
    return ProfileData(
        name=pictures.name,
        sha256=pictures.sha256,
        seed=seed,
        profile=len(split.profile),
        certify=len(split.certify),
        held_out=len(split.held_out),
    )


def _look_with_all(
    manifest: Manifest, rungs: Sequence[str], pictures: LabelledPictures, backend: BackendKind, cache: Path
) -> dict[str, _Looked]:
    """Every variant that the rungs need, run once over all pictures."""
    variants = {variant.name: variant for rung in rungs for variant in manifest.members(rung)}
    flipped = {
        member for rung in rungs if (c := manifest.committee(rung)) and c.horizontal_flip for member in c.members
    }
    results: dict[str, _Looked] = {}
    with Progress(transient=True) as progress, ThreadPoolExecutor(len(sched_getaffinity(0))) as pool:
        for name, variant in variants.items():
            bar = progress.add_task(name, total=len(pictures))
            results[name] = _look(manifest, variant, pictures, backend, cache, name in flipped, pool, progress, bar)
    return results


def _look(
    manifest: Manifest,
    variant: Variant,
    pictures: LabelledPictures,
    backend: BackendKind,
    cache: Path,
    flip: bool,
    pool: ThreadPoolExecutor,
    progress: Progress,
    bar: object,
) -> _Looked:
    model = load_variant(cache, manifest.task, variant)
    runner: Backend = open_backend(backend, model, variant.input, manifest.classes, threads=1)

    def batch(start: int) -> tuple[Logits, Logits | None]:
        inputs = np.stack([_input(pictures, i, variant) for i in range(start, min(start + BATCH, len(pictures)))])
        upright = runner.infer(inputs)
        mirrored = runner.infer(np.ascontiguousarray(inputs[:, :, ::-1])) if flip else None
        progress.advance(bar, len(inputs))  # type: ignore[arg-type]
        return upright, mirrored

    try:
        parts = list(pool.map(batch, range(0, len(pictures), BATCH)))
    finally:
        runner.close()
    mirrored = [part for _, part in parts if part is not None]
    return _Looked(np.concatenate([part for part, _ in parts]), np.concatenate(mirrored) if flip else None)


def _input(pictures: LabelledPictures, index: int, variant: Variant) -> np.ndarray:
    try:
        return load_input(pictures.bodies[index], variant.input, max_pixels=MAX_PIXELS)[0]
    except RequestError as error:
        raise ConfigError(f"{pictures.name}: picture {index}: {error}") from None


def _rung_logits(manifest: Manifest, rung: str, looked: dict[str, _Looked]) -> Logits:
    """A rung's logits (n, classes); a committee's are the logarithm of its averaged probabilities."""
    committee = manifest.committee(rung)
    if committee is None:
        return looked[rung].upright
    views = list(_views(manifest, committee.members, looked, mirrored=committee.horizontal_flip))
    return log_probabilities(average(views, committee.temperature))


def _views(
    manifest: Manifest, members: Sequence[str], looked: dict[str, _Looked], *, mirrored: bool
) -> Iterator[Probabilities]:
    for member in members:
        temperature = manifest.variant(member).temperature
        yield softmax(looked[member].upright, temperature)
        flipped = looked[member].mirrored
        if mirrored and flipped is not None:
            yield softmax(flipped, temperature)
