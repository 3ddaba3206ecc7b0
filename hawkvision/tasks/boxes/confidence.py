"""How sure a detector is of an image as a whole, from its boxes.

Boxes are taken as independent, each with the calibrated probability that it is right. Objects without a box are not
counted, so the value orders images well and is itself too high where a model misses many. Other scores were measured
and were no better: `docs/benchmarks/detection.md`.
"""

from __future__ import annotations

import math
from typing import Final

from hawkvision.core.types import Output
from hawkvision.tasks.boxes.rows import SCORE

LEAST: Final = 0.1
"""Boxes below this score are no evidence of an object that was missed."""


def expected_f1(output: Output, threshold: float) -> float:
    """2·right / (boxes predicted + objects there), with expected numbers; without boxes, the chance of no object."""
    right: list[float] = output[output[:, SCORE] >= threshold, SCORE].tolist()
    every: list[float] = output[output[:, SCORE] >= LEAST, SCORE].tolist()
    if not right:
        return math.prod(1.0 - score for score in every)
    return min(1.0, 2.0 * math.fsum(right) / (len(right) + max(math.fsum(every), math.fsum(right))))
