"""`hawkvision calibrate`: run a cascade over labelled images and write its profile.

`held_out.json` beside the profile lists the images that nothing was fitted or certified on. `python -m loadgen
evaluate` tests the guarantees on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import Split, StagePredictions, in_random_order
from hawkvision.cascade.certification.profile import (
    TESTED_DROPS,
    ImageUse,
    Pair,
    Profile,
    ProfileData,
    ReceivedCondition,
    StageProfile,
    design_sha256,
    labels_digest,
)
from hawkvision.cascade.certification.profile_files import load_profile
from hawkvision.cascade.certification.profiling import profile_pair, profile_stage, served_accuracy
from hawkvision.core.errors import ConfigError
from hawkvision.core.types import Tier
from hawkvision.imaging.downscale import useful_side
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.model_zoo.calibration.certification import (
    DELTA,
    certified_anew,
    designing,
    read_certifying,
    share_of_delta,
    to_come,
    to_replace,
    write_profile,
)
from hawkvision.model_zoo.calibration.evidence import (
    LabelledData,
    LabelReading,
    TrainedImages,
    check_classes,
    check_enough,
    read_evidence,
)
from hawkvision.model_zoo.calibration.label_check import check_labels
from hawkvision.model_zoo.calibration.loss_simulation import condition_of, received_images
from hawkvision.model_zoo.calibration.model_runner import CascadePredictions, run_stages
from hawkvision.model_zoo.calibration.shrinking import check_shrinking
from hawkvision.model_zoo.calibration.splits import split_images
from hawkvision.models.datasets import LabelledImages
from hawkvision.models.image_sets.labelled_images import digests_of, shared
from hawkvision.models.manifest import Manifest, load_manifest
from hawkvision.system.files import write_atomic
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import load_kind

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
    allow_worse: bool = False,
    reading: LabelReading = LabelReading(),  # noqa: B008 - immutable
    models: Path,
    cache: Path,
) -> Profile:
    """Measure the cascade of `task` on labelled images and write its profile to `out`.

    Args:
        task: the task, by the name of its manifest.
        data: labelled images (`hawkvision.models.datasets`).
        out: the profile's file; `held_out.json` is written beside it. If it has a profile that was certified on the
            same images for other models or another split, δ is halved once more than that one's.
        edges: edge stages to certify; none means the cascade's.
        best: the stage to certify against; None means the cascade's best.
        intermediate: the stage between them; None means the cascade's last but one, if `best` is the cascade's best;
            "none" certifies two levels only.
        seed: of the split into profile, certification and held-out images.
        backend: what runs the models.
        datagram: whether to measure images that crossed a lossy link, too, for images of more than a few kilobytes.
        certify_data: labelled images used for certification only; None means a part of `data`, drawn by seed.
        compared: configurations that were ever compared on the certification images; δ is divided by it.
        allow_worse: whether the reference stage may be measurably worse than a stage below it.
        reading: how to read the labels, and what to do with images that a model was trained on.
        models, cache: the folders of manifests and of built models.

    Raises:
        HawkVisionError: for bad data, labels that cannot be right, unknown or missing models, or too few images.
    """
    manifest = load_manifest(task, models)
    kind = load_kind(manifest, models)
    evidence = read_evidence(data, kind, manifest, models, reading)
    images = evidence.images
    check_enough(data, images, FEWEST_IMAGES)
    check_classes(data, images, kind)
    if certify_data is not None and compared > 1:
        raise ConfigError("--compared is for images that served the design; those of --certify-data did not")
    certifying = None if certify_data is None else read_certifying(certify_data, kind, manifest, models, reading)
    if certifying is not None and (common := shared(certifying.images.bodies, digests_of(images.bodies))):
        raise ConfigError(f"{certify_data}: {common} of the images are in --data; expected others")
    split = split_images(manifest, images, seed, fit_on_trained=reading.trained is TrainedImages.FIT)
    edges, best = tuple(edges) or manifest.cascade.edge, best or manifest.best
    between = intermediate_stage(manifest, best, intermediate)
    before = _replaced(out, task)
    openings = _openings_of(before, images.sha256, manifest, (*edges, best, between), seed)
    delta = share_of_delta(DELTA, openings, compared)
    opened = None if before is None or certifying is None else before.use("certify", certifying.images.sha256)
    cascade = _Measuring(kind, manifest, evidence, split, seed, backend, cache, delta, allow_worse, certifying, opened)
    profile = cascade.profile(edges, best, between, datagram=datagram)
    if certifying is None:
        uses = _uses(images, split, compared, openings, design_sha256(profile, profile.pairs))
        profile = msgspec.structs.replace(profile, uses=uses)
    else:
        profile = cascade.certified(profile, certifying)
    write_profile(profile, manifest, models, out)
    rest = HeldOut(images.sha256, split.held_out.tolist())
    write_atomic(out.with_name("held_out.json"), msgspec.json.encode(rest) + b"\n")
    return profile


@dataclass(frozen=True, slots=True)
class _Measuring:
    """The labelled images and their split, and how the cascade runs on them."""

    kind: TaskKind[Any]
    manifest: Manifest
    evidence: LabelledData
    split: Split
    seed: int
    backend: BackendKind
    cache: Path
    delta: float
    allow_worse: bool
    certifying: LabelledData | None
    """What will certify, if not a part of these images."""
    opened: ImageUse | None
    """Their use for another design before."""

    def profile(self, edges: Sequence[str], best: str, between: str | None, *, datagram: bool) -> Profile:
        """The profile of all stages, with the certified pairs of each edge stage."""
        images, remote = self.evidence.images, (*(() if between is None else (between,)), best)
        shrinking = check_shrinking(
            self.kind, self.manifest, images, self.evidence.truths, stages=remote, backend=self.backend,
            cache=self.cache, chosen=self.split.profile,
        )  # fmt: skip
        shrink = shrinking is None or shrinking.allowed
        predictions = self._run(edges, remote, images, self.split.used(), shrink=shrink)
        served = {name: predictions.served(name) for name in remote}
        measured = {name: self._at_edge(name, predictions) for name in edges}
        check_labels(
            self.kind, [*(stage for _, stage in measured.values()), *(served[name] for name in remote[:-1])],
            served[best], self.evidence.truths, in_random_order(self.split.used()), images.name,
            allow_worse=self.allow_worse,
        )  # fmt: skip
        stages = {name: self._both(stage, served.get(name)) for name, (stage, _) in measured.items()}
        stages |= {name: self._remote(served[name], predictions) for name in remote if name not in stages}
        reused_ms = 0.0 if between is None else predictions.reused_ms(between, best)
        others = None if self.certifying is None else to_come(self.certifying, self.opened)
        pairs = [
            profile_pair(
                self.kind, measured[edge][1], served[best], self.evidence.truths, self.split,
                None if between is None else served[between], self.delta, reused_ms=reused_ms, others=others,
            )
            for edge in edges
        ]  # fmt: skip
        if datagram:
            pairs = self._over_links(pairs, served[best], shrink)
        return Profile(
            format=6,
            task=self.manifest.task,
            data=_describe(images, self.split, self.seed),
            labels_sha256=labels_digest(self.kind.labels),
            stages=tuple(stages.values()),
            pairs=tuple(pairs),
            shrinking=msgspec.UNSET if shrinking is None else shrinking,
        )

    def certified(self, profile: Profile, images: LabelledData) -> Profile:
        """The profile with certificates from other images."""
        if self.opened is not None:
            profile = msgspec.structs.replace(profile, uses=(*designing(profile), self.opened))
        return certified_anew(
            profile, self.kind, self.manifest, images, allow_worse=self.allow_worse, backend=self.backend,
            cache=self.cache,
        )  # fmt: skip

    def _run(
        self,
        edge: Sequence[str],
        datacenter: Sequence[str],
        images: LabelledImages,
        chosen: NDArray[np.intp],
        *,
        shrink: bool,
        name: str = "",
    ) -> CascadePredictions:
        return run_stages(
            self.kind, self.manifest, images, edge=edge, datacenter=datacenter, shrink=shrink, chosen=chosen,
            backend=self.backend, cache=self.cache, name=name,
        )  # fmt: skip

    def _at_edge(self, name: str, predictions: CascadePredictions) -> tuple[StageProfile, StagePredictions]:
        return self._stage(name, predictions, Tier.EDGE, None)

    def _remote(self, served: StagePredictions, predictions: CascadePredictions) -> StageProfile:
        """A stage of the datacenter alone, where its temperature is the manifest's."""
        return self._stage(served.name, predictions, Tier.DATACENTER, served)[0]

    def _stage(
        self, name: str, predictions: CascadePredictions, tier: Tier, served: StagePredictions | None
    ) -> tuple[StageProfile, StagePredictions]:
        models = {variant.name: variant.sha256 or "" for variant in self.manifest.members(name)}
        temperature = 1.0 if self.manifest.ensemble(name) else self.manifest.variant(name).temperature
        return profile_stage(
            self.kind, name, models, self.manifest.fingerprint(name), predictions.raw(name, tier),
            self.evidence.truths, self.split, self.evidence.images.sha256, predictions.cost_ms(name, tier), self.delta,
            served, temperature, partial(predictions.outputs, name, tier),
        )  # fmt: skip

    def _both(self, stage: StageProfile, served: StagePredictions | None) -> StageProfile:
        """A stage of the edge, with its accuracy in the datacenter too if that runs it and differs."""
        if served is None:
            return stage
        sent = served_accuracy(
            self.kind, served, self.evidence.truths, self.split.certify, self.evidence.images.sha256, self.delta
        )
        return stage if sent == stage.accuracy else msgspec.structs.replace(stage, sent_accuracy=sent)

    def _over_links(self, pairs: Sequence[Pair], originals: StagePredictions, shrink: bool) -> list[Pair]:
        """The pairs with thresholds for images that crossed a lossy link, for which no intermediate stage runs."""
        found: dict[str, list[ReceivedCondition]] = {pair.edge: [] for pair in pairs}
        used = np.union1d(self.split.profile, self.split.certify)
        names = (*found, pairs[0].best, *(p.intermediate.name for p in pairs if p.intermediate is not None))
        side = useful_side(member.input for name in names for member in self.manifest.members(name))
        for arrived in received_images(self.evidence.images, used, self.seed, side):
            name = f"quality {arrived.quality}, from {arrived.band.low:.0%} on"
            predictions = self._run(
                [*found], [pairs[0].best], arrived.images, arrived.reached, shrink=shrink, name=name
            )
            for pair in pairs:
                condition = condition_of(arrived, predictions, originals, self.evidence.truths, pair)
                found[pair.edge].append(condition)
        return [msgspec.structs.replace(pair, received=tuple(found[pair.edge])) for pair in pairs]


def intermediate_stage(manifest: Manifest, best: str, intermediate: str | None) -> str | None:
    """The requested stage between edge and best, or else the cascade's."""
    if intermediate is not None:
        return None if intermediate == "none" else intermediate
    dc = manifest.cascade.dc
    return dc[-2] if len(dc) > 1 and best == dc[-1] else None


def _replaced(out: Path, task: str) -> Profile | None:
    """The profile of the task that is replaced, if there is one."""
    found = to_replace(out, load_profile)
    return found if found is not None and found.task == task else None


def _openings_of(
    before: Profile | None, sha256: str, manifest: Manifest, stages: Sequence[str | None], seed: int
) -> int:
    """How many designs the certification part of these images has been opened for, by the profile that is replaced.

    A design is another one if its models, the split or the drops that are tested are. A choice between designs by their
    certificates is paid for with each of them. Measuring the same one again does not count.
    """
    known = None if before is None else before.use("certify", sha256)
    if before is None or known is None:
        return 1
    models = {name: manifest.fingerprint(name) for name in stages if name is not None}
    same = before.data.seed == seed and {stage.name: stage.fingerprint for stage in before.stages} == models
    for condition in (condition for pair in before.pairs for condition in pair.conditions):
        same &= {c.max_drop for c in (condition.balanced, *condition.certificates)} <= {*TESTED_DROPS}
    return (known.openings or 1) + (not same)


def _uses(images: LabelledImages, split: Split, compared: int, openings: int, design: str) -> tuple[ImageUse, ...]:
    name, sha256 = images.name, images.sha256
    return (
        ImageUse(purpose="fit", name=name, sha256=sha256, n=len(split.profile)),
        ImageUse(
            purpose="certify",
            name=name,
            sha256=sha256,
            n=len(split.certify),
            openings=openings,
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
        images=digests_of(images.bodies),
    )
