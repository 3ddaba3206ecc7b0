"""`hawkvision report calibration`: a page with a cascade's guarantees, their costs, and whether they are kept.

The page is one file without scripts or external resources. The cascade runs over the labelled images; logits come
from the cache if they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import StagePredictions, select
from hawkvision.cascade.certification.profile import Profile, StageProfile
from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.core.advice import advise
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.types import Tier
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.model_zoo.calibration.certification import stages_by_tier
from hawkvision.model_zoo.calibration.evidence import LabelReading, TrainedImages, read_evidence
from hawkvision.model_zoo.calibration.model_runner import CascadePredictions, ModelExecution, run_stages
from hawkvision.model_zoo.calibration.splits import split_again
from hawkvision.model_zoo.reports.metrics import (
    LabelledPredictions,
    Reliability,
    StageMeasures,
    pair_findings,
    reliability,
)
from hawkvision.model_zoo.reports.page import Findings, render
from hawkvision.models.datasets import SUFFIXES
from hawkvision.models.manifest import Manifest, load_manifest
from hawkvision.system.files import write_atomic
from hawkvision.tasks.kind import Truth
from hawkvision.tasks.registry import load_kind

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
    kind = load_kind(manifest, models)
    evidence = read_evidence(data, kind, manifest, models, LabelReading(trained=TrainedImages.LEAVE_OUT))
    images = evidence.images
    split = split_again(manifest, images, known.data)
    if len(split.held_out) < FEWEST_HELD_OUT:
        raise ConfigError(
            f"{data}: {len(split.held_out)} of {len(images)} images are held out; expected at least "
            f"{FEWEST_HELD_OUT} to measure anything on"
        )
    edge, datacenter = stages_by_tier(known)
    predictions = run_stages(
        kind, manifest, images, edge=edge, datacenter=datacenter, shrink=known.shrinks_images,
        execution=ModelExecution(backend), cache=cache, chosen=split.used(),
    )  # fmt: skip
    clean = labelled_predictions(known, predictions, evidence.truths)
    order = sorted(known.pairs, key=lambda pair: pair.edge != manifest.cascade.default_edge)
    fresh = np.sort(np.concatenate([split.certify, split.held_out]))
    findings = Findings(
        profile=known,
        as_of=today or date.today(),
        data_name=images.name,
        data_sha256=images.sha256,
        images=len(images),
        same_data=images.sha256 == known.data.sha256,
        measures=tuple(_measures(stage, clean, fresh) for stage in known.stages),
        reliabilities=tuple(_reliability(stage, predictions, clean, fresh) for stage in known.stages),
        pairs=tuple(pair_findings(known, pair, clean, split) for pair in order),
    )
    write_atomic(out, render(findings).encode())
    return findings


def labelled_predictions(
    profile: Profile, predictions: CascadePredictions, truths: Sequence[Truth]
) -> LabelledPredictions:
    """The predictions of a profile's stages as each tier serves them."""
    edge, datacenter = stages_by_tier(profile)

    def at_edge(name: str) -> StagePredictions:
        stage = profile.stage(name)
        return StagePredictions(name, predictions.outputs(name, Tier.EDGE, stage.temperature), stage.cost_ms)

    return LabelledPredictions(
        predictions.kind,
        {name: at_edge(name) for name in edge},
        {name: predictions.served(name) for name in datacenter},
        truths,
    )


def _reliability(
    stage: StageProfile, predictions: CascadePredictions, clean: LabelledPredictions, fresh: NDArray[np.intp]
) -> Reliability:
    """Calibration of a stage's probabilities, without and with the temperature of the profile."""
    tier = Tier.EDGE if stage.name in clean.edge else Tier.DATACENTER
    before, after = (select(predictions.outputs(stage.name, tier, t), fresh) for t in (1.0, stage.temperature))
    return reliability(stage.name, stage.temperature, clean.kind, before, after, select(clean.truths, fresh))


def _measures(stage: StageProfile, clean: LabelledPredictions, fresh: NDArray[np.intp]) -> StageMeasures:
    """The kind's own figures for a stage, as it is served."""
    served = clean.edge.get(stage.name) or clean.datacenter[stage.name]
    return StageMeasures(stage.name, clean.kind.measures(served.of(fresh), select(clean.truths, fresh)))


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
