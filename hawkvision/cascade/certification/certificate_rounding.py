"""Certified steps, thresholds and curves in the form in which profiles hold them, rounded."""

from __future__ import annotations

import math

from hawkvision.cascade.certification.profile import Certificate, EscalationThreshold, PathStep, ScoreCurve, Watch
from hawkvision.cascade.certification.threshold_order import Curve
from hawkvision.guarantee.bounds import clopper_pearson, mean_upper_bound
from hawkvision.guarantee.evidence import Evidence, ThresholdStep, disagreements
from hawkvision.tasks.class_scores import Floats


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
        edge_watch=_edge_watch(sample, step, max_drop, delta),
        intermediate_watch=_intermediate_watch(sample, step, max_drop, delta),
    )


def _edge_watch(sample: Evidence, step: ThresholdStep, max_drop: float, delta: float) -> Watch:
    share = 1.0 if step.thresholds.intermediate == math.inf else _share(step.edge_differing, step.differing)
    at_edge, _ = disagreements(sample, step.thresholds)
    return _watch(max_drop * share, at_edge, round(step.escalation * len(sample)), delta, binary=sample.binary)


def _intermediate_watch(sample: Evidence, step: ThresholdStep, max_drop: float, delta: float) -> Watch | None:
    n = len(sample)
    escalated = sample.edge.scores < step.thresholds.edge
    count = int(escalated.sum())
    if step.thresholds.intermediate == math.inf or not count:
        return None
    share = _share(step.differing - step.edge_differing, step.differing)
    _, between = disagreements(sample, step.thresholds)
    part = max_drop * share * n / count
    return _watch(part, between[escalated], round(step.to_best * n), delta, binary=sample.binary)


def _share(part: float, whole: float) -> float:
    """A stage's part of the disagreement by the rule of succession, so that no stage gets none."""
    return (part + 1) / (whole + 2)


def _watch(max_drop: float, differing: Floats, passed_on: int, delta: float, *, binary: bool) -> Watch:
    """Of the images that reach a stage: their disagreement where it answers, else 0, and how many it passes on."""
    n = len(differing)
    most = clopper_pearson(int(differing.sum()), n, delta)[1] if binary else mean_upper_bound(differing, delta / 2)
    return Watch(
        max_drop=round(min(1.0, max_drop), 6),
        disagreement=round(most, 6),
        difficulty=round(clopper_pearson(passed_on, n, delta)[1], 6),
    )


def path_step(step: ThresholdStep) -> PathStep:
    """A step of a path as profiles hold it."""
    return PathStep(
        threshold=written(step.thresholds.edge),
        intermediate_threshold=written(step.thresholds.intermediate),
        escalation=round(step.escalation, 6),
        to_best=round(step.to_best, 6),
        drop=round(step.drop, 6),
    )


def written_curve(curve: Curve) -> ScoreCurve:
    """A curve as profiles hold it."""

    def rounded(values: Floats) -> tuple[float, ...]:
        return tuple(round(min(max(float(v), 0.0), 1.0), 6) for v in values)

    return ScoreCurve(scores=rounded(curve.scores), disagreement=rounded(curve.disagreement), drop=rounded(curve.drop))
