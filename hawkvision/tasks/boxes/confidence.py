"""How sure a detector is of an image as a whole, from its boxes: the scores that a stage can be accepted by.

Boxes are taken as independent, each with the calibrated probability that it is right. Adding a score is adding a
function to `STATISTICS`, and to `SCORES` if it lies in 0..1 and grows with the chance that the image is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import numpy as np

from hawkvision.core.types import Output
from hawkvision.tasks.boxes.rows import MEMBERS, SCORE

Statistic: TypeAlias = Callable[[Output, float], float]
"""Of the boxes of one image and the score from which on a box is part of the prediction."""

LEAST: Final = 0.1
"""Boxes below this score are no evidence of an object that was missed."""


def expected_f1(output: Output, threshold: float) -> float:
    """2·right / (boxes predicted + objects there), with expected numbers; without boxes, the chance of no object."""
    right: list[float] = output[output[:, SCORE] >= threshold, SCORE].tolist()
    every: list[float] = output[output[:, SCORE] >= LEAST, SCORE].tolist()
    if not right:
        return math.prod(1.0 - score for score in every)
    return min(1.0, 2.0 * math.fsum(right) / (len(right) + max(math.fsum(every), math.fsum(right))))


def ambiguity(output: Output, threshold: float) -> float:  # noqa: ARG001 - the same for any
    """The expected number of boxes on the wrong side of one half: the sum of min(score, 1 − score)."""
    return math.fsum(min(score, 1.0 - score) for score in output[output[:, SCORE] >= LEAST, SCORE].tolist())


def agreement(output: Output, threshold: float) -> float:
    """F1 of the members' predictions with one another, mean over pairs; 1 for a single model.

    Members found the same object where their boxes were fused. A model and its mirrored view are two members.
    """
    found = output[:, MEMBERS:] >= np.float32(threshold)
    members = found.shape[1]
    if members < 2:
        return 1.0
    numbers, common = found.sum(axis=0).tolist(), (found.T.astype(np.int64) @ found.astype(np.int64)).tolist()
    pairs = [(i, j) for i in range(members) for j in range(i)]
    of_pairs = [2.0 * common[i][j] / (numbers[i] + numbers[j]) if numbers[i] + numbers[j] else 1.0 for i, j in pairs]
    return math.fsum(of_pairs) / len(pairs)


def objects(output: Output, threshold: float) -> float:
    """The number of boxes predicted."""
    return float((output[:, SCORE] >= threshold).sum())


def lowest(output: Output, threshold: float) -> float:
    """The lowest score of a box predicted; 1 if there is none."""
    kept = output[output[:, SCORE] >= threshold, SCORE]
    return float(kept.min()) if len(kept) else 1.0


def runner_up(output: Output, threshold: float) -> float:
    """The highest score of a box not predicted; 0 if there is none."""
    left = output[output[:, SCORE] < threshold, SCORE]
    return float(left.max()) if len(left) else 0.0


def small(output: Output, threshold: float) -> float:
    """The number of boxes predicted that cover less than a hundredth of the image."""
    kept = output[output[:, SCORE] >= threshold, :4].astype(np.float64)
    return float(((kept[:, 2] - kept[:, 0]) * (kept[:, 3] - kept[:, 1]) < 0.01).sum())


STATISTICS: Final[Mapping[str, Statistic]] = {
    "expected_f1": expected_f1,
    "ambiguity": ambiguity,
    "agreement": agreement,
    "objects": objects,
    "lowest": lowest,
    "runner_up": runner_up,
    "small": small,
}

SCORES: Final[Mapping[str, Statistic]] = {
    "expected_f1": expected_f1,
    "unambiguous": lambda output, threshold: 1.0 / (1.0 + ambiguity(output, threshold)),
    "agreement": agreement,
}
REGRESSION: Final = "regression"
"""The score by coefficients of a manifest: logistic(intercept + Σ coefficient · statistic)."""


def regression(output: Output, threshold: float, coefficients: Mapping[str, float], intercept: float) -> float:
    """The logistic function of a weighted sum of `STATISTICS`."""
    terms = [weight * STATISTICS[name](output, threshold) for name, weight in coefficients.items()]
    value = math.fsum([intercept, *terms])
    return 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, value))))
