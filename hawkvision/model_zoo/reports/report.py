"""`hawkvision report calibration`: a page with a cascade's guarantees, their costs, and whether they are kept.

The cascade runs over the labelled images; logits come from the cache if they are there. Reliability is measured on
certification and held-out images, drops of accuracy on held-out images alone, on which nothing was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import (
    Scored,
    Split,
    StagePredictions,
    accuracies,
    make_evidence,
    select,
)
from hawkvision.cascade.certification.profile import Certificate, Pair, threshold_value
from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.cascade.certification.profiling import paths_of
from hawkvision.cascade.confidence.calibration import expected_calibration_error
from hawkvision.core.errors import ConfigError
from hawkvision.core.types import Tier
from hawkvision.guarantee.bounds import clopper_pearson, mean_interval
from hawkvision.guarantee.evidence import Evidence, Thresholds, losses, sweep
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.model_zoo.calibration.certification import check_models, stages_by_tier
from hawkvision.model_zoo.calibration.evidence import LabelReading, TrainedImages, read_evidence
from hawkvision.model_zoo.calibration.model_runner import run_stages
from hawkvision.model_zoo.calibration.splits import split_again
from hawkvision.model_zoo.reports import page
from hawkvision.model_zoo.reports.page import Findings, Outcome, PairFindings, Reliability
from hawkvision.models.manifest import load_manifest
from hawkvision.system.files import write_atomic
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import Output, TaskKind, Truth
from hawkvision.tasks.registry import load_kind

FEWEST_HELD_OUT: Final = 30
"""With fewer images the figures would mean nothing."""
BINS: Final = 10
"""Number of intervals of equal width in which confidence is compared with accuracy."""
SIGMAS: Final = 1.96
"""For 95 % intervals of a mean drop, which is a mean of thousands of values."""


class LabelledPredictions:
    """The predictions of every stage for some images as each tier serves them, and the labels."""

    def __init__(
        self,
        kind: TaskKind[Any],
        edge: Mapping[str, StagePredictions],
        datacenter: Mapping[str, StagePredictions],
        truths: Sequence[Truth],
    ) -> None:
        self.kind, self.edge, self.datacenter, self.truths = kind, edge, datacenter, truths

    def sample(self, pair: Pair, chosen: NDArray[np.intp]) -> Evidence:
        """The images `chosen`, scored as the pair is."""
        between = pair.intermediate
        return make_evidence(
            self.kind, Scored(self.edge[pair.edge], pair.score), self.datacenter[pair.best], self.truths, chosen,
            None if between is None else Scored(self.datacenter[between.name], between.score),
        )  # fmt: skip


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
    check_models(known, manifest)
    kind = load_kind(manifest, models)
    evidence = read_evidence(data, kind, manifest, models, LabelReading(trained=TrainedImages.LEAVE_OUT))
    images, truths = evidence.images, evidence.truths
    split = split_again(manifest, images, known.data)
    if len(split.held_out) < FEWEST_HELD_OUT:
        raise ConfigError(
            f"{data}: {len(split.held_out)} of {len(images)} images are held out; expected at least "
            f"{FEWEST_HELD_OUT} to measure anything on"
        )
    edge, datacenter = stages_by_tier(known)
    found = run_stages(
        kind, manifest, images, edge=edge, datacenter=datacenter, shrink=known.shrinks_images,
        backend=backend, cache=cache, chosen=split.used(),
    )  # fmt: skip

    def at_edge(name: str) -> StagePredictions:
        stage = known.stage(name)
        return StagePredictions(name, found.outputs(name, Tier.EDGE, stage.temperature), stage.cost_ms)

    served = LabelledPredictions(
        kind, {name: at_edge(name) for name in edge}, {name: found.served(name) for name in datacenter}, truths
    )
    fresh = np.sort(np.concatenate([split.certify, split.held_out]))
    fresh_truths = select(truths, fresh)
    reliabilities, measures = [], {}
    for stage in known.stages:
        tier = Tier.EDGE if stage.name in edge else Tier.DATACENTER
        before, after = (select(found.outputs(stage.name, tier, t), fresh) for t in (1.0, stage.temperature))
        reliabilities.append(reliability(stage.name, kind, before, after, fresh_truths))
        as_served = served.edge.get(stage.name) or served.datacenter[stage.name]
        measures[stage.name] = kind.measures(as_served.of(fresh), fresh_truths)
    order = sorted(known.pairs, key=lambda pair: pair.edge != manifest.cascade.default_edge)
    findings = Findings(
        profile=known,
        as_of=today or date.today(),
        data_name=images.name,
        data_sha256=images.sha256,
        images=len(images),
        reliabilities=tuple(reliabilities),
        measures=measures,
        pairs=tuple(pair_findings(pair, served, split) for pair in order),
    )
    write_atomic(out, page.render(findings).encode())
    return findings


def reliability(
    stage: str, kind: TaskKind[Any], before: Sequence[Output], after: Sequence[Output], truths: Sequence[Truth]
) -> Reliability:
    """Calibration of a stage's first score on images that fitted no temperature; `before` is without it."""
    right = accuracies(kind, after, truths)
    confidence = kind.score_all(after, kind.scores[0])
    unfitted = expected_calibration_error(kind.score_all(before, kind.scores[0]), accuracies(kind, before, truths))
    place = np.minimum((confidence * BINS).astype(np.intp), BINS - 1)
    counts = np.bincount(place, minlength=BINS)
    filled = np.flatnonzero(counts)
    ends = np.array([_interval(right[place == bin_]) for bin_ in filled])
    return Reliability(
        stage=stage,
        error_before=unfitted,
        error=expected_calibration_error(confidence, right),
        counts=counts[filled],
        confidence=np.bincount(place, confidence, BINS)[filled] / counts[filled],
        accuracy=np.bincount(place, right, BINS)[filled] / counts[filled],
        low=ends[:, 0],
        high=ends[:, 1],
    )


def _interval(right: NDArray[np.bool_] | Floats) -> tuple[float, float]:
    """The 95 % interval of the mean."""
    if right.dtype == np.bool_:
        return clopper_pearson(int(right.sum()), len(right))
    return mean_interval(right.astype(np.float64))


def pair_findings(pair: Pair, predictions: LabelledPredictions, split: Split) -> PairFindings:
    """A pair's certificates, and their results on held-out images."""
    held_out = predictions.sample(pair, split.held_out)
    condition = pair.conditions[0]
    certificates = {c.max_drop: c for c in (*condition.certificates, condition.balanced)}
    certificates = {drop: c for drop, c in certificates.items() if drop < condition.fast.max_drop}
    certificates[condition.fast.max_drop] = condition.fast
    return PairFindings(
        pair=pair,
        n=len(held_out),
        edge_accuracy=float(1.0 - held_out.edge.losses.mean()),
        best_accuracy=float(1.0 - held_out.reference_losses.mean()),
        curve=tuple(measure(held_out, thresholds) for thresholds in paths_of(pair)[0]),
        targets=tuple((each, measure(held_out, _thresholds(each))) for _, each in sorted(certificates.items())),
    )


def measure(sample: Evidence, thresholds: Thresholds) -> Outcome:
    """The results of these thresholds on a sample."""
    step = next(sweep(sample, (thresholds,)))
    spread = float(losses(sample, thresholds).std()) / math.sqrt(len(sample))
    return Outcome(step.escalation, step.to_best, step.drop, SIGMAS * spread)


def _thresholds(certificate: Certificate) -> Thresholds:
    return Thresholds(threshold_value(certificate.threshold), threshold_value(certificate.intermediate_threshold))
