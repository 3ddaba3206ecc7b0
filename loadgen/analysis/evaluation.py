"""What an evaluation says per target: accuracy, drop below the reference stage, escalations and latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    Quality,
    Target,
    target_fields,
)
from loadgen.analysis.bootstrap import exact_interval


@dataclass(frozen=True, slots=True)
class EvaluatedImage:
    """One answered image: how right it was, what the client waited, and what the answer says of itself."""

    right: float
    """1 − the loss, which is 0 or 1 for a class."""
    latency_ms: float
    answer: Answer


@dataclass(frozen=True, slots=True)
class EvaluatedImages:
    """What was answered so far, by image."""

    samples: dict[Target, dict[int, EvaluatedImage]] = field(default_factory=dict)
    unattainable: dict[Target, float] = field(default_factory=dict)
    """The maximum that the node named instead."""


class UnattainableTarget(msgspec.Struct, frozen=True, tag="unattainable"):
    """A target that the node refused with 422."""

    target: str
    maximum: float


class TargetRow(msgspec.Struct, frozen=True, tag="measured"):
    """What one target was measured to give. Fractions are 0..1, times milliseconds at the client."""

    target: str
    n: int
    accuracy: float
    low: float
    high: float
    lost: float
    """Images that `quality=best` got right and this target wrong; where answers can be partly right, the sum of what
    was lost."""
    gained: float
    """The reverse."""
    drop: float
    guaranteed_drop: float | None
    """Largest bound that any answer stated; None where any stated none."""
    status: dict[AccuracyStatus, int]
    escalated: float
    degraded: int
    p50_ms: float
    p99_ms: float


def rows_of(
    seen: EvaluatedImages, chosen: NDArray[np.intp], targets: Sequence[Target]
) -> tuple[TargetRow | UnattainableTarget, ...]:
    """The rows of targets with answers, each over the images that `best` has answered, too."""
    best = seen.samples.get(Quality.BEST, {})
    rows: list[TargetRow | UnattainableTarget] = []
    for target in targets:
        if target in seen.unattainable:
            rows.append(UnattainableTarget(written(target), seen.unattainable[target]))
            continue
        samples = seen.samples.get(target, {})
        both = [index for index in chosen.tolist() if index in samples and index in best]
        if both:
            rows.append(summarise(written(target), [samples[index] for index in both], [best[index] for index in both]))
    return tuple(rows)


def written(target: Target) -> str:
    """The target as `field=value`."""
    ((name, value),) = target_fields(target).items()
    return f"{name}={value}"


def summarise(target: str, samples: Sequence[EvaluatedImage], best: Sequence[EvaluatedImage]) -> TargetRow:
    """One row from a target's samples and those of `best` for the same images, in the same order."""
    n = len(samples)
    right = np.array([sample.right for sample in samples], np.float64)
    best_right = np.array([sample.right for sample in best], np.float64)
    lost = float(np.maximum(0.0, best_right - right).sum())
    gained = float(np.maximum(0.0, right - best_right).sum())
    low, high = exact_interval(float(right.sum()), n)
    p50, p99 = np.percentile([sample.latency_ms for sample in samples], (50, 99))
    guarantees = [sample.answer.accuracy for sample in samples]
    bounds = [guarantee.max_drop for guarantee in guarantees if guarantee.max_drop is not None]
    return TargetRow(
        target=target,
        n=n,
        accuracy=float(right.mean()),
        low=low,
        high=high,
        lost=_whole(lost),
        gained=_whole(gained),
        drop=(lost - gained) / n,
        guaranteed_drop=max(bounds) if len(bounds) == n else None,
        status={s: found for s in AccuracyStatus if (found := sum(p.status is s for p in guarantees))},
        escalated=sum(sample.answer.escalated for sample in samples) / n,
        degraded=sum(sample.answer.degraded for sample in samples),
        p50_ms=float(p50),
        p99_ms=float(p99),
    )


def _whole(number: float) -> float:
    """The number, as an integer if it is one."""
    return int(number) if number.is_integer() else number
