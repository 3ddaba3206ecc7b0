"""The drop that `quality=balanced` gives up: the one with the best exchange between drop and escalation.

The choice is made on images of the design, before any label of the certification images is opened. As many images as
will certify are drawn from them `DRAWS` times, with replacement, and each draw is certified like the images to come.
For each drop on offer this tells how often anything is certified and what share is escalated on average; where nothing
is certified, all of it. The reference stage alone drops nothing and takes everything; never escalating drops what is
certified for it (`fast`) and takes nothing. `balanced` is the drop that lies furthest below the line between both, so

    drop / drop of `fast` + share escalated

is least, among the drops that at least `LEAST_CERTIFIED` of the draws certify.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.profile import TESTED_DROPS
from hawkvision.cascade.certification.threshold_order import Costs, Path, expected_cost
from hawkvision.guarantee.certificate import certified_steps, drop_bound
from hawkvision.guarantee.evidence import BEST_ONLY, Evidence, StageEvidence, Thresholds, ThresholdStep, sweep

DRAWS: Final = 20
"""The standard error of a mean share escalated is at most a fifth of its spread."""
STEPS: Final = 40
"""Of each path so many are tried, which costs a second or two where certifying all of them takes minutes."""
LEAST_CERTIFIED: Final = 0.9
SEED: Final = 2405


@dataclass(frozen=True, slots=True)
class Certifying:
    """What will certify a design: `n` images, at level `delta`."""

    n: int
    delta: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a drop is expected to cost."""

    max_drop: float
    """One of `TESTED_DROPS`."""
    certified: float
    """Share of the draws in which a stage below the reference stage may answer any image."""
    escalation: float
    """Mean share that leaves the edge."""
    price: float
    """The sum that `balanced` makes least."""


def balanced_drop(design: Evidence, paths: Sequence[Path], costs: Costs, to_come: Certifying) -> float:
    """The drop of `balanced`, one of `TESTED_DROPS`; the largest if so few images can hardly certify any.

    Args:
        design: images that will not certify.
        paths: to be tested, each at its share of δ.
        costs: of the stages.
        to_come: what will certify them.
    """
    return choose(exchanges(design, paths, costs, to_come)).max_drop


def choose(offered: Sequence[Exchange]) -> Exchange:
    """The best of the drops that are certified often enough, the smallest of equals; the last if none is."""
    often = [each for each in offered if each.certified >= LEAST_CERTIFIED]
    return min(often, key=lambda each: each.price, default=offered[-1])


def exchanges(design: Evidence, paths: Sequence[Path], costs: Costs, to_come: Certifying) -> list[Exchange]:
    """What each of `TESTED_DROPS` is expected to cost; the arguments are those of `balanced_drop`."""
    rng, thinned = np.random.default_rng(SEED), [_thinned(path) for path in paths]
    never, fast = Thresholds(-math.inf), []
    escalated = np.ones((DRAWS, len(TESTED_DROPS)))
    for row in escalated:
        drawn = _drawn(design, rng.integers(0, len(design), to_come.n))
        fast.append(drop_bound(drawn, next(sweep(drawn, (never,))), to_come.delta))
        found = [_certified(drawn, path, to_come.delta / len(paths)) for path in thinned]
        for place, steps in enumerate(zip(*found, strict=True)):
            cheapest = min((step for some in steps for step in some), key=lambda step: expected_cost(costs, step))
            row[place] = cheapest.escalation if cheapest.thresholds != BEST_ONLY else 1.0
    most = float(np.mean(fast))
    return [
        Exchange(drop, float((shares < 1.0).mean()), float(shares.mean()), drop / most + float(shares.mean()))
        for drop, shares in zip(TESTED_DROPS, escalated.T, strict=True)
    ]


def _thinned(path: Path) -> Path:
    places = np.unique(np.linspace(0, len(path) - 1, STEPS + 1).round().astype(np.intp))
    return tuple(path[place] for place in places)


def _certified(drawn: Evidence, path: Path, delta: float) -> list[list[ThresholdStep]]:
    """The steps that each of `TESTED_DROPS` certifies. What a drop certifies, larger ones certify, too."""
    found: list[list[ThresholdStep]] = []
    passed: list[ThresholdStep] = []
    for drop in TESTED_DROPS:
        first, *further = certified_steps(drawn, (path[0], *path[max(1, len(passed)) :]), drop, delta)
        passed = [*(passed or [first]), *further]
        found.append(passed)
    return found


def _drawn(design: Evidence, chosen: NDArray[np.int64]) -> Evidence:
    def taken(stage: StageEvidence) -> StageEvidence:
        return StageEvidence(stage.scores[chosen], stage.losses[chosen], stage.disagreements[chosen])

    between = None if design.intermediate is None else taken(design.intermediate)
    return replace(
        design, edge=taken(design.edge), intermediate=between, reference_losses=design.reference_losses[chosen]
    )
