"""How sure a model is: probabilities from logits, and the score that is compared with the threshold."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.types import Logits

Floats: TypeAlias = NDArray[np.float64]
ROUNDING: Final = 1e-4
"""Tolerance for the sum of probabilities, many times their rounding error."""
FEW: Final = 16
"""Up to this many classes, repeated search for the largest is faster than sorting."""
Probabilities: TypeAlias = NDArray[np.float32]
"""(n, classes), rows summing to one."""


class Score(StrEnum):
    """The score that a stage is accepted by; both lie in 0..1 and grow with confidence."""

    TOP1 = "top1"
    MARGIN = "margin"


def softmax(logits: Logits, temperature: float = 1.0) -> Probabilities:
    """Temperature-scaled probabilities (n, classes) of logits (n, classes).

    Computed in double precision and rounded, so that processors agree: a certificate made on one is used on another.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    scaled -= np.maximum.reduce(scaled, axis=1, keepdims=True)
    np.exp(scaled, out=scaled)
    scaled /= np.add.reduce(scaled, axis=1, keepdims=True)
    return scaled.astype(np.float32)


def tempered(logits: Logits, temperature: float) -> Logits:
    """Logits that give at temperature 1 the probabilities that these give at `temperature`."""
    return logits / np.float32(temperature)


def score(probabilities: Probabilities, kind: Score) -> NDArray[np.float32]:
    """The score (n,) of each row: its largest probability, or its lead over the second largest."""
    top = np.partition(probabilities, -2, axis=1)[:, -2:]
    return top[:, 1] if kind is Score.TOP1 else top[:, 1] - top[:, 0]


def top_classes(probabilities: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """The k most probable classes of one row (classes,), most probable first, ties by lower index."""
    k = min(k, len(probabilities))
    if k > FEW:
        by_rank: NDArray[np.intp] = (-probabilities).argsort(kind="stable")[:k]
        return by_rank
    left = probabilities.copy()
    order = np.empty(k, np.intp)
    for rank in range(k):
        order[rank] = found = left.argmax()
        left[found] = -np.inf
    return order


def most_probable(
    logits: Logits, temperature: float, k: int, before: float = 1.0
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The k most probable classes of one image and their probabilities, most probable first, ties by lower index.

    The logits (classes,) are divided by `before` as by `tempered`, then taken at `temperature`.
    """
    probabilities = softmax(tempered(logits, before)[np.newaxis], temperature)[0]
    order = top_classes(probabilities, k)
    return tuple(order.tolist()), tuple(probabilities[order].tolist())


def average(members: Sequence[Probabilities], temperature: float = 1.0) -> Probabilities:
    """An ensemble's probabilities: the mean of its members', then scaled by `temperature`.

    Members (and views of the image) are each (n, classes). Averaging probabilities instead of logits limits the weight
    of an over-confident member (Lakshminarayanan et al., "Deep Ensembles", NeurIPS 2017, §2.4).
    """
    mean = np.asarray(np.mean(np.asarray(members), axis=0, dtype=np.float64), np.float32)
    return mean if temperature == 1.0 else softmax(log_probabilities(mean), temperature)


def decided(total: Probabilities, missing: int, rounding: float = ROUNDING) -> bool:
    """Whether the top class of a sum of probabilities (1, classes) is final, whatever is added.

    Args:
        total: the sum over the views or members so far; each adds 1 over all classes.
        missing: the number still to be added; each changes the lead by at most 1.
        rounding: tolerance of the comparison; larger where it ends the computation than where it is checked.
    """
    second, first = np.partition(total[0], -2)[-2:]
    return missing == 0 or float(first - second) > missing + rounding


def log_probabilities(probabilities: Probabilities) -> Logits:
    """Logits that give these probabilities at temperature 1. Zero counts as float32's smallest normal number.

    Rounded from double precision, as in `softmax`.
    """
    logits = np.log(np.maximum(probabilities, np.finfo(np.float32).tiny), dtype=np.float64)
    return logits.astype(np.float32)
