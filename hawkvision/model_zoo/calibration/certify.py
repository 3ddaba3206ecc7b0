"""`hawkvision certify`: a site's own certificates, from pictures of that site, without touching the profile.

A profile's certificates hold for traffic like the pictures they were made from. A site has other cameras, light and
things to see; some hundred of its own pictures make certificates that hold there. Scores, temperatures and the order in
which thresholds are tried stay the profile's, so the site's pictures serve for nothing but certifying, all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

import numpy as np

from hawkvision.cascade.certification.certificate import Method
from hawkvision.cascade.certification.profile import (
    Pair,
    Profile,
    SiteCertificates,
    SiteData,
    SitePair,
    SiteRung,
    design_sha256,
    dump,
    load_profile_of,
    load_site,
)
from hawkvision.cascade.certification.profiling import (
    Looked,
    certify_condition,
    costs_of,
    make_sample,
    measure_accuracy,
    paths_of,
)
from hawkvision.cascade.scores import softmax
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.model_zoo.calibration.certification import check_unseen, share_of_delta
from hawkvision.model_zoo.calibration.model_runner import AnyPictures, Looks, look
from hawkvision.models.artifacts import write_atomic
from hawkvision.models.datasets import LabelledPictures, read_pictures, read_unlabelled
from hawkvision.models.manifest import Manifest, load_labels, load_manifest
from hawkvision.system.advice import advise

FEWEST_PICTURES: Final = 50
"""With fewer, no drop below 6 % can be certified whatever the pictures show."""


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
    """Certify a profile's pairs on a site's pictures and write the certificates to `out`.

    Args:
        task: whose manifest, models and profile are meant.
        data: labelled pictures (`hawkvision.models.datasets`), or with `labelled` False a folder of pictures.
        out: where `hawkvision edge up --certificates` will read them.
        labelled: whether the truth is known; without it agreement with the best rung certifies, at a higher price.
        edges: edge rungs to certify; none means all pairs of the profile.
        delta: probability that a certificate is wrong. If `out` holds certificates of these very pictures for another
            design, it is halved once more than for those.
        betting: certify by betting instead of the exact test: a second opinion by other means, somewhat weaker.
        compared: configurations that were ever compared on these very pictures; delta is divided by it.
        profile: None means the task's own.
        models: where manifests lie.
        cache: where built models lie.
        today: the date to write; None means the clock's.

    Raises:
        HawkVisionError: for bad data, too few pictures, missing models, or a profile made for other models.
    """
    manifest = load_manifest(task, models)
    known = load_profile_of(manifest, models, profile)
    pairs = [pair for pair in known.pairs if not edges or pair.edge in edges]
    missing = set(edges) - {pair.edge for pair in pairs}
    if missing or not pairs:
        raise ManifestError(f"the profile has no pair for {sorted(missing)}; it has {[p.edge for p in known.pairs]}")
    if betting and not labelled:
        raise ConfigError("betting needs labels: agreement is certified by a test of its own")
    pictures = read_pictures(data, load_labels(manifest, models)) if labelled else read_unlabelled(data)
    if len(pictures) < FEWEST_PICTURES:
        raise ConfigError(f"{data}: {len(pictures)} pictures certify nothing; expected at least {FEWEST_PICTURES}")
    if manifest.training is not None and manifest.training.data_sha256 == pictures.sha256:
        raise ConfigError(f"{data}: the ladder was trained on these very pictures; certify with pictures of the site")
    check_unseen(known, pictures.sha256, compared, str(data))
    design = design_sha256(known, pairs)
    looks_so_far = _looks_of(out, design, pictures.sha256)
    delta = share_of_delta(delta, looks_so_far, compared)
    rungs = tuple(dict.fromkeys(name for pair in pairs for name in _rungs_of(pair)))
    for name in rungs:
        _check_fingerprint(known, manifest, name)
    looks = look(manifest, rungs, pictures, cache=cache)
    method = Method.AGREEMENT if not labelled else Method.BETTING if betting else Method.EXACT
    site = SiteCertificates(
        format=1,
        task=task,
        as_of=(today or date.today()).isoformat(),
        data=SiteData(
            name=pictures.name,
            sha256=pictures.sha256,
            n=len(pictures),
            labelled=labelled,
            looks=looks_so_far,
            compared=compared,
            design=design,
        ),
        rungs=tuple(_site_rung(known, looks, name, pictures) for name in rungs),
        pairs=tuple(_site_pair(known, pair, looks, pictures, delta, method) for pair in pairs),
    )
    write_atomic(out, dump(site))
    return site


def _looks_of(out: Path, design: str, sha256: str) -> int:
    """The number of this look at those pictures, by the certificates that are about to be replaced."""
    if not out.exists():
        return 1
    try:
        before = load_site(out).data
    except ManifestError:
        return 1  # whatever it is, it is no certificate of these pictures
    return before.looks + (before.design != design) if before.sha256 == sha256 else 1


def _rungs_of(pair: Pair) -> tuple[str, ...]:
    return (pair.edge, pair.best) if pair.middle is None else (pair.edge, pair.middle.name, pair.best)


def _check_fingerprint(profile: Profile, manifest: Manifest, name: str) -> None:
    measured, present = profile.rung(name).fingerprint, manifest.fingerprint(name)
    if measured != present:
        raise ManifestError(
            f"the profile of {profile.task!r} was made for {name} with fingerprint {measured}, but the manifest has "
            f"{present}; make a new profile first: `{advise('calibrate', '--task', profile.task, '--data', 'IMAGES')}`"
        )


def _looked(profile: Profile, looks: Looks, name: str) -> Looked:
    """A rung with the profile's temperature, as an edge node runs it."""
    rung = profile.rung(name)
    return Looked(name, softmax(looks.logits(name), rung.temperature), rung.cost_ms)


def _site_rung(profile: Profile, looks: Looks, name: str, pictures: AnyPictures) -> SiteRung:
    accuracy = None
    if isinstance(pictures, LabelledPictures):
        right = _looked(profile, looks, name).labels() == pictures.labels
        accuracy = measure_accuracy(right, pictures.sha256)
    rung = profile.rung(name)
    return SiteRung(name=name, fingerprint=rung.fingerprint, temperature=rung.temperature, accuracy=accuracy)


def _site_pair(
    profile: Profile,
    pair: Pair,
    looks: Looks,
    pictures: AnyPictures,
    delta: float,
    method: Method,
) -> SitePair:
    middle = None if pair.middle is None else looks.served(pair.middle.name)
    sample = make_sample(
        _looked(profile, looks, pair.edge),
        pair.score,
        _looked(profile, looks, pair.best),
        pictures.labels if isinstance(pictures, LabelledPictures) else None,
        # Shuffled, because betting must not see them in the order of their classes, in which folders list them.
        np.random.default_rng(len(pictures)).permutation(len(pictures)),
        middle,
        None if pair.middle is None else pair.middle.score,
    )
    costs = costs_of(profile, pair)
    balanced = pair.conditions[0].balanced.max_drop
    return SitePair(
        edge=pair.edge,
        best=pair.best,
        middle=None if pair.middle is None else pair.middle.name,
        score=pair.score,
        middle_score=None if pair.middle is None else pair.middle.score,
        conditions=(certify_condition(sample, paths_of(pair), costs, balanced, delta, method),),
    )
