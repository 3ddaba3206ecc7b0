"""Certifying a profile on images that had no part in its design, or paying with δ where they had.

A certificate is wrong with probability at most δ only if its images did not influence what is certified. So the design
(models, temperatures, scores, thresholds in their order, the ε of `balanced`) is taken from a profile as it stands. The
labels are opened once, for everything: accuracies and certificates. The profile records the cost and the design:

    images used for nothing else   δ, halved for every further design that they are opened for
    images of the design           δ / K, for the K configurations that were ever compared on them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.balanced import Certifying
from hawkvision.cascade.certification.predictions import (
    Scored,
    StagePredictions,
    accuracies,
    in_random_order,
    make_evidence,
    measure_accuracy,
    select,
)
from hawkvision.cascade.certification.profile import (
    ImageUse,
    Pair,
    Profile,
    StageProfile,
    design_sha256,
)
from hawkvision.cascade.certification.profile_files import dump, load_profile
from hawkvision.cascade.certification.profiling import (
    certify_condition,
    costs_of,
    paths_of,
    right_answers,
    served_accuracy,
)
from hawkvision.cascade.confidence.calibration import expected_calibration_error
from hawkvision.core.advice import advise
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.types import Tier
from hawkvision.guarantee.evidence import Evidence
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.model_zoo.building.manifest_writer import with_profile
from hawkvision.model_zoo.calibration.evidence import LabelledData, LabelReading, check_enough, read_evidence
from hawkvision.model_zoo.calibration.label_check import check_labels
from hawkvision.model_zoo.calibration.model_runner import AnyImages, CascadePredictions, run_stages
from hawkvision.model_zoo.calibration.splits import split_again
from hawkvision.models.datasets import LabelledImages
from hawkvision.models.image_sets.labelled_images import shared
from hawkvision.models.manifest import Manifest, load_manifest
from hawkvision.system.files import sha256_of, write_atomic
from hawkvision.tasks.kind import TaskKind, Truth
from hawkvision.tasks.registry import load_kind

Document = TypeVar("Document")

DELTA: Final = 0.05
"""Probability that a certificate is wrong, before any division."""

FEWEST_IMAGES: Final = 50
"""With fewer images no drop below 6 % can be certified, whatever their labels."""


def share_of_delta(delta: float, openings: int, compared: int) -> float:
    """The part of δ for the given opening, with so many configurations compared on the same images."""
    return delta / compared / 2.0 ** (openings - 1)


def openings_of(design: str, known: ImageUse | None) -> int:
    """The number of this opening. Certifying the same design again does not count."""
    if known is None:
        return 1
    return (known.openings or 1) + (known.design != design)


def to_come(evidence: LabelledData, known: ImageUse | None) -> Certifying:
    """What these images will certify another design with; `known` is their use for the one before."""
    openings, compared = (0, 1) if known is None else (known.openings or 1, known.compared)
    return Certifying(len(evidence.clean), share_of_delta(DELTA, openings + 1, compared))


def to_replace(path: Path, load: Callable[[Path], Document]) -> Document | None:
    """The profile or certificates at `path`, which say how often their images were opened; None if there is no file.

    Raises:
        ManifestError: if they cannot be read.
    """
    try:
        return load(path) if path.exists() else None
    except ManifestError as error:
        raise ManifestError(
            f"{error}. It is not replaced, because it says how often its images were opened: once it is moved away, "
            "take other images, or `--compared K`, the number of designs that were ever certified on them"
        ) from None


def check_unseen(profile: Profile, images: AnyImages, compared: int, where: str) -> None:
    """Refuse images that served the design, unless `compared` says how many configurations were compared on them.

    Raises:
        ConfigError: if they, or some of them, did and `compared` is 1.
    """
    if compared > 1:
        return
    known, sha256 = profile.data.images, images.sha256
    designed = sha256 == profile.data.sha256 or profile.use("design", sha256) or profile.use("fit", sha256)
    count = len(images) if designed or not isinstance(known, str) else shared(images.bodies, known)
    if designed or (isinstance(known, str) and count):
        raise ConfigError(
            f"{where}: {count} of these {len(images)} images served the design of the profile; expected images used "
            "for nothing else, or `--compared K`, the number of configurations that were ever compared on them"
        )


def certify_design(
    task: str,
    design: Path,
    data: Path,
    out: Path,
    *,
    compared: int = 1,
    allow_worse: bool = False,
    reading: LabelReading = LabelReading(),  # noqa: B008 - immutable
    models: Path,
    cache: Path,
) -> Profile:
    """Certify the design of a profile on labelled images and write the profile with those certificates to `out`.

    Raises:
        HawkVisionError: as `certified_anew`, for bad data, or too few images.
    """
    manifest = load_manifest(task, models)
    kind = load_kind(manifest, models)
    evidence = read_certifying(data, kind, manifest, models, reading)
    known = load_profile(design)
    profile = certified_anew(known, kind, manifest, evidence, compared=compared, allow_worse=allow_worse, cache=cache)
    write_profile(profile, manifest, models, out)
    return profile


def read_certifying(
    data: Path, kind: TaskKind[Any], manifest: Manifest, models: Path, reading: LabelReading
) -> LabelledData:
    """Labelled images to certify with.

    Raises:
        ConfigError: if they cannot be read, or are too few to certify anything.
    """
    evidence = read_evidence(data, kind, manifest, models, reading)
    check_enough(data, evidence.images, FEWEST_IMAGES)
    return evidence


def write_profile(profile: Profile, manifest: Manifest, models: Path, out: Path) -> None:
    """Write a profile. If it replaces the one that the manifest pins, pin the new one."""
    write_atomic(out, dump(profile))
    folder = models / manifest.task
    if manifest.profile_sha256 is None or out.resolve() != (folder / "profile.json").resolve():
        return
    path = folder / "manifest.toml"
    write_atomic(path, with_profile(path.read_text(encoding="utf-8"), sha256_of(out.read_bytes())).encode())


def certified_anew(
    design: Profile,
    kind: TaskKind[Any],
    manifest: Manifest,
    evidence: LabelledData,
    *,
    compared: int = 1,
    delta: float = DELTA,
    allow_worse: bool = False,
    backend: BackendKind = "onnxruntime",
    cache: Path,
) -> Profile:
    """The profile with accuracies and certificates from these images alone; its fitted values and plan stay.

    Of the images that the design was fitted on, only the certification part is used, and `compared` must be given.

    Args:
        design: a profile whose models are the manifest's.
        kind: of the task.
        manifest: of the task.
        evidence: the images to certify with; those that a model was trained on are not used.
        compared: configurations that were compared on these images.
        delta: probability that a certificate is wrong, before it is divided.
        allow_worse: whether the reference stage may be measurably worse than a stage below it.
        backend: what runs the models.
        cache: where built models lie.

    Raises:
        HawkVisionError: if models or labels differ from the design's or are missing, or the images served the design.
    """
    images = evidence.images
    check_models(design, manifest)
    design.check_labels(kind.labels)
    design = msgspec.structs.replace(design, uses=design.uses or designing(design))
    check_unseen(design, images, compared, images.name)
    same = images.sha256 == design.data.sha256
    chosen = split_again(manifest, images, design.data).certify if same else evidence.clean
    use = _certifying_use(design, images, len(chosen), compared)
    edge, datacenter = stages_by_tier(design)
    predictions = run_stages(
        kind, manifest, images, edge=edge, datacenter=datacenter, shrink=design.shrinks_images, backend=backend,
        cache=cache, chosen=chosen,
    )  # fmt: skip
    for pair in design.pairs:
        below = [edge_predictions(design, pair.edge, predictions)]
        below += [predictions.served(pair.intermediate.name)] if pair.intermediate is not None else []
        best, order = predictions.served(pair.best), in_random_order(chosen)
        check_labels(kind, below, best, evidence.truths, order, images.name, allow_worse=allow_worse)
    share = share_of_delta(delta, use.openings or 1, compared)
    certification = _LabelledCertification(kind, design, predictions, evidence, chosen, share)
    return msgspec.structs.replace(
        design,
        uses=(*(other for other in design.uses if other.purpose != "certify" or other.sha256 != images.sha256), use),
        stages=tuple(map(certification.stage, design.stages)),
        pairs=tuple(map(certification.pair, design.pairs)),
    )


def check_models(design: Profile, manifest: Manifest) -> None:
    """Refuse a design whose models are not the manifest's.

    Raises:
        ManifestError: if a fingerprint differs.
    """
    for stage in design.stages:
        if stage.fingerprint != manifest.fingerprint(stage.name):
            raise ManifestError(
                f"the profile of {design.task!r} was made for {stage.name} with fingerprint {stage.fingerprint}, but "
                f"the manifest has {manifest.fingerprint(stage.name)}; make a new design with "
                f"`{advise('calibrate', '--task', design.task, '--data', 'IMAGES')}`"
            )


def _certifying_use(design: Profile, images: LabelledImages, n: int, compared: int) -> ImageUse:
    """What the profile records of this opening of the images."""
    fixed = design_sha256(design, design.pairs)
    return ImageUse(
        purpose="certify", name=images.name, sha256=images.sha256, n=n,
        openings=openings_of(fixed, design.use("certify", images.sha256)), compared=compared, design=fixed,
    )  # fmt: skip


def designing(profile: Profile) -> tuple[ImageUse, ...]:
    """The uses of a profile's own images if it is certified on others: all of them may have served the design."""
    data = profile.data
    whole = data.profile + data.certify + data.held_out
    return (
        ImageUse(purpose="fit", name=data.name, sha256=data.sha256, n=data.profile),
        ImageUse(purpose="design", name=data.name, sha256=data.sha256, n=whole),
        ImageUse(purpose="test", name=data.name, sha256=data.sha256, n=data.held_out),
    )


def stages_by_tier(profile: Profile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stages that edge nodes run, and those that the datacenter runs."""
    edge = dict.fromkeys(pair.edge for pair in profile.pairs)
    datacenter = dict.fromkeys(pair.best for pair in profile.pairs)
    datacenter |= dict.fromkeys(stage.name for stage in profile.stages if stage.name not in edge)
    datacenter |= dict.fromkeys(pair.intermediate.name for pair in profile.pairs if pair.intermediate is not None)
    return tuple(edge), tuple(datacenter)


def edge_predictions(profile: Profile, name: str, predictions: CascadePredictions) -> StagePredictions:
    """An edge stage as it is served by the profile."""
    stage = profile.stage(name)
    return StagePredictions(name, predictions.outputs(name, Tier.EDGE, stage.temperature), stage.cost_ms)


def pair_evidence(
    profile: Profile,
    pair: Pair,
    predictions: CascadePredictions,
    truths: Sequence[Truth | None],
    chosen: NDArray[np.intp],
) -> Evidence:
    """The images `chosen` as evidence on one pair, each stage as it is served by the profile."""
    edge, between = edge_predictions(profile, pair.edge, predictions), pair.intermediate
    return make_evidence(
        predictions.kind, Scored(edge, pair.score), predictions.served(pair.best), truths, chosen,
        None if between is None else Scored(predictions.served(between.name), between.score),
    )  # fmt: skip


class _LabelledCertification:
    """The certification images with their labels and the predictions of a design's stages."""

    def __init__(
        self,
        kind: TaskKind[Any],
        design: Profile,
        predictions: CascadePredictions,
        evidence: LabelledData,
        chosen: NDArray[np.intp],
        delta: float,
    ) -> None:
        self._kind = kind
        self._design = design
        self._predictions = predictions
        self._images = evidence.images
        self._truths = evidence.truths
        self._chosen = in_random_order(chosen)
        self._delta = delta
        self._edge, self._datacenter = stages_by_tier(design)

    def stage(self, stage: StageProfile) -> StageProfile:
        """The stage with its accuracy on these images."""
        kind, tier = self._kind, Tier.EDGE if stage.name in self._edge else Tier.DATACENTER
        outputs = select(self._predictions.outputs(stage.name, tier, stage.temperature), self._chosen)
        right = accuracies(kind, outputs, select(self._truths, self._chosen))
        error = expected_calibration_error(kind.score_all(outputs, kind.scores[0]), right)
        accuracy, sent = measure_accuracy(right, self._images.sha256, self._delta), None
        if stage.name in self._datacenter:
            served = self._predictions.served(stage.name)
            sent = served_accuracy(kind, served, self._truths, self._chosen, self._images.sha256, self._delta)
        if sent is not None and tier is Tier.DATACENTER:
            accuracy = sent
        return msgspec.structs.replace(
            stage,
            accuracy=accuracy,
            sent_accuracy=msgspec.UNSET if sent is None or sent == accuracy else sent,
            calibration_error=round(error, 6),
        )

    def pair(self, pair: Pair) -> Pair:
        """The pair with certificates from these images."""
        found = pair_evidence(self._design, pair, self._predictions, self._truths, self._chosen)
        planned, costs = pair.conditions[0].balanced, costs_of(self._design, pair)
        condition = certify_condition(found, paths_of(pair), costs, planned.max_drop, self._delta, planned)
        return msgspec.structs.replace(pair, conditions=(condition,), right=right_answers(found))
