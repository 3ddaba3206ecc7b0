"""The order in which thresholds are tested: the least loss of accuracy for the cost saved comes first.

Only the profile split is used, so the path is fixed before the certification labels are opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from hawkvision.guarantee.evidence import (
    Evidence,
    StageEvidence,
    Thresholds,
    ThresholdStep,
    sweep,
    threshold_grid,
    two_levels,
)
from hawkvision.tasks.class_scores import Floats

EDGE_POINTS: Final = 100
INTERMEDIATE_POINTS: Final = 24
LEAST_SCORE: Final = 1e-6
"""Scores are clipped to this distance from 0 and 1; networks give many images exactly 1.0."""

Path: TypeAlias = tuple[Thresholds, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of an image at each stage, in milliseconds of one core, and of an escalation."""

    edge: float
    best: float
    escalation: float
    intermediate: float | None = None
    """None where there is no intermediate stage."""
    reused: float = 0.0
    """The part of `best` that the intermediate stage has already paid (`datacenter.stages.cascade_executor`)."""


def disagreement_risk(scores: Floats, disagreements: Floats) -> Floats:
    """E[disagreement | score] of every image (n,), by logistic regression on the score's logit.

    It extrapolates to scores above the last observed difference. A Gaussian prior of variance 1 on the slope (of
    standardised logits) keeps it finite if one score separates the classes.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    clipped = np.clip(scores, LEAST_SCORE, 1.0 - LEAST_SCORE)
    logits = np.log(clipped) - np.log1p(-clipped)
    spread = float(logits.std())
    design = np.stack([np.ones(len(logits)), (logits - logits.mean()) / (spread or 1.0)], axis=1)

    def loss(weights: Floats) -> float:
        logit = design @ weights
        return float((np.logaddexp(0.0, logit) - disagreements * logit).sum() + 0.5 * weights[1] ** 2)

    def slope(weights: Floats) -> Floats:
        found: Floats = design.T @ (expit(design @ weights) - disagreements) + np.array([0.0, weights[1]])
        return found

    risk: Floats = expit(design @ minimize(loss, np.zeros(2), jac=slope, method="BFGS").x)
    return risk


def plan_paths(sample: Evidence, costs: Costs) -> tuple[Path, ...]:
    """The paths to certify, from images of the profile split: two levels, and three if that is cheaper.

    With three levels both thresholds fall, one bin of scores at a time. The next bin is the one whose acceptance is
    expected to lose the least accuracy for the cost it saves.
    """
    two = two_levels(threshold_grid(sample.edge.scores))
    if sample.intermediate is None or costs.intermediate is None:
        return (two,)
    three = _three_levels(sample, sample.intermediate, costs)
    return (two, three) if _area(sample, three, costs) < _area(sample, two, costs) else (two,)


def _three_levels(sample: Evidence, intermediate: StageEvidence, costs: Costs) -> Path:
    edge_grid = threshold_grid(sample.edge.scores, EDGE_POINTS)
    intermediate_grid = threshold_grid(intermediate.scores, INTERMEDIATE_POINTS)
    assert costs.intermediate is not None
    more = costs.best - costs.reused
    bins = [
        *_bins(
            sample.edge, sample.reference_losses, edge_grid, costs.escalation + costs.intermediate + more / 2.0, level=0
        ),
        *_bins(intermediate, sample.reference_losses, intermediate_grid, more, level=1),
    ]
    bars = [math.inf, math.inf]
    path = [Thresholds(*bars)]
    for step in sorted(bins):
        bars[step.level] = step.bar
        path.append(Thresholds(*bars))
        if bars[0] == -math.inf:
            break
    return tuple(path)


@dataclass(frozen=True, slots=True, order=True)
class _Bin:
    """Scores from `bar` up to the previous bin. Bins are ordered by drop per saved cost, then by depth."""

    price: float
    depth: float
    level: int
    bar: float


def _bins(stage: StageEvidence, reference_losses: Floats, grid: Floats, saving: float, *, level: int) -> list[_Bin]:
    """Ordered by disagreement, which has more events than the drop and is in proportion to it."""
    disagreement = disagreement_risk(stage.scores, stage.disagreements)
    drop = float((1.0 - reference_losses).mean() - (1.0 - stage.losses).mean())
    ratio = max(drop, 1e-3) / max(float(stage.disagreements.mean()), 1e-3)
    order = np.argsort(-stage.scores, kind="stable")
    ends = np.searchsorted(-stage.scores[order], -grid, side="right")
    found: list[_Bin] = []
    price = 0.0
    for place in range(1, len(grid)):
        inside = disagreement[order[ends[place - 1] : ends[place]]]
        # An empty bin has the price of the one before it.
        price = max(price, ratio * float(inside.mean()) / saving) if len(inside) else price
        found.append(_Bin(price, place / len(grid), level, float(grid[place])))
    return found


def _area(sample: Evidence, path: Sequence[Thresholds], costs: Costs) -> float:
    """The least cost at a given drop, averaged over drops up to that of never escalating."""
    steps = list(sweep(sample, path))
    drops = np.maximum.accumulate([step.drop for step in steps])
    spent = np.minimum.accumulate([expected_cost(costs, step) for step in steps])
    # All paths end at never escalating, so all cover the same drops.
    wanted = np.linspace(0.0, max(steps[-1].drop, 1e-6), 41)[1:-1]
    reached = np.searchsorted(drops, wanted, side="right") - 1
    return float(spent[reached].mean())


def expected_cost(costs: Costs, step: ThresholdStep) -> float:
    """Milliseconds per image."""
    total = step.to_best * costs.best + step.escalation * costs.escalation
    if step.thresholds.edge < math.inf:
        total += costs.edge
    if costs.intermediate is not None and step.thresholds.intermediate < math.inf:
        total += step.escalation * costs.intermediate - step.to_best * costs.reused
    return total
