"""Making a profile: from the stages' predictions to temperatures, accuracies and certificates.

It needs SciPy, whose import takes over a second; `profile` does without, so that edge nodes start quickly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.bounds import clopper_pearson, drop_upper_bound
from hawkvision.cascade.certification.certificate import (
    Method,
    Sample,
    Thresholds,
    ThresholdStep,
    certify,
    sweep,
    threshold_grid,
    two_levels,
)
from hawkvision.cascade.certification.certificate_rounding import path_step, write_certificate, written, written_curve
from hawkvision.cascade.certification.predictions import Split, StagePredictions, make_sample, measure_accuracy
from hawkvision.cascade.certification.profile import (
    CERTIFIED_DROPS,
    Certificate,
    Condition,
    Intermediate,
    Pair,
    Profile,
    StageProfile,
    threshold_value,
)
from hawkvision.cascade.certification.threshold_order import (
    Costs,
    Path,
    expected_cost,
    measure_curve,
    plan_paths,
)
from hawkvision.cascade.confidence import calibration
from hawkvision.core.types import Logits, Score
from hawkvision.tasks.class_scores import softmax

BALANCED_GAP_SHARE = 0.25
"""The share of the gap between edge and reference that `balanced` may give up."""

BALANCED_LARGEST_SHARE = 0.5
"""The same where a quarter of the gap is less than so few certification images can certify at all."""

ESCALATION_MS = 5.0
"""The assumed cost of an escalation besides the datacenter's work: a round trip on a good network."""


def profile_stage(
    name: str,
    models: dict[str, str],
    fingerprint: str,
    logits: Logits,
    labels: NDArray[np.integer],
    split: Split,
    data_sha256: str,
    cost_ms: float,
    delta: float = 0.05,
) -> tuple[StageProfile, StagePredictions]:
    """Fit one stage's temperature on the profile split and measure its accuracy on the certification split."""
    # Rounded before use, so that a node that reads the profile computes the same scores bit for bit.
    temperature = round(calibration.fit_temperature(logits[split.profile], labels[split.profile]), 6)
    predictions = StagePredictions(name, softmax(logits, temperature), round(cost_ms, 3))
    right = predictions.labels() == labels
    confidence = predictions.scores(Score.TOP1)[split.certify]
    return StageProfile(
        name=name,
        models=models,
        fingerprint=fingerprint,
        temperature=temperature,
        accuracy=measure_accuracy(right[split.certify], data_sha256, delta),
        calibration_error=round(calibration.expected_calibration_error(confidence, right[split.certify]), 6),
        cost_ms=predictions.cost_ms,
    ), predictions  # fmt: skip


def profile_pair(
    edge: StagePredictions,
    best: StagePredictions,
    labels: NDArray[np.integer],
    split: Split,
    intermediate: StagePredictions | None = None,
    delta: float = 0.05,
    escalation_ms: float = ESCALATION_MS,
    reused_ms: float = 0.0,
) -> Pair:
    """Certify a pair: scores, curves and path from the profile split, certificates from the certification split.

    The intermediate stage has already paid `reused_ms` of the reference stage's cost
    (`model_zoo.calibration.model_runner.CascadePredictions.reused_ms`).
    """
    planned = split.profile
    kind = _choose_score(edge, best, labels, planned)
    intermediate_kind = _choose_score(intermediate, best, labels, planned) if intermediate else None
    chosen = make_sample(edge, kind, best, labels, planned, intermediate, intermediate_kind)
    costs = Costs(edge.cost_ms, best.cost_ms, escalation_ms, intermediate.cost_ms if intermediate else None, reused_ms)
    paths = tuple(rounded_path(path) for path in plan_paths(chosen, costs))
    sample = make_sample(edge, kind, best, labels, split.certify, intermediate, intermediate_kind)
    gap = float((chosen.best_right.astype(np.float64) - chosen.edge.right).mean())
    balanced = balanced_drop(gap, len(sample), delta / len(paths))
    whole = certify_condition(sample, paths, costs, balanced, delta, Method.EXACT)
    between = None
    if (
        intermediate is not None
        and intermediate_kind is not None
        and chosen.intermediate is not None
        and len(paths) > 1
    ):
        between = Intermediate(
            name=intermediate.name,
            score=intermediate_kind,
            curve=written_curve(measure_curve(chosen.intermediate, chosen.best_right)),
            path=tuple(path_step(step) for step in sweep(sample, paths[1])),
            reused_ms=reused_ms,
        )
    return Pair(
        edge=edge.name,
        best=best.name,
        score=kind,
        escalation_ms=escalation_ms,
        intermediate=between,
        curve=written_curve(measure_curve(chosen.edge, chosen.best_right)),
        path=tuple(path_step(step) for step in sweep(sample, paths[0])),
        conditions=(whole,),
    )


def certify_condition(
    sample: Sample,
    paths: Sequence[Path],
    costs: Costs,
    balanced: float,
    delta: float,
    method: Method,
    planned: Certificate | None = None,
) -> Condition:
    """Certificates of whole images for all `CERTIFIED_DROPS`, for `balanced` and for never escalating.

    Several paths share δ equally, so that the cheapest result may be chosen. If `balanced` can be certified only by
    escalating everything, the `planned` thresholds stay, without a guarantee.
    """
    n = len(sample)

    def cost(step: ThresholdStep) -> float:
        return expected_cost(costs, step)

    def certified(max_drop: float) -> Certificate:
        found = [certify(sample, path, max_drop, delta / len(paths), method, cost) for path in paths]
        step = min(found, key=cost)
        return write_certificate(step, max_drop, n, delta, method)

    never = next(sweep(sample, (Thresholds(-math.inf),)))
    if method is Method.AGREEMENT:
        bound = clopper_pearson(never.differing, n, 2 * delta)[1]
    else:
        bound = drop_upper_bound(never.lost, never.gained, n, delta)
    kept = certified(balanced)
    if planned is not None and (kept.threshold, kept.intermediate_threshold) == ("always", "always"):
        kept = msgspec.structs.replace(planned, basis="profile")
    return Condition(
        min_received_fraction=1.0,
        balanced=kept,
        fast=write_certificate(never, math.ceil(bound * 1e4) / 1e4, n, delta, method),
        certificates=tuple(certified(drop) for drop in CERTIFIED_DROPS),
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


def balanced_drop(gap: float, n: int, delta: float) -> float:
    """The ε of `balanced`, from the gap on the profile split and the number of certification images alone."""
    least = drop_upper_bound(0, 0, n, delta)
    return max(0.0, min(max(BALANCED_GAP_SHARE * gap, least), BALANCED_LARGEST_SHARE * gap))


def _choose_score(
    predictions: StagePredictions, best: StagePredictions, labels: NDArray[np.integer], chosen: NDArray[np.intp]
) -> Score:
    """The kind of score with the smaller area under its curve of drop against escalation; top-1 on a tie."""
    area: dict[Score, float] = {}
    for kind in Score:
        sample = make_sample(predictions, kind, best, labels, chosen)
        steps = list(sweep(sample, two_levels(threshold_grid(sample.edge.scores))))
        area[kind] = float(np.trapezoid([s.drop for s in steps][::-1], [s.escalation for s in steps][::-1]))
    return Score.MARGIN if area[Score.MARGIN] < area[Score.TOP1] else Score.TOP1
