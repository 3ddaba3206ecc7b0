"""Making a profile: from the stages' predictions to temperatures, accuracies and certificates.

Fitting and the exact test need SciPy. An edge node, which lacks it, certifies by betting alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from hawkvision.cascade.certification.balanced import Certifying, balanced_drop
from hawkvision.cascade.certification.predictions import (
    ByImage,
    Scored,
    Split,
    StagePredictions,
    accuracies,
    in_random_order,
    make_evidence,
    measure_accuracy,
    select,
)
from hawkvision.cascade.certification.profile import (
    TESTED_DROPS,
    Certificate,
    Condition,
    EscalationThreshold,
    Intermediate,
    Pair,
    PathStep,
    Profile,
    RightAnswers,
    StageProfile,
    threshold_value,
)
from hawkvision.cascade.certification.threshold_order import (
    Costs,
    Path,
    expected_cost,
    plan_paths,
)
from hawkvision.cascade.confidence import calibration
from hawkvision.guarantee.binomial import clopper_pearson
from hawkvision.guarantee.bounds import mean_upper_bound
from hawkvision.guarantee.certificate import certify, drop_bound, least_drop
from hawkvision.guarantee.evidence import (
    Evidence,
    Thresholds,
    ThresholdStep,
    disagreements,
    sweep,
    threshold_grid,
    two_levels,
)
from hawkvision.models.manifest import MeasuredAccuracy
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import Output, TaskKind, Truth

ESCALATION_MS = 5.0
"""The assumed cost of an escalation besides the datacenter's work: a round trip on a good network."""


def profile_stage(
    kind: TaskKind[Any],
    name: str,
    models: dict[str, str],
    fingerprint: str,
    raw: ByImage[Output],
    truths: Sequence[Truth],
    split: Split,
    data_sha256: str,
    cost_ms: float,
    delta: float = 0.05,
    served: StagePredictions | None = None,
    temperature: float = 1.0,
    at: Callable[[float], ByImage[Output]] | None = None,
) -> tuple[StageProfile, StagePredictions]:
    """Fit one stage's temperature on the profile split and measure its accuracy on the certification split.

    `raw` is the stage's of all images of the split (`TaskKind.raw`). `served` are the predictions of a stage that runs
    in the datacenter alone, at the manifest's temperature; its accuracy is measured on them. `temperature` is that of
    kinds that have none to fit. `at` gives the outputs at a temperature; None makes them of `raw`.
    """
    fitting = select(raw, split.profile), select(truths, split.profile)
    # Rounded before use, so that a node that reads the profile computes the same scores bit for bit.
    temperature = round(calibration.fit_temperature(kind, *fitting, temperature), 6)
    predictions = StagePredictions(name, (at or calibrated_at(kind, raw))(temperature), round(cost_ms, 3))
    certifying = in_random_order(split.certify)
    outputs = predictions.of(certifying)
    right = accuracies(kind, outputs, select(truths, certifying))
    accuracy = measure_accuracy(right, data_sha256, delta)
    if served is not None:
        predictions, accuracy = served, served_accuracy(kind, served, truths, split.certify, data_sha256, delta)
    confidence = kind.score_all(outputs, kind.scores[0])
    return StageProfile(
        name=name,
        models=models,
        fingerprint=fingerprint,
        temperature=temperature,
        accuracy=accuracy,
        calibration_error=round(calibration.expected_calibration_error(confidence, right), 6),
        cost_ms=predictions.cost_ms,
    ), predictions  # fmt: skip


def calibrated_at(kind: TaskKind[Any], raw: ByImage[Output]) -> Callable[[float], ByImage[Output]]:
    """The outputs of a stage of one model, as a function of its temperature."""
    used = raw if isinstance(raw, Mapping) else dict(enumerate(raw))
    return lambda temperature: dict(zip(used, kind.calibrated(list(used.values()), temperature), strict=True))


def served_accuracy(
    kind: TaskKind[Any],
    served: StagePredictions,
    truths: Sequence[Truth],
    certifying: NDArray[np.intp],
    data_sha256: str,
    delta: float = 0.05,
) -> MeasuredAccuracy:
    """The accuracy of a stage as it is served, on these images."""
    chosen = in_random_order(certifying)
    return measure_accuracy(accuracies(kind, served.of(chosen), select(truths, chosen)), data_sha256, delta)


def profile_pair(
    kind: TaskKind[Any],
    edge: StagePredictions,
    best: StagePredictions,
    truths: Sequence[Truth],
    split: Split,
    intermediate: StagePredictions | None = None,
    delta: float = 0.05,
    escalation_ms: float = ESCALATION_MS,
    reused_ms: float = 0.0,
    others: Certifying | None = None,
) -> Pair:
    """Certify a pair: scores, curves and path from the profile split, certificates from the certification split.

    The intermediate stage has already paid `reused_ms` of the reference stage's cost
    (`model_zoo.calibration.model_runner.CascadePredictions.reused_ms`). `balanced` is chosen on the profile split for
    the certification split; if `others` will certify, on both splits for those.
    """
    scored = Scored(edge, _choose_score(kind, edge, best, truths, split.profile))
    between = None
    if intermediate is not None:
        between = Scored(intermediate, _choose_score(kind, intermediate, best, truths, split.profile))
    chosen = make_evidence(kind, scored, best, truths, split.profile, between)
    costs = Costs(edge.cost_ms, best.cost_ms, escalation_ms, intermediate.cost_ms if intermediate else None, reused_ms)
    paths = tuple(rounded_path(path) for path in plan_paths(chosen, costs))
    sample = make_evidence(kind, scored, best, truths, in_random_order(split.certify), between)
    planning, to_come = chosen, Certifying(len(sample), delta)
    if others is not None:
        planning = make_evidence(kind, scored, best, truths, np.union1d(split.profile, split.certify), between)
        to_come = others
    balanced = balanced_drop(planning, paths, costs, to_come)
    planned = None
    if between is not None and chosen.intermediate is not None and len(paths) > 1:
        planned = Intermediate(
            name=between.predictions.name,
            score=between.score,
            path=tuple(path_step(step) for step in sweep(sample, paths[1])),
            reused_ms=reused_ms,
        )
    return Pair(
        edge=edge.name,
        best=best.name,
        score=scored.score,
        escalation_ms=escalation_ms,
        intermediate=planned,
        path=tuple(path_step(step) for step in sweep(sample, paths[0])),
        conditions=(certify_condition(sample, paths, costs, balanced, delta),),
        right=right_answers(sample),
    )


def right_answers(evidence: Evidence) -> RightAnswers | UnsetType:
    """How often the edge stage and the reference stage are right on labelled images; unset for fractional losses."""
    if not evidence.binary:
        return UNSET
    edge, reference = evidence.edge.losses == 0.0, evidence.reference_losses == 0.0
    differing = evidence.edge.disagreements > 0.0
    return RightAnswers(
        n=len(evidence),
        differing=int(differing.sum()),
        reference=int((differing & reference).sum()),
        edge=int((differing & edge).sum()),
        neither=int((~edge & ~reference).sum()),
    )


def certify_condition(
    evidence: Evidence,
    paths: Sequence[Path],
    costs: Costs,
    balanced: float,
    delta: float,
    planned: Certificate | None = None,
    *,
    bounds_drop: bool = True,
) -> Condition:
    """Certificates of whole images for `TESTED_DROPS`, for `balanced` and for never escalating.

    Several paths share δ equally, so that the cheapest result may be chosen. If `balanced` can be certified only by
    escalating everything, the `planned` thresholds stay, without a guarantee. Where losses may be fractions there is no
    certificate of a drop that so few images could not certify whatever their labels.

    Args:
        evidence: of the certification images.
        paths: to test.
        costs: of the stages.
        balanced: the ε of `balanced`.
        delta: probability that a certificate is wrong.
        planned: the design's `balanced`.
        bounds_drop: see `write_certificate`.
    """

    def cost(step: ThresholdStep) -> float:
        return expected_cost(costs, step)

    def certified(max_drop: float) -> Certificate:
        found = [certify(evidence, path, max_drop, delta / len(paths), cost) for path in paths]
        return write_certificate(evidence, min(found, key=cost), max_drop, delta, bounds_drop=bounds_drop)

    never = next(sweep(evidence, (Thresholds(-math.inf),)))
    bound = math.ceil(drop_bound(evidence, never, delta) * 1e4) / 1e4
    kept = certified(balanced)
    if planned is not None and (kept.threshold, kept.intermediate_threshold) == ("always", "always"):
        kept = msgspec.structs.replace(planned, basis="profile")
    least = 0.0 if evidence.binary else least_drop(len(evidence), delta / len(paths), binary=False)
    return Condition(
        balanced=kept,
        fast=write_certificate(evidence, never, bound, delta, bounds_drop=bounds_drop),
        certificates=tuple(certified(drop) for drop in TESTED_DROPS if drop >= least),
    )


def rounded_path(path: Path) -> Path:
    """The path rounded as in a profile, so that a node compares with exactly the certified thresholds."""
    return tuple(
        dict.fromkeys(
            Thresholds(threshold_value(written(step.edge)), threshold_value(written(step.intermediate)))
            for step in path
        )
    )


def paths_of(pair: Pair) -> tuple[Path, ...]:
    """The paths along which a profile was certified."""
    written_paths = (pair.path,) if pair.intermediate is None else (pair.path, pair.intermediate.path)
    return tuple(
        tuple(
            Thresholds(threshold_value(step.threshold), threshold_value(step.intermediate_threshold)) for step in steps
        )
        for steps in written_paths
    )


def costs_of(profile: Profile, pair: Pair) -> Costs:
    """The costs of the pair's stages as used for its certificates."""
    edge, best = (profile.stage(name).cost_ms for name in (pair.edge, pair.best))
    if pair.intermediate is None:
        return Costs(edge, best, pair.escalation_ms)
    return Costs(
        edge, best, pair.escalation_ms, profile.stage(pair.intermediate.name).cost_ms, pair.intermediate.reused_ms
    )


def _choose_score(
    kind: TaskKind[Any],
    predictions: StagePredictions,
    best: StagePredictions,
    truths: Sequence[Truth],
    chosen: NDArray[np.intp],
) -> str:
    """The score with the smallest area under its curve of drop against escalation; the first of equals."""

    def area(score: str) -> float:
        sample = make_evidence(kind, Scored(predictions, score), best, truths, chosen)
        steps = list(sweep(sample, two_levels(threshold_grid(sample.edge.scores))))
        return float(np.trapezoid([s.drop for s in steps][::-1], [s.escalation for s in steps][::-1]))

    return min(kind.scores, key=area)


def written(value: float) -> EscalationThreshold:
    """A threshold as profiles write it, with eight decimals, which distinguish all float32 scores."""
    if math.isinf(value):
        return "always" if value > 0 else "never"
    return round(min(max(value, 0.0), 1.0), 8)


def write_certificate(
    sample: Evidence, step: ThresholdStep, max_drop: float, delta: float, *, bounds_drop: bool = True
) -> Certificate:
    """A certified step of this sample as profiles hold it.

    `bounds_drop`: whether agreement bounds the accuracy drop (`TaskKind.agreement_bounds_drop`).
    """
    at_edge, between = disagreements(sample, step.thresholds)
    escalated = sample.edge.scores < step.thresholds.edge
    asked = step.thresholds.intermediate < math.inf

    def most(differing: Floats) -> float:
        """Of the images that reach a stage: the bound on their disagreement where it answers, else 0."""
        if not sample.binary:
            return round(mean_upper_bound(differing, delta / 2), 6)
        return round(clopper_pearson(int(differing.sum()), len(differing), delta)[1], 6)

    return Certificate(
        max_drop=round(max_drop, 6),
        threshold=written(step.thresholds.edge),
        intermediate_threshold=written(step.thresholds.intermediate),
        delta=delta,
        n=len(sample),
        basis="labelled" if sample.labelled.any() else "agreement" if bounds_drop else "disagreement",
        escalation=round(step.escalation, 6),
        to_best=round(step.to_best, 6),
        observed_drop=round(step.drop, 6),
        edge_disagreement=most(at_edge),
        intermediate_disagreement=most(between[escalated]) if asked and escalated.any() else None,
    )


def path_step(step: ThresholdStep) -> PathStep:
    """A step of a path as profiles hold it."""
    return PathStep(
        threshold=written(step.thresholds.edge),
        intermediate_threshold=written(step.thresholds.intermediate),
        escalation=round(step.escalation, 6),
    )
