"""`hawkvision certify`: a site's own certificates, from images of that site. The profile is unchanged.

A profile's certificates hold for traffic like its images. A site has other cameras, light and subjects; some hundred of
its own images give certificates that hold there. Scores, temperatures and the order of thresholds stay the profile's,
so all of the site's images serve for certification only.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from hawkvision.cascade.certification.predictions import accuracies, in_random_order, measure_accuracy, select
from hawkvision.cascade.certification.profile import Pair, Profile, design_sha256
from hawkvision.cascade.certification.profile_files import dump, load_profile_of, load_site
from hawkvision.cascade.certification.profiling import certify_condition, costs_of, paths_of, served_accuracy
from hawkvision.cascade.certification.site_certificates import SiteCertificates, SiteData, SitePair, SiteStage
from hawkvision.core.advice import advise
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.types import Tier
from hawkvision.model_zoo.calibration.certification import (
    DELTA,
    FEWEST_IMAGES,
    check_unseen,
    pair_evidence,
    share_of_delta,
    stages_by_tier,
)
from hawkvision.model_zoo.calibration.evidence import LabelReading, check_enough, clean_images, read_evidence
from hawkvision.model_zoo.calibration.model_runner import AnyImages, CascadePredictions, run_stages
from hawkvision.models.datasets import read_unlabelled
from hawkvision.models.manifest import Manifest, MeasuredAccuracy, load_manifest
from hawkvision.system.files import write_atomic
from hawkvision.tasks.kind import TaskKind, Truth
from hawkvision.tasks.registry import load_kind


def certify_site(
    task: str,
    data: Path,
    out: Path,
    *,
    labelled: bool = True,
    edges: Sequence[str] = (),
    delta: float = 0.05,
    compared: int = 1,
    profile: Path | None = None,
    reading: LabelReading = LabelReading(),  # noqa: B008 - immutable
    models: Path,
    cache: Path,
    today: date | None = None,
) -> SiteCertificates:
    """Certify a profile's pairs on a site's images and write the certificates to `out`.

    Args:
        task: the task, by the name of its manifest.
        data: labelled images (`hawkvision.models.datasets`), or with `labelled` False a folder of images.
        out: where `hawkvision edge up --certificates` will read them.
        labelled: whether labels are known; without them agreement with the reference stage is certified, which
            escalates more.
        edges: edge stages to certify; none means all pairs of the profile.
        delta: probability that a certificate is wrong. If `out` has certificates from these images for another
            design, it is halved once more than theirs.
        compared: configurations that were ever compared on these images; delta is divided by it.
        profile: None means the task's own.
        reading: how to read the labels, and what to do with images that a model was trained on.
        models: the folder of manifests.
        cache: the folder of built models.
        today: the date to write; None means the clock's.

    Raises:
        HawkVisionError: for bad data, too few images, missing models, or a profile made for other models.
    """
    manifest = load_manifest(task, models)
    kind = load_kind(manifest, models)
    known = load_profile_of(manifest, models, profile)
    known = msgspec.structs.replace(known, pairs=tuple(_pairs_of(known, edges)))
    images, truths = _site_images(data, kind, manifest, models, reading, labelled=labelled)
    known.check_labels(kind.labels)
    check_unseen(known, images, compared, str(data))
    design = design_sha256(known, known.pairs)
    openings = _openings_of(out, design, images.sha256)
    edge, datacenter = _stages_of(known)
    for name in (*edge, *datacenter):
        _check_fingerprint(known, manifest, name)
    chosen = clean_images(images)
    predictions = run_stages(
        kind, manifest, images, edge=edge, datacenter=datacenter, shrink=known.shrinks_images, cache=cache,
        chosen=chosen,
    )  # fmt: skip
    share = share_of_delta(delta, openings, compared)
    interval = share_of_delta(DELTA, openings, compared)
    certification = _SiteCertification(known, predictions, images, truths, share, interval)
    site = SiteCertificates(
        format=2,
        task=task,
        as_of=(today or date.today()).isoformat(),
        data=SiteData(
            name=images.name, sha256=images.sha256, n=len(chosen), labelled=labelled, openings=openings,
            compared=compared, design=design, shrinks_images=known.shrinks_images,
        ),
        stages=tuple(map(certification.stage, dict.fromkeys(name for p in known.pairs for name in _names_of(p)))),
        pairs=tuple(map(certification.pair, known.pairs)),
    )  # fmt: skip
    write_atomic(out, dump(site))
    return site


def _pairs_of(profile: Profile, edges: Sequence[str]) -> list[Pair]:
    """The pairs of the given edge stages; all pairs if none is given.

    Raises:
        ManifestError: if the profile lacks one, or has none.
    """
    pairs = [pair for pair in profile.pairs if not edges or pair.edge in edges]
    missing = set(edges) - {pair.edge for pair in pairs}
    if missing or not pairs:
        raise ManifestError(f"the profile has no pair for {sorted(missing)}; it has {[p.edge for p in profile.pairs]}")
    return pairs


def _site_images(
    data: Path, kind: TaskKind[Any], manifest: Manifest, models: Path, reading: LabelReading, *, labelled: bool
) -> tuple[AnyImages, Sequence[Truth | None]]:
    """The site's images, and the label of each; None where there is none.

    Raises:
        ConfigError: if they cannot be read, are too few, or are those that the cascade was trained on.
    """
    images: AnyImages
    truths: Sequence[Truth | None]
    if labelled:
        evidence = read_evidence(data, kind, manifest, models, reading)
        images, truths = evidence.images, evidence.truths
    else:
        images = read_unlabelled(data)
        truths = [None] * len(images)
    check_enough(data, images, FEWEST_IMAGES)
    if manifest.training is not None and manifest.training.data_sha256 == images.sha256:
        raise ConfigError(f"{data}: the cascade was trained on these very images; certify with images of the site")
    return images, truths


def _openings_of(out: Path, design: str, sha256: str) -> int:
    """The number of this opening of those images, by the certificates that are replaced."""
    if not out.exists():
        return 1
    try:
        before = load_site(out).data
    except ManifestError:
        return 1  # not a certificate of these images
    return before.openings + (before.design != design) if before.sha256 == sha256 else 1


def _names_of(pair: Pair) -> tuple[str, ...]:
    return (pair.edge, pair.best) if pair.intermediate is None else (pair.edge, pair.intermediate.name, pair.best)


def _stages_of(profile: Profile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stages of the profile's pairs at the edge, and in the datacenter."""
    named = {name for pair in profile.pairs for name in _names_of(pair)}
    edge, datacenter = stages_by_tier(profile)
    return edge, tuple(name for name in datacenter if name in named)


def _check_fingerprint(profile: Profile, manifest: Manifest, name: str) -> None:
    measured, present = profile.stage(name).fingerprint, manifest.fingerprint(name)
    if measured != present:
        raise ManifestError(
            f"the profile of {profile.task!r} was made for {name} with fingerprint {measured}, but the manifest has "
            f"{present}; make a new profile first: `{advise('calibrate', '--task', profile.task, '--data', 'IMAGES')}`"
        )


class _SiteCertification:
    """The site's images and the predictions of the profile's stages for them."""

    def __init__(
        self,
        profile: Profile,
        predictions: CascadePredictions,
        images: AnyImages,
        truths: Sequence[Truth | None],
        delta: float,
        interval_delta: float,
    ) -> None:
        """Take what was run; accuracies get intervals at confidence 1 − `interval_delta`."""
        self._profile = profile
        self._predictions = predictions
        self._sha256 = images.sha256
        self._truths = truths
        self._delta = delta
        self._interval_delta = interval_delta
        self._chosen = in_random_order(predictions.chosen)
        self._edge, self._datacenter = _stages_of(profile)

    def stage(self, name: str) -> SiteStage:
        """A stage with its accuracy at the site, if labels are known."""
        stage = self._profile.stage(name)
        accuracy = sent = None
        if all(truth is not None for truth in self._truths):
            accuracy = self._at_edge(name) if name in self._edge else None
            sent = self._in_datacenter(name) if name in self._datacenter else None
        return SiteStage(
            name=name,
            fingerprint=stage.fingerprint,
            temperature=stage.temperature,
            accuracy=accuracy or sent,
            sent_accuracy=msgspec.UNSET if accuracy is None or sent is None or sent == accuracy else sent,
        )

    def pair(self, pair: Pair) -> SitePair:
        """The certificates of one pair."""
        kind, between = self._predictions.kind, pair.intermediate
        evidence = pair_evidence(self._profile, pair, self._predictions, self._truths, self._chosen)
        condition = certify_condition(
            evidence, paths_of(pair), costs_of(self._profile, pair), pair.conditions[0].balanced.max_drop, self._delta,
            bounds_drop=kind.agreement_bounds_drop,
        )  # fmt: skip
        return SitePair(
            edge=pair.edge,
            best=pair.best,
            intermediate=None if between is None else between.name,
            score=pair.score,
            intermediate_score=None if between is None else between.score,
            conditions=(condition,),
        )

    def _at_edge(self, name: str) -> MeasuredAccuracy:
        temperature = self._profile.stage(name).temperature
        outputs = select(self._predictions.outputs(name, Tier.EDGE, temperature), self._chosen)
        right = accuracies(self._predictions.kind, outputs, select(self._truths, self._chosen))
        return measure_accuracy(right, self._sha256, self._interval_delta)

    def _in_datacenter(self, name: str) -> MeasuredAccuracy:
        served = self._predictions.served(name)
        return served_accuracy(
            self._predictions.kind, served, self._truths, self._chosen, self._sha256, self._interval_delta
        )
