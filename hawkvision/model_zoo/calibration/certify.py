"""`hawkvision certify`: a site's own certificates, from images of that site. The profile is unchanged.

A profile's certificates hold for traffic like its images. A site has other cameras, light and subjects; some hundred of
its own images give certificates that hold there. Scores, temperatures and the order of thresholds stay the profile's,
so all of the site's images serve for certification only.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np

from hawkvision.cascade.certification.certificate import Method
from hawkvision.cascade.certification.predictions import StagePredictions, make_sample, measure_accuracy
from hawkvision.cascade.certification.profile import Pair, Profile, design_sha256
from hawkvision.cascade.certification.profile_files import dump, load_profile_of, load_site
from hawkvision.cascade.certification.profiling import certify_condition, costs_of, paths_of
from hawkvision.cascade.certification.site_certificates import SiteCertificates, SiteData, SitePair, SiteStage
from hawkvision.core.advice import advise
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.model_zoo.calibration.certification import FEWEST_IMAGES, check_unseen, share_of_delta
from hawkvision.model_zoo.calibration.model_runner import AnyImages, CascadePredictions, run_stages
from hawkvision.models.datasets import LabelledImages, read_images, read_unlabelled
from hawkvision.models.manifest import Manifest, load_labels, load_manifest
from hawkvision.system.files import write_atomic
from hawkvision.tasks.class_scores import softmax


def certify_site(
    task: str,
    data: Path,
    out: Path,
    *,
    labelled: bool = True,
    edges: Sequence[str] = (),
    delta: float = 0.05,
    betting: bool = False,
    compared: int = 1,
    profile: Path | None = None,
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
        betting: certify by betting instead of the exact test; somewhat weaker, with fewer assumptions.
        compared: configurations that were ever compared on these images; delta is divided by it.
        profile: None means the task's own.
        models: the folder of manifests.
        cache: the folder of built models.
        today: the date to write; None means the clock's.

    Raises:
        HawkVisionError: for bad data, too few images, missing models, or a profile made for other models.
    """
    if betting and not labelled:
        raise ConfigError("betting needs labels: agreement is certified by a test of its own")
    manifest = load_manifest(task, models)
    known = load_profile_of(manifest, models, profile)
    pairs = _pairs_of(known, edges)
    images = _site_images(data, manifest, models, labelled=labelled)
    check_unseen(known, images.sha256, compared, str(data))
    design = design_sha256(known, pairs)
    openings = _openings_of(out, design, images.sha256)
    stages = tuple(dict.fromkeys(name for pair in pairs for name in _stages_of(pair)))
    for name in stages:
        _check_fingerprint(known, manifest, name)
    predictions = run_stages(manifest, stages, images, cache=cache)
    method = Method.AGREEMENT if not labelled else Method.BETTING if betting else Method.EXACT
    share = share_of_delta(delta, openings, compared)
    site = SiteCertificates(
        format=2,
        task=task,
        as_of=(today or date.today()).isoformat(),
        data=SiteData(
            name=images.name, sha256=images.sha256, n=len(images), labelled=labelled, openings=openings,
            compared=compared, design=design,
        ),
        stages=tuple(_site_stage(known, predictions, name, images) for name in stages),
        pairs=tuple(_site_pair(known, pair, predictions, images, share, method) for pair in pairs),
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


def _site_images(data: Path, manifest: Manifest, models: Path, *, labelled: bool) -> AnyImages:
    """The site's images.

    Raises:
        ConfigError: if they cannot be read, are too few, or are those that the cascade was trained on.
    """
    images = read_images(data, load_labels(manifest, models)) if labelled else read_unlabelled(data)
    if len(images) < FEWEST_IMAGES:
        raise ConfigError(f"{data}: {len(images)} images certify nothing; expected at least {FEWEST_IMAGES}")
    if manifest.training is not None and manifest.training.data_sha256 == images.sha256:
        raise ConfigError(f"{data}: the cascade was trained on these very images; certify with images of the site")
    return images


def _openings_of(out: Path, design: str, sha256: str) -> int:
    """The number of this opening of those images, by the certificates that are replaced."""
    if not out.exists():
        return 1
    try:
        before = load_site(out).data
    except ManifestError:
        return 1  # not a certificate of these images
    return before.openings + (before.design != design) if before.sha256 == sha256 else 1


def _stages_of(pair: Pair) -> tuple[str, ...]:
    return (pair.edge, pair.best) if pair.intermediate is None else (pair.edge, pair.intermediate.name, pair.best)


def _check_fingerprint(profile: Profile, manifest: Manifest, name: str) -> None:
    measured, present = profile.stage(name).fingerprint, manifest.fingerprint(name)
    if measured != present:
        raise ManifestError(
            f"the profile of {profile.task!r} was made for {name} with fingerprint {measured}, but the manifest has "
            f"{present}; make a new profile first: `{advise('calibrate', '--task', profile.task, '--data', 'IMAGES')}`"
        )


def _predictions_of(profile: Profile, predictions: CascadePredictions, name: str) -> StagePredictions:
    """A stage with the profile's temperature, as an edge node runs it."""
    stage = profile.stage(name)
    return StagePredictions(name, softmax(predictions.logits(name), stage.temperature), stage.cost_ms)


def _site_stage(profile: Profile, predictions: CascadePredictions, name: str, images: AnyImages) -> SiteStage:
    accuracy = None
    if isinstance(images, LabelledImages):
        right = _predictions_of(profile, predictions, name).labels() == images.labels
        accuracy = measure_accuracy(right, images.sha256)
    stage = profile.stage(name)
    return SiteStage(name=name, fingerprint=stage.fingerprint, temperature=stage.temperature, accuracy=accuracy)


def _site_pair(
    profile: Profile,
    pair: Pair,
    predictions: CascadePredictions,
    images: AnyImages,
    delta: float,
    method: Method,
) -> SitePair:
    intermediate = None if pair.intermediate is None else predictions.served(pair.intermediate.name)
    sample = make_sample(
        _predictions_of(profile, predictions, pair.edge),
        pair.score,
        _predictions_of(profile, predictions, pair.best),
        images.labels if isinstance(images, LabelledImages) else None,
        # Shuffled: folders list images by class, and betting depends on the order.
        np.random.default_rng(len(images)).permutation(len(images)),
        intermediate,
        None if pair.intermediate is None else pair.intermediate.score,
    )
    costs = costs_of(profile, pair)
    balanced = pair.conditions[0].balanced.max_drop
    return SitePair(
        edge=pair.edge,
        best=pair.best,
        intermediate=None if pair.intermediate is None else pair.intermediate.name,
        score=pair.score,
        intermediate_score=None if pair.intermediate is None else pair.intermediate.score,
        conditions=(certify_condition(sample, paths_of(pair), costs, balanced, delta, method),),
    )
