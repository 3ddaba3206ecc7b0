"""`hawkvision calibrate`: run a cascade over labelled images and write its profile.

`held_out.json` beside the profile lists the images that nothing was fitted or certified on. `python -m loadgen
evaluate` tests the guarantees on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from hawkvision.cascade.certification.predictions import Split, StagePredictions
from hawkvision.cascade.certification.profile import (
    ImageUse,
    Pair,
    Profile,
    ProfileData,
    ReceivedCondition,
    StageProfile,
    design_sha256,
)
from hawkvision.cascade.certification.profiling import profile_pair, profile_stage
from hawkvision.core.errors import ConfigError
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.model_zoo.calibration.certification import (
    DELTA,
    certified_anew,
    read_certifying,
    share_of_delta,
    write_profile,
)
from hawkvision.model_zoo.calibration.loss_simulation import condition_of, received_images
from hawkvision.model_zoo.calibration.model_runner import CascadePredictions, ModelExecution, run_stages
from hawkvision.model_zoo.calibration.splits import split_images
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import Manifest, load_labels, load_manifest
from hawkvision.system.files import write_atomic

FEWEST_IMAGES: Final = 100
"""With fewer images nothing useful can be certified: a drop of ε needs at least 3/ε images."""


class HeldOut(msgspec.Struct, frozen=True):
    """The indices of images that a profile did not use, and the SHA-256 of their file."""

    data_sha256: str
    indices: list[int]


def calibrate(
    task: str,
    data: Path,
    out: Path,
    *,
    edges: Sequence[str] = (),
    best: str | None = None,
    intermediate: str | None = None,
    seed: int,
    backend: BackendKind = "onnxruntime",
    datagram: bool = False,
    certify_data: Path | None = None,
    compared: int = 1,
    models: Path,
    cache: Path,
) -> Profile:
    """Measure the cascade of `task` on labelled images and write its profile to `out`.

    Args:
        task: the task, by the name of its manifest.
        data: npz file or directory (`hawkvision.models.datasets`).
        out: the profile's file; `held_out.json` is written beside it.
        edges: edge stages to certify; none means the cascade's.
        best: the stage to certify against; None means the cascade's best.
        intermediate: the stage between them; None means the cascade's last but one, if `best` is the cascade's best;
            "none" certifies two levels only.
        seed: of the split into profile, certification and held-out images.
        backend: what runs the models.
        datagram: whether to measure images that crossed a lossy link as well, which takes some twenty times as long.
            Images of a few kilobytes do not need it: they arrive whole or not at all.
        certify_data: labelled images used for certification only; None means a part of `data`, drawn by seed.
        compared: configurations that were ever compared on the certification images; δ is divided by it.
        models: the folder of manifests.
        cache: the folder of built models.

    Raises:
        HawkVisionError: for bad data, unknown or missing models, or too few images.
    """
    manifest = load_manifest(task, models)
    images = read_images(data, load_labels(manifest, models))
    if len(images) < FEWEST_IMAGES:
        raise ConfigError(f"{data}: {len(images)} images certify nothing; expected at least {FEWEST_IMAGES}")
    if certify_data is not None and compared > 1:
        raise ConfigError("--compared is for images that served the design; those of --certify-data did not")
    certifying = None if certify_data is None else read_certifying(certify_data, manifest, models)
    if certifying is not None and certifying.sha256 == images.sha256:
        raise ConfigError(f"{certify_data}: the same images as --data; expected others, used for nothing else")
    delta = share_of_delta(DELTA, 1, compared)
    split = split_images(manifest, images, seed)
    edges, best = tuple(edges) or manifest.cascade.edge, best or manifest.best
    measuring = _Measuring(manifest, images, split, seed, backend, cache, delta)
    stages, pairs = measuring.cascade(edges, best, intermediate_stage(manifest, best, intermediate), datagram=datagram)
    profile = Profile(format=5, task=task, data=_describe(images, split, seed), stages=stages, pairs=pairs)
    if certifying is None:
        uses = _uses(images, split, compared, design_sha256(profile, profile.pairs))
        profile = msgspec.structs.replace(profile, uses=uses)
    else:
        profile = certified_anew(profile, manifest, certifying, datagram=datagram, backend=backend, cache=cache)
    write_profile(profile, manifest, models, out)
    held_out = HeldOut(images.sha256, split.held_out.tolist())
    write_atomic(out.with_name("held_out.json"), msgspec.json.encode(held_out) + b"\n")
    return profile


@dataclass(frozen=True, slots=True)
class _Measuring:
    """The labelled images and their split, and how the cascade runs on them."""

    manifest: Manifest
    images: LabelledImages
    split: Split
    seed: int
    backend: BackendKind
    cache: Path
    delta: float

    def cascade(
        self, edges: Sequence[str], best: str, between: str | None, *, datagram: bool
    ) -> tuple[tuple[StageProfile, ...], tuple[Pair, ...]]:
        """The profiles of all stages, and the certified pairs of each edge stage."""
        stages = tuple(dict.fromkeys((*edges, *(() if between is None else (between,)), best)))
        predictions = run_stages(
            self.manifest,
            stages,
            self.images,
            execution=ModelExecution(self.backend),
            cache=self.cache,
            chosen=self.split.used(),
        )
        measured = {name: self._stage(name, predictions) for name in stages}
        halfway = None if between is None else predictions.served(between)
        reused_ms = 0.0 if between is None else predictions.reused_ms(between, best)
        pairs = [
            profile_pair(
                measured[edge][1], measured[best][1], self.images.labels, self.split, halfway, self.delta,
                reused_ms=reused_ms,
            )
            for edge in edges
        ]  # fmt: skip
        if datagram:
            pairs = self._over_links(pairs, predictions)
        return tuple(stage for stage, _ in measured.values()), tuple(pairs)

    def _stage(self, name: str, predictions: CascadePredictions) -> tuple[StageProfile, StagePredictions]:
        models = {variant.name: variant.sha256 or "" for variant in self.manifest.members(name)}
        return profile_stage(
            name, models, self.manifest.fingerprint(name), predictions.logits(name), self.images.labels, self.split,
            self.images.sha256, predictions.cost_ms(name), self.delta,
        )  # fmt: skip

    def _over_links(self, pairs: Sequence[Pair], originals: CascadePredictions) -> list[Pair]:
        """The pairs with the conditions of images that crossed a lossy link, for which no intermediate stage runs."""
        found: dict[str, list[ReceivedCondition]] = {pair.edge: [] for pair in pairs}
        stages = tuple(dict.fromkeys([*found, pairs[0].best]))
        for arrived in received_images(self.images, np.union1d(self.split.profile, self.split.certify), self.seed):
            predictions = run_stages(
                self.manifest,
                stages,
                arrived.images,
                execution=ModelExecution(self.backend),
                cache=self.cache,
                chosen=arrived.reached,
                name=f"quality {arrived.quality}, from {arrived.band.low:.0%} on",
            )
            for pair in pairs:
                balanced = pair.conditions[0].balanced.max_drop
                found[pair.edge].append(
                    condition_of(
                        arrived, predictions, originals, edge=pair.edge, best=pair.best, kind=pair.score,
                        balanced=balanced, split=self.split, delta=self.delta,
                    )
                )  # fmt: skip
        return [msgspec.structs.replace(pair, received=tuple(found[pair.edge])) for pair in pairs]


def intermediate_stage(manifest: Manifest, best: str, intermediate: str | None) -> str | None:
    """The requested stage between edge and best, or else the cascade's."""
    if intermediate is not None:
        return None if intermediate == "none" else intermediate
    dc = manifest.cascade.dc
    return dc[-2] if len(dc) > 1 and best == dc[-1] else None


def _uses(images: LabelledImages, split: Split, compared: int, design: str) -> tuple[ImageUse, ...]:
    name, sha256 = images.name, images.sha256
    return (
        ImageUse(purpose="fit", name=name, sha256=sha256, n=len(split.profile)),
        ImageUse(
            purpose="certify",
            name=name,
            sha256=sha256,
            n=len(split.certify),
            openings=1,
            compared=compared,
            design=design,
        ),
        ImageUse(purpose="test", name=name, sha256=sha256, n=len(split.held_out)),
    )


def _describe(images: LabelledImages, split: Split, seed: int) -> ProfileData:
    return ProfileData(
        name=images.name,
        sha256=images.sha256,
        seed=seed,
        profile=len(split.profile),
        certify=len(split.certify),
        held_out=len(split.held_out),
    )
