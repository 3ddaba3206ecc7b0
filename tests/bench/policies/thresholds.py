"""Thresholds that a system without certificates would choose on the images that ours are certified with."""

from __future__ import annotations

import math

import numpy as np

from hawkvision.guarantee.evidence import Evidence
from hawkvision.tasks.class_scores import Floats


def lost(evidence: Evidence, threshold: float) -> Floats:
    """What each image loses against the reference stage (n,) if the edge answers from a threshold on."""
    return np.where(evidence.edge.scores >= threshold, evidence.lost(evidence.edge), 0.0)


def lowest_threshold(evidence: Evidence, max_drop: float) -> float:
    """The threshold that escalates the fewest of these images while they lose at most `max_drop` in the mean.

    No test and no bound: what these images show is taken for what all will. ±∞ escalate nothing and everything.
    """
    order = np.argsort(-evidence.edge.scores, kind="stable")
    scores, losses = evidence.edge.scores[order], evidence.lost(evidence.edge)[order]
    last = np.append(scores[1:] != scores[:-1], True)  # equal scores are answered by the same stage
    kept = np.flatnonzero(last & (losses.cumsum() <= max_drop * len(scores) + 1e-9))
    if not len(kept):
        return math.inf
    return -math.inf if kept[-1] == len(scores) - 1 else float(scores[kept[-1]])
