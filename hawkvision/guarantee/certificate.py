"""Thresholds with a guarantee on the accuracy drop.

Thresholds are tested in an order that was fixed without the evidence. The first lets the reference stage answer
everything; each later one accepts more answers below it. Each is tested at level δ (`bounds`) until one fails (fixed
sequence testing, Maurer et al. 1995). So with probability at least 1 − δ over samples, the drop of the chosen threshold
is below ε for traffic exchangeable with the sample, however many thresholds were tested.

No p-value falls when an ℓ rises, and a missing label counts as the largest ℓ (`evidence`). So what some labels certify
all labels would certify, too: label in any order, look as often as you like, and stop when you like.

A step of the path is a pair of thresholds. The edge's answer is accepted from `edge` on; the intermediate stage's
answer to an escalated image is accepted from `intermediate` on. `intermediate` = +∞ means two levels. With both +∞ the
reference stage answers everything, and no test is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hawkvision.guarantee.bounds import (
    drop_upper_bound,
    mean_drop_upper_bound,
    nuisance_beta,
    paired_betting_p,
    paired_exact_p,
)
from hawkvision.guarantee.evidence import (
    BEST_ONLY,
    Evidence,
    Thresholds,
    ThresholdStep,
    disagreements,
    losses,
    sweep,
)
from hawkvision.tasks.class_scores import Floats


def certify(
    evidence: Evidence,
    path: Sequence[Thresholds],
    max_drop: float,
    delta: float = 0.05,
    cost: Callable[[ThresholdStep], float] | None = None,
) -> ThresholdStep:
    """The cheapest step of the path whose drop below the reference stage is certified to be less than `max_drop`.

    Args:
        evidence: images that served neither to choose the path nor to train a model.
        path: thresholds from (+∞, +∞) on, chosen without the evidence.
        max_drop: ε, the accuracy that may be given up, in [0, 1]; at 0 only the reference stage answers.
        delta: probability over samples that the certificate is wrong.
        cost: of a step; None means that each step is cheaper than those before it, as with two levels.

    Raises:
        ValueError: as `certified_steps`.
    """
    steps = certified_steps(evidence, path, max_drop, delta)
    return steps[-1] if cost is None else min(steps, key=cost)


def certified_steps(
    evidence: Evidence, path: Sequence[Thresholds], max_drop: float, delta: float
) -> list[ThresholdStep]:
    """The steps before the first failure. They are certified together, so any of them may be chosen.

    Raises:
        ValueError: if the path does not start with (+∞, +∞) or a threshold rises along it.
    """
    check_path(path)
    found = list(sweep(evidence, path[:1]))
    if max_drop <= 0.0:
        return found
    last_counts, passed = (-1.0, -1.0, -1.0), True
    for step in sweep(evidence, path[1:]):
        counts = (step.lost, step.gained, step.differing)
        # Equal counts are equal evidence, except for betting, which depends on their order too.
        if counts != last_counts or not evidence.exact:
            last_counts, passed = counts, _p_value(evidence, step, max_drop, delta) <= delta
        if not passed:
            break
        found.append(step)
    return found


def check_path(path: Sequence[Thresholds]) -> None:
    """Check that a path is in testing order.

    Raises:
        ValueError: if it does not start with (+∞, +∞) or raises a threshold on its way.
    """
    if not path or path[0] != BEST_ONLY:
        raise ValueError("the path must start with +inf, where the reference stage answers everything")
    edges, intermediates = (np.array([getattr(t, name) for t in path]) for name in ("edge", "intermediate"))
    if not (np.all(edges[1:] <= edges[:-1]) and np.all(intermediates[1:] <= intermediates[:-1])):  # false for NaN, too
        raise ValueError("the thresholds of a path must descend, or stay")


def _p_value(evidence: Evidence, step: ThresholdStep, max_drop: float, delta: float) -> float:
    if evidence.exact:
        return paired_exact_p(
            int(step.lost), int(step.gained), len(evidence), max_drop, nuisance_beta(delta), _differing(step)
        )
    return paired_betting_p(*_bets(evidence, step), max_drop, delta, evidence.planned)


def drop_bound(evidence: Evidence, step: ThresholdStep, delta: float) -> float:
    """The smallest ε that the test certifies for one step alone: an upper confidence bound on its drop."""
    if evidence.exact:
        return drop_upper_bound(int(step.lost), int(step.gained), len(evidence), delta, _differing(step))
    return mean_drop_upper_bound(*_bets(evidence, step), delta, evidence.planned)


def _differing(step: ThresholdStep) -> int:
    """The most images that can be lost or gained, whatever the labels that are still missing."""
    return int(max(step.differing, step.lost + step.gained))


def _bets(evidence: Evidence, step: ThresholdStep) -> tuple[Floats, Floats]:
    """ℓ of every image, and what its stake may know: its disagreement."""
    return losses(evidence, step.thresholds), np.add(*disagreements(evidence, step.thresholds))


def least_drop(n: int, delta: float, *, binary: bool) -> float:
    """The smallest ε that n images can certify, which takes that not one of them loses anything."""
    return drop_upper_bound(0, 0, n, delta) if binary else mean_drop_upper_bound(np.zeros(n), np.zeros(n), delta)
