"""Whether accuracy was kept: drops against the reference stage, shortfalls against targets, what answers claimed."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.bootstrap import Floats, block_length, bootstrap, clustered_error, exact_interval, interval
from loadgen.analysis.samples import CountedRequests, number_of
from loadgen.workload.record import Run, TargetClass

BOUNDS: Final = ("max_accuracy_drop", "min_accuracy")
"""Fields of a target that say in numbers what accuracy is wanted."""
STANDARD_ERRORS: Final = 1.96
"""From a mean to the end of its 95 % interval."""


class IntervalEstimate(msgspec.Struct, frozen=True):
    """A measured number with its 95 % interval."""

    value: float
    low: float
    high: float


class TargetVerdict(StrEnum):
    """Whether answers were as accurate as their target asks."""

    KEPT = "kept"
    """The whole 95 % interval is."""
    UNSHOWN = "kept, not shown"
    """What was measured is, and could be so by chance."""
    UNCERTAIN = "within error"
    """Missed by no more than chance explains."""
    FLAGGED = "missed, flagged"
    """Missed, but not among the answers that claim otherwise, as far as can be shown."""
    UNCLAIMED = "missed, never claimed"
    """Missed, and no answer claimed otherwise: what servers without guarantees do."""
    SILENT = "missed silently"
    """Missed among the answers that claim to keep it."""


class TargetJudgement(msgspec.Struct, frozen=True):
    """How a class stands to its target. Shortfalls are fractions; above zero, accuracy is missing."""

    field: str
    """`max_accuracy_drop` or `min_accuracy`."""
    bound: float
    shortfall: IntervalEstimate
    """Over answers."""
    effective_shortfall: IntervalEstimate
    """Over all requests, those late or without an answer taken for wrong."""
    unflagged_shortfall: IntervalEstimate | None
    """Over the answers that claim to keep the target; None if there are none."""
    verdict: TargetVerdict


def drops_of(run: Run, counted: CountedRequests) -> Floats:
    """Per request, what was lost against the reference stage, -1 to 1; NaN where that was not measured."""
    reference = run.reference or {}
    best = np.array([float(reference.get(image, math.nan)) for image in counted.image.tolist()])
    drops: Floats = best - counted.right
    return drops


def bound_field(target: TargetClass) -> str | None:
    """The field that says in numbers what accuracy is wanted; None if there is none."""
    return next((name for name in BOUNDS if name in target.fields), None)


def judge(
    run: Run, target: TargetClass, counted: CountedRequests, drops: Floats, unflagged: NDArray[np.bool_]
) -> TargetJudgement | None:
    """How a class stands to its target, given what was lost per request and which answers claim to keep the target.

    None where the target is not a number, or where it cannot be said.

    Raises:
        ConfigError: if the target's number is none.
    """
    field = bound_field(target)
    if field is None or not run.labelled:
        return None
    bound = number_of(run, target, field)
    assert bound is not None
    # Per request, what is missing on average to keep the target: above zero, it is broken.
    right = counted.right
    missing: Floats = drops - bound if field == "max_accuracy_drop" else bound - right
    late = np.where(counted.in_time, 0.0, right)
    measured = np.isfinite(missing)
    shortfall = mean_difference(missing, counted.image, measured & counted.labelled)
    effective = mean_difference(missing + late, counted.image, measured, run.origin.seed)
    if shortfall is None or effective is None:
        return None
    unflagged_shortfall = mean_difference(missing, counted.image, measured & unflagged)
    return TargetJudgement(
        field, bound, shortfall, effective, unflagged_shortfall, _verdict(shortfall, unflagged_shortfall)
    )


def _verdict(shortfall: IntervalEstimate, unflagged: IntervalEstimate | None) -> TargetVerdict:
    if unflagged is not None and unflagged.low > 0:
        return TargetVerdict.SILENT
    if shortfall.low > 0:
        return TargetVerdict.UNCLAIMED if unflagged is None else TargetVerdict.FLAGGED
    if shortfall.value > 0:
        return TargetVerdict.UNCERTAIN
    return TargetVerdict.KEPT if shortfall.high <= 0 else TargetVerdict.UNSHOWN


def mean_difference(
    differences: Floats, images: NDArray[np.int64], which: NDArray[np.bool_], in_time_seed: int | None = None
) -> IntervalEstimate | None:
    """The mean of paired differences; those on the same image may depend on each other.

    With a seed, neighbours in time may be alike as well, and the wider of both intervals is taken. Never narrower than
    the exact upper bound of a share that was never seen: no difference among ten images proves little.
    """
    some, clusters = differences[which], images[which]
    n = len(some)
    if n == 0:
        return None
    mean = float(some.mean())
    unseen = exact_interval(0, len(np.unique(clusters)))[1]
    margin = max(STANDARD_ERRORS * clustered_error(some, clusters), unseen)
    low, high = mean - margin, mean + margin
    if in_time_seed is not None:
        resampled = bootstrap(n, block_length(some), in_time_seed, lambda places: some[places].mean(axis=1))
        early, late = interval(resampled)
        low, high = min(low, early), max(high, late)
    return IntervalEstimate(mean, low, high)
