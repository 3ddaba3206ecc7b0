"""Certified steps, thresholds and curves in the form in which profiles hold them, rounded."""

from __future__ import annotations

import math

from hawkvision.cascade.certification.bounds import clopper_pearson
from hawkvision.cascade.certification.certificate import Method, ThresholdStep
from hawkvision.cascade.certification.profile import Certificate, EscalationThreshold, PathStep, ScoreCurve, Watch
from hawkvision.cascade.certification.threshold_order import Curve
from hawkvision.tasks.class_scores import Floats


def written(value: float) -> EscalationThreshold:
    """A threshold as profiles write it, with eight decimals, which distinguish all float32 scores."""
    if math.isinf(value):
        return "always" if value > 0 else "never"
    return round(min(max(value, 0.0), 1.0), 8)


def write_certificate(
    step: ThresholdStep, max_drop: float, n: int, delta: float, method: Method = Method.EXACT
) -> Certificate:
    """A certified step as profiles hold it."""
    agreement = method is Method.AGREEMENT
    return Certificate(
        max_drop=round(max_drop, 6),
        threshold=written(step.thresholds.edge),
        intermediate_threshold=written(step.thresholds.intermediate),
        delta=delta,
        n=n,
        basis="agreement" if agreement else "labelled",
        escalation=round(step.escalation, 6),
        to_best=round(step.to_best, 6),
        observed_drop=round(step.differing / n if agreement else step.drop, 6),
        edge_watch=_edge_watch(step, max_drop, n, delta),
        intermediate_watch=_intermediate_watch(step, max_drop, n, delta),
    )


def _edge_watch(step: ThresholdStep, max_drop: float, n: int, delta: float) -> Watch:
    share = 1.0 if step.thresholds.intermediate == math.inf else _share(step.edge_differing, step.differing)
    return _watch(max_drop * share, step.edge_differing, round(step.escalation * n), n, delta)


def _intermediate_watch(step: ThresholdStep, max_drop: float, n: int, delta: float) -> Watch | None:
    escalated = round(step.escalation * n)
    if step.thresholds.intermediate == math.inf or not escalated:
        return None
    differing = step.differing - step.edge_differing
    share = _share(differing, step.differing)
    return _watch(max_drop * share * n / escalated, differing, round(step.to_best * n), escalated, delta)


def _share(part: int, whole: int) -> float:
    """A stage's part of the disagreement by the rule of succession, so that no stage gets none."""
    return (part + 1) / (whole + 2)


def _watch(max_drop: float, differing: int, passed_on: int, n: int, delta: float) -> Watch:
    return Watch(
        max_drop=round(min(1.0, max_drop), 6),
        disagreement=round(clopper_pearson(differing, n, delta)[1], 6),
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
