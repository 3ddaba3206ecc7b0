"""`hawkvision calibrate`: run a cascade over labelled images, and write what was measured and certified.

Beside the profile goes `held_out.json`, the numbers of the images that nothing was fitted or certified on, so that
`python -m loadgen evaluate` can test the guarantee on them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from hawkvision.model_zoo.calibration.model_runner import CascadePredictions, run_stages
from hawkvision.model_zoo.calibration.splits import split_images
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import Manifest, load_labels, load_manifest
from hawkvision.system.files import write_atomic

FEWEST_IMAGES: Final = 100
"""Below this nothing can be certified: a drop of ε needs at least 3/ε images."""


class HeldOut(msgspec.Struct, frozen=True):
    """The images kept out of a profile, by number, and the file they are numbers of."""

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
        task: whose manifest and models are meant.
        data: npz file or directory (`hawkvision.models.datasets`).
        out: the profile; `held_out.json` goes beside it.
        edges: edge stages to certify; none means the cascade's.
        best: the stage to certify against; None means the cascade's best.
        middle: the stage between them; None means the cascade's last but one, if `best` is the cascade's best; "none"
            certifies two levels only.
        seed: of the split into profile, certification and held-out images.
        backend: what runs the models.
        lossy: whether to measure them on images that crossed a lossy link as well, which takes some twenty times as
            long. For images of a few kilobytes it makes no sense: those arrive whole or not at all.
        certify_data: labelled images that serve nothing but certifying; None means a part of `data`, drawn by seed.
        compared: configurations that were ever compared on the images that certify; δ is divided by it.
        models: where manifests lie.
        cache: where built models lie.

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
    edges, best = tuple(edges) or manifest.cascade.edge, best or manifest.best
    between = intermediate_stage(manifest, best, intermediate)
    split = split_images(manifest, images, seed)
    stages = tuple(dict.fromkeys((*edges, *(() if between is None else (between,)), best)))
    looks = run_stages(manifest, stages, images, backend=backend, cache=cache, chosen=split.used())
    measured: dict[str, tuple[StageProfile, StagePredictions]] = {}
    for name in stages:
        models_of = {variant.name: variant.sha256 or "" for variant in manifest.members(name)}
        measured[name] = profile_stage(
            name, models_of, manifest.fingerprint(name), looks.logits(name), images.labels, split, images.sha256,
            looks.cost_ms(name), delta,
        )  # fmt: skip
    halfway = None if between is None else looks.served(between)
    reused_ms = 0.0 if between is None else looks.reused_ms(between, best)
    pairs = [
        profile_pair(measured[edge][1], measured[best][1], images.labels, split, halfway, delta, reused_ms=reused_ms)
        for edge in edges
    ]
    if datagram:
        pairs = _over_links(pairs, manifest, images, split, looks, seed, backend, cache, delta)
    profile = Profile(
        format=5,
        task=task,
        data=_describe(images, split, seed),
        stages=tuple(stage for stage, _ in measured.values()),
        pairs=tuple(pairs),
    )
    if certifying is None:
        uses = _uses(images, split, compared, design_sha256(profile, profile.pairs))
        profile = msgspec.structs.replace(profile, uses=uses)
    else:
        profile = certified_anew(profile, manifest, certifying, datagram=datagram, backend=backend, cache=cache)
    write_profile(profile, manifest, models, out)
    held_out = HeldOut(images.sha256, split.held_out.tolist())
    write_atomic(out.with_name("held_out.json"), msgspec.json.encode(held_out) + b"\n")
    return profile


def _over_links(
    pairs: Sequence[Pair],
    manifest: Manifest,
    images: LabelledImages,
    split: Split,
    originals: CascadePredictions,
    seed: int,
    backend: BackendKind,
    cache: Path,
    delta: float,
) -> list[Pair]:
    """The pairs with the conditions of images that crossed a lossy link. The intermediate stage is not asked for
    those.
    """
    found: dict[str, list[ReceivedCondition]] = {pair.edge: [] for pair in pairs}
    stages = tuple(dict.fromkeys([*found, pairs[0].best]))
    for arrived in received_images(images, np.union1d(split.profile, split.certify), seed):
        name = f"quality {arrived.quality}, from {arrived.band.low:.0%} on"
        looks = run_stages(
            manifest, stages, arrived.images, backend=backend, cache=cache, chosen=arrived.reached, name=name
        )  # fmt: skip
        for pair in pairs:
            balanced = pair.conditions[0].balanced.max_drop
            found[pair.edge].append(
                condition_of(
                    arrived, looks, originals, edge=pair.edge, best=pair.best, kind=pair.score, balanced=balanced,
                    split=split, delta=delta,
                )
            )  # fmt: skip
    return [msgspec.structs.replace(pair, received=tuple(found[pair.edge])) for pair in pairs]


def intermediate_stage(manifest: Manifest, best: str, intermediate: str | None) -> str | None:
    """The stage between edge and best that was asked for, or that the cascade has there."""
    if intermediate is not None:
        return None if intermediate == "none" else intermediate
    dc = manifest.cascade.dc
    return dc[-2] if len(dc) > 1 and best == dc[-1] else None


def _uses(images: LabelledImages, split: Split, compared: int, design: str) -> tuple[ImageUse, ...]:
    name, sha256 = images.name, images.sha256
    return (
        ImageUse(purpose="fit", name=name, sha256=sha256, n=len(split.profile)),
        ImageUse(
            purpose="certify", name=name, sha256=sha256, n=len(split.certify), looks=1, compared=compared, design=design
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
