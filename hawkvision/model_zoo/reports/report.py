"""`hawkvision report calibration`: a page with a cascade's guarantees, their costs, and whether they are kept.

The page is one file without scripts or external resources. The cascade runs over the labelled images, clean and
corrupted; logits come from the cache if they are there.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Final

import numpy as np

from hawkvision.cascade.certification.predictions import Split, StagePredictions
from hawkvision.cascade.certification.profile import Profile
from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.core.advice import advise
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.model_zoo.calibration.corruption import mixed, mixture_name
from hawkvision.model_zoo.calibration.drift_replay import LabelledPredictions, subset
from hawkvision.model_zoo.calibration.model_runner import CascadePredictions, ModelExecution, run_stages
from hawkvision.model_zoo.calibration.splits import split_images
from hawkvision.model_zoo.reports.metrics import Drift, pair_findings, reliability, replay_drift
from hawkvision.model_zoo.reports.page import Findings, render
from hawkvision.models.datasets import SUFFIXES, LabelledImages, read_images
from hawkvision.models.manifest import Manifest, load_labels, load_manifest
from hawkvision.system.files import write_atomic
from hawkvision.tasks.class_scores import softmax

MOST_DRIFT_IMAGES: Final = 3_000
"""Held-out images that also run corrupted: enough to measure a drop of a tenth of a point, within minutes."""

FEWEST_HELD_OUT: Final = 30
"""With fewer images the figures would mean nothing."""


def report_calibration(
    task: str,
    data: Path,
    out: Path,
    *,
    profile: Path | None = None,
    models: Path,
    cache: Path,
    backend: BackendKind = "onnxruntime",
    today: date | None = None,
) -> Findings:
    """Measure what a profile guarantees on labelled images, and write the page to `out`.

    Args:
        task: the task, by the name of its manifest.
        data: labelled images (`hawkvision.models.datasets`), preferably the profile's own. Their held-out part is
            measured.
        out: the page.
        profile: None means the task's own.
        models: the folder of manifests.
        cache: the folder of built models and cached logits.
        backend: what runs the models.
        today: the date to write; None means the clock's.

    Raises:
        HawkVisionError: for images without labels or too few of them, missing models, or a profile made for others.
    """
    manifest = load_manifest(task, models)
    known = load_profile_of(manifest, models, profile)
    _check_models(manifest, known)
    _check_labelled(data)
    images = read_images(data, load_labels(manifest, models))
    split = split_images(manifest, images, known.data.seed)
    if len(split.held_out) < FEWEST_HELD_OUT:
        raise ConfigError(
            f"{data}: {len(split.held_out)} of {len(images)} images are held out; expected at least "
            f"{FEWEST_HELD_OUT} to measure anything on"
        )
    names = tuple(stage.name for stage in known.stages)
    predictions = run_stages(
        manifest, names, images, execution=ModelExecution(backend), cache=cache, chosen=split.used()
    )
    clean = LabelledPredictions({name: _calibrated(known, predictions, name) for name in names}, images.labels)
    order = sorted(known.pairs, key=lambda pair: pair.edge != manifest.cascade.default_edge)
    fresh = np.sort(np.concatenate([split.certify, split.held_out]))
    findings = Findings(
        profile=known,
        as_of=today or date.today(),
        data_name=images.name,
        data_sha256=images.sha256,
        images=len(images),
        same_data=images.sha256 == known.data.sha256,
        reliabilities=tuple(
            reliability(
                stage.name,
                stage.temperature,
                StagePredictions(stage.name, softmax(predictions.logits(stage.name)[fresh]), 0.0),
                StagePredictions(stage.name, softmax(predictions.logits(stage.name)[fresh], stage.temperature), 0.0),
                images.labels[fresh],
            )
            for stage in known.stages
        ),
        pairs=tuple(pair_findings(known, pair, clean, split) for pair in order),
        drift=_drift(manifest, known, order[0].edge, order[0].best, images, clean, split, backend, cache),
    )
    write_atomic(out, render(findings).encode())
    return findings


def _drift(
    manifest: Manifest,
    profile: Profile,
    edge: str,
    best: str,
    images: LabelledImages,
    clean: LabelledPredictions,
    split: Split,
    backend: BackendKind,
    cache: Path,
) -> Drift | None:
    """The replay of one pair on some held-out images, clean and corrupted."""
    pair = profile.pair(edge, best)
    chosen = split.held_out
    if len(chosen) > MOST_DRIFT_IMAGES:
        rng = np.random.default_rng(profile.data.seed)
        chosen = np.sort(rng.choice(chosen, MOST_DRIFT_IMAGES, replace=False))
    some = subset(images, chosen)
    stages = (edge, best) if pair.intermediate is None else (edge, best, pair.intermediate.name)
    predictions = run_stages(
        manifest, stages, some, execution=ModelExecution(backend), cache=cache, corruption=mixed(), name=mixture_name()
    )
    shifted = LabelledPredictions({stage: _calibrated(profile, predictions, stage) for stage in stages}, some.labels)
    return replay_drift(profile, pair, clean.sample(pair, chosen), shifted.sample(pair, np.arange(len(some))))


def _calibrated(profile: Profile, predictions: CascadePredictions, name: str) -> StagePredictions:
    """A stage as certified: intermediate stages at the manifest's temperature, others at the profile's."""
    if any(pair.intermediate is not None and pair.intermediate.name == name for pair in profile.pairs):
        return predictions.served(name)
    stage = profile.stage(name)
    return StagePredictions(name, softmax(predictions.logits(name), stage.temperature), stage.cost_ms)


def _check_models(manifest: Manifest, profile: Profile) -> None:
    if profile.task != manifest.task:
        raise ManifestError(f"the profile is for task {profile.task!r}, not for {manifest.task!r}")
    for stage in profile.stages:
        expected = manifest.fingerprint(stage.name)
        if stage.fingerprint != expected:
            raise ManifestError(
                f"the profile was made for {stage.name} with fingerprint {stage.fingerprint}, but the manifest's is "
                f"{expected}; run `{advise('calibrate', '--task', manifest.task, '--data', 'IMAGES')}` again"
            )


def _check_labelled(data: Path) -> None:
    """Refuse a flat folder of images, a likely mistake because `hawkvision certify` takes one."""
    if data.is_dir() and any(path.suffix.lower() in SUFFIXES for path in data.iterdir()):
        raise ConfigError(
            f"{data}: the images have no labels; a report needs them: expected a directory per class, or an npz file "
            "with `labels`"
        )
