"""From logits to calibrated probabilities, for one variant and for a committee of several.

A variant's probabilities are softmax(logits / T), averaged over the views of a picture (itself, and its mirror image
where the committee asks for it). A committee averages its members' probabilities, all with equal weight, and may carry
a temperature of its own, applied to the logarithm of the average. Averaging probabilities rather than logits keeps one
over-confident member from outvoting the rest (Lakshminarayanan et al., "Deep Ensembles", NeurIPS 2017, §2.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.hop import HopClass
from hawkvision.types import Logits

Probabilities: TypeAlias = NDArray[np.float32]
"""(classes,) or (n, classes), summing to one along the last axis."""

# The smallest probability whose logarithm is taken: float32's smallest normal number.
_TINY = float(np.finfo(np.float32).tiny)


def probabilities(logits: Logits, temperature: float) -> Probabilities:
    """softmax(logits / temperature) along the last axis; computed in float64, returned in float32."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    result: Probabilities = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    return result


def average(members: Sequence[Probabilities], temperature: float = 1.0) -> Probabilities:
    """The equal-weight mean of the members' probabilities, then sharpened or softened by `temperature`."""
    mean: Probabilities = np.mean(np.asarray(members, dtype=np.float64), axis=0).astype(np.float32)
    if temperature == 1.0:
        return mean
    return probabilities(np.log(np.maximum(mean, _TINY)), temperature)


def top_k(row: Probabilities, k: int) -> tuple[HopClass, ...]:
    """The k most probable classes (fewer if there are fewer), best first; of equals the lower index first."""
    order = np.argsort(-row, kind="stable")[:k]
    return tuple(HopClass(int(i), float(row[i])) for i in order)
