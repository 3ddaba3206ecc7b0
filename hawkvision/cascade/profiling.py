"""Making a profile: from calibrated probabilities of every rung to temperatures, accuracies and certificates.

Apart from `profile` because it needs SciPy, whose import would cost a starting edge node more than a second.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade import calibration, certificate
from hawkvision.cascade.profile import (
    CERTIFIED_DROPS,
    Certificate,
    Condition,
    FrontierPoint,
    Pair,
    RungProfile,
)
from hawkvision.cascade.scores import Probabilities, Score, score, softmax
from hawkvision.manifest import MeasuredAccuracy
from hawkvision.types import Logits

BALANCED_GAP_SHARE = 0.25
"""`balanced` may give up a quarter of the gap between edge and best: closing the last quarter costs as many
escalations as the first three."""

BALANCED_LARGEST_SHARE = 0.5
"""What it may give up where a quarter is less than the certification pictures can show at all, whatever is on them:
with 680 that is 0.65 points, and a rung within 2.6 points of the best would always escalate for want of pictures."""

SMALLEST_GROUP = 10
"""Pictures of a source that is split by itself: the fewest of which the three parts get some each, and roughly their
shares. Sources with fewer, such as one file name per picture, are thrown together."""


class Split(msgspec.Struct, frozen=True):
    """Disjoint index sets of a data set."""

    profile: NDArray[np.intp]
    certify: NDArray[np.intp]
    held_out: NDArray[np.intp]


def split_indices(groups: NDArray[np.str_], seed: int, shares: tuple[float, float] = (0.2, 0.5)) -> Split:
    """Divide pictures into profile, certification and held-out sets, with equal shares of every group.

    Groups of fewer than `SMALLEST_GROUP` are pooled into one. From that many pictures on, no part is empty.

    Args:
        groups: (n,) the source of each picture, so that each part has the same mixture.
        seed: of the shuffle.
        shares: of the profile and the certification part; the rest is held out.
    """
    rng = np.random.default_rng(seed)
    parts: tuple[list[NDArray[np.intp]], ...] = ([], [], [])
    names, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    pool = len(names)
    place = np.where(counts[inverse] < SMALLEST_GROUP, pool, inverse)
    for group in np.unique(place):
        members = rng.permutation(np.flatnonzero(place == group))
        first, second = (round(len(members) * share) for share in (shares[0], shares[0] + shares[1]))
        for part, chosen in zip(parts, np.split(members, [first, second]), strict=True):
            part.append(chosen)
    profile, certify, held_out = (np.sort(np.concatenate(part)) for part in parts)
    return Split(profile, certify, held_out)


def measure_accuracy(correct: NDArray[np.bool_], data_sha256: str) -> MeasuredAccuracy:
    """Top-1 accuracy with its exact 95 % interval."""
    low, high = calibration.clopper_pearson(int(correct.sum()), len(correct))
    return MeasuredAccuracy(
        value=round(float(correct.mean()), 6), n=len(correct), low=round(low, 6), high=round(high, 6),
        data_sha256=data_sha256,
    )  # fmt: skip


def profile_rung(
    name: str,
    models: dict[str, str],
    fingerprint: str,
    logits: Logits,
    labels: NDArray[np.integer],
    split: Split,
    data_sha256: str,
) -> tuple[RungProfile, Probabilities]:
    """Fit one rung's temperature on the profile split and measure it on the certification split.

    Returns the rung and its calibrated probabilities for all pictures (n, classes).
    """
    # Rounded before use, so that the scores certified here are, bit for bit, those of a node that reads the profile.
    temperature = round(calibration.fit_temperature(logits[split.profile], labels[split.profile]), 6)
    probabilities = softmax(logits, temperature)
    right = probabilities.argmax(axis=1) == labels
    confidence = probabilities.max(axis=1)[split.certify].astype(np.float64)
    return RungProfile(
        name=name,
        models=models,
        fingerprint=fingerprint,
        temperature=temperature,
        accuracy=measure_accuracy(right[split.certify], data_sha256),
        calibration_error=round(calibration.expected_calibration_error(confidence, right[split.certify]), 6),
    ), probabilities  # fmt: skip


def profile_pair(
    edge: str,
    best: str,
    edge_probabilities: Probabilities,
    best_probabilities: Probabilities,
    labels: NDArray[np.integer],
    split: Split,
    delta: float = 0.05,
) -> Pair:
    """Certify a pair: grid and score from the profile split, certificates from the certification split."""
    edge_right = edge_probabilities.argmax(axis=1) == labels
    best_right = best_probabilities.argmax(axis=1) == labels
    kind = _choose_score(edge_probabilities[split.profile], edge_right[split.profile], best_right[split.profile])
    scores = score(edge_probabilities, kind).astype(np.float64)
    grid = certificate.threshold_grid(scores[split.profile])
    sample = split.certify
    s, e, b = scores[sample], edge_right[sample], best_right[sample]

    def certified(max_drop: float) -> Certificate:
        found = certificate.certify(s, e, b, grid, max_drop, delta)
        return Certificate(
            max_drop=round(max_drop, 6), threshold=_written(found.value), delta=delta, n=len(sample), basis="labelled",
            escalation=round(found.escalation, 6), observed_drop=round(found.drop, 6),
        )  # fmt: skip

    gap = float(best_right[split.profile].mean() - edge_right[split.profile].mean())
    lost, gained = int((b & ~e).sum()), int((e & ~b).sum())
    fast = Certificate(
        max_drop=math.ceil(certificate.drop_upper_bound(lost, gained, len(sample), delta) * 1e4) / 1e4,
        threshold="never", delta=delta, n=len(sample), basis="labelled",
        escalation=0.0, observed_drop=round((lost - gained) / len(sample), 6),
    )  # fmt: skip
    frontier = tuple(
        FrontierPoint(threshold=_written(t.value), escalation=round(t.escalation, 6), drop=round(t.drop, 6))
        for t, _, _ in certificate.sweep(s, e, b, grid[:: max(1, len(grid) // 50)])
    )
    whole = Condition(
        min_received_fraction=1.0,
        balanced=certified(balanced_drop(gap, len(sample), delta)),
        fast=fast,
        certificates=tuple(certified(drop) for drop in CERTIFIED_DROPS),
        frontier=frontier,
    )
    return Pair(edge=edge, best=best, score=kind, conditions=(whole,))


def balanced_drop(gap: float, n: int, delta: float) -> float:
    """The ε of `balanced`, from the gap on the profile split and the number of certification pictures alone."""
    least = certificate.drop_upper_bound(0, 0, n, delta)
    return max(0.0, min(max(BALANCED_GAP_SHARE * gap, least), BALANCED_LARGEST_SHARE * gap))


def _choose_score(probabilities: Probabilities, edge_right: NDArray[np.bool_], best_right: NDArray[np.bool_]) -> Score:
    """The score with the smaller area under its drop-against-escalation curve; top-1 when there is no difference."""
    area: dict[Score, float] = {}
    for kind in Score:
        values = score(probabilities, kind).astype(np.float64)
        grid = certificate.threshold_grid(values)
        points = [t for t, _, _ in certificate.sweep(values, edge_right, best_right, grid)]
        area[kind] = float(np.trapezoid([t.drop for t in points][::-1], [t.escalation for t in points][::-1]))
    return Score.MARGIN if area[Score.MARGIN] < area[Score.TOP1] else Score.TOP1


def _written(value: float) -> float | Literal["always", "never"]:
    if math.isinf(value):
        return "always" if value > 0 else "never"
    return float(value)
