"""`hawkvision certify`: a site's own certificates, from images of that site, without touching the profile.

A profile's certificates hold for traffic like the images they were made from. A site has other cameras, light and
things to see; some hundred of its own images make certificates that hold there. Scores, temperatures and the order in
which thresholds are tried stay the profile's, so the site's images serve for nothing but certifying, all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

import numpy as np

from hawkvision.cascade.certification.certificate import Method
from hawkvision.cascade.certification.predictions import StagePredictions, make_sample, measure_accuracy
from hawkvision.cascade.certification.profile import Pair, Profile, design_sha256
from hawkvision.cascade.certification.profile_files import dump, load_profile_of, load_site
from hawkvision.cascade.certification.profiling import certify_condition, costs_of, paths_of
from hawkvision.cascade.certification.site_certificates import SiteCertificates, SiteData, SitePair, SiteStage
from hawkvision.cascade.confidence.scores import softmax
from hawkvision.core.advice import advise
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.model_zoo.calibration.certification import check_unseen, share_of_delta
from hawkvision.model_zoo.calibration.model_runner import AnyImages, CascadePredictions, run_stages
from hawkvision.models.datasets import LabelledImages, read_images, read_unlabelled
from hawkvision.models.manifest import Manifest, load_labels, load_manifest
from hawkvision.system.files import write_atomic

FEWEST_IMAGES: Final = 50
"""With fewer, no drop below 6 % can be certified whatever the images show."""


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
        task: whose manifest, models and profile are meant.
        data: labelled images (`hawkvision.models.datasets`), or with `labelled` False a folder of images.
        out: where `hawkvision edge up --certificates` will read them.
        labelled: whether the truth is known; without it agreement with the reference stage certifies, at a higher
            price.
        edges: edge stages to certify; none means all pairs of the profile.
        delta: probability that a certificate is wrong. If `out` holds certificates of these very images for another
            design, it is halved once more than for those.
        betting: certify by betting instead of the exact test: a second opinion by other means, somewhat weaker.
        compared: configurations that were ever compared on these very images; delta is divided by it.
        profile: None means the task's own.
        models: where manifests lie.
        cache: where built models lie.
        today: the date to write; None means the clock's.

    Raises:
        HawkVisionError: for bad data, too few images, missing models, or a profile made for other models.
    """
    manifest = load_manifest(task, models)
    known = load_profile_of(manifest, models, profile)
    pairs = [pair for pair in known.pairs if not edges or pair.edge in edges]
    missing = set(edges) - {pair.edge for pair in pairs}
    if missing or not pairs:
        raise ManifestError(f"the profile has no pair for {sorted(missing)}; it has {[p.edge for p in known.pairs]}")
    if betting and not labelled:
        raise ConfigError("betting needs labels: agreement is certified by a test of its own")
    images = read_images(data, load_labels(manifest, models)) if labelled else read_unlabelled(data)
    if len(images) < FEWEST_IMAGES:
        raise ConfigError(f"{data}: {len(images)} images certify nothing; expected at least {FEWEST_IMAGES}")
    if manifest.training is not None and manifest.training.data_sha256 == images.sha256:
        raise ConfigError(f"{data}: the cascade was trained on these very images; certify with images of the site")
    check_unseen(known, images.sha256, compared, str(data))
    design = design_sha256(known, pairs)
    looks_so_far = _looks_of(out, design, images.sha256)
    delta = share_of_delta(delta, looks_so_far, compared)
    stages = tuple(dict.fromkeys(name for pair in pairs for name in _stages_of(pair)))
    for name in stages:
        _check_fingerprint(known, manifest, name)
    looks = run_stages(manifest, stages, images, cache=cache)
    method = Method.AGREEMENT if not labelled else Method.BETTING if betting else Method.EXACT
    site = SiteCertificates(
        format=2,
        task=task,
        as_of=(today or date.today()).isoformat(),
        data=SiteData(
            name=images.name,
            sha256=images.sha256,
            n=len(images),
            labelled=labelled,
            looks=looks_so_far,
            compared=compared,
            design=design,
        ),
        stages=tuple(_site_stage(known, looks, name, images) for name in stages),
        pairs=tuple(_site_pair(known, pair, looks, images, delta, method) for pair in pairs),
    )
    write_atomic(out, dump(site))
    return site


def _looks_of(out: Path, design: str, sha256: str) -> int:
    """The number of this look at those images, by the certificates that are about to be replaced."""
    if not out.exists():
        return 1
    try:
        before = load_site(out).data
    except ManifestError:
        return 1  # whatever it is, it is no certificate of these images
    return before.looks + (before.design != design) if before.sha256 == sha256 else 1


def _stages_of(pair: Pair) -> tuple[str, ...]:
    return (pair.edge, pair.best) if pair.intermediate is None else (pair.edge, pair.intermediate.name, pair.best)


def _check_fingerprint(profile: Profile, manifest: Manifest, name: str) -> None:
    measured, present = profile.stage(name).fingerprint, manifest.fingerprint(name)
    if measured != present:
        raise ManifestError(
            f"the profile of {profile.task!r} was made for {name} with fingerprint {measured}, but the manifest has "
            f"{present}; make a new profile first: `{advise('calibrate', '--task', profile.task, '--data', 'IMAGES')}`"
        )


def _looked(profile: Profile, looks: CascadePredictions, name: str) -> StagePredictions:
    """A stage with the profile's temperature, as an edge node runs it."""
    stage = profile.stage(name)
    return StagePredictions(name, softmax(looks.logits(name), stage.temperature), stage.cost_ms)


def _site_stage(profile: Profile, looks: CascadePredictions, name: str, images: AnyImages) -> SiteStage:
    accuracy = None
    if isinstance(images, LabelledImages):
        right = _looked(profile, looks, name).labels() == images.labels
        accuracy = measure_accuracy(right, images.sha256)
    stage = profile.stage(name)
    return SiteStage(name=name, fingerprint=stage.fingerprint, temperature=stage.temperature, accuracy=accuracy)


def _site_pair(
    profile: Profile,
    pair: Pair,
    looks: CascadePredictions,
    images: AnyImages,
    delta: float,
    method: Method,
) -> SitePair:
    intermediate = None if pair.intermediate is None else looks.served(pair.intermediate.name)
    sample = make_sample(
        _looked(profile, looks, pair.edge),
        pair.score,
        _looked(profile, looks, pair.best),
        images.labels if isinstance(images, LabelledImages) else None,
        # Shuffled, because betting must not see them in the order of their classes, in which folders list them.
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
