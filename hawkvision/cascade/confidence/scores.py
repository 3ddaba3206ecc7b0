"""How sure a model is: probabilities from logits, and the score that the threshold is compared with.

Measured (Fashion-MNIST and ImageNet pairs): top-1 probability and margin rank errors equally well; entropy and energy
need up to three times the escalations, and learned heads gained nothing (the project's study of cascades).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.types import Logits
from hawkvision.core.types import Score as Score

Floats: TypeAlias = NDArray[np.float64]
ROUNDING: Final = 1e-4
"""By how much probabilities may miss a sum of 1, many times over."""
FEW: Final = 16
"""Classes that are found one after the other, by looking for the largest left: five of 1,000 take 3 µs on an EPYC, and
10 by partitioning and sorting them."""
Probabilities: TypeAlias = NDArray[np.float32]
"""(n, classes), rows summing to one."""


class Ranking(Protocol):
    """Tells the k most probable classes of one image, most probable first, ties by lower index.

    Of its logits (classes,), divided by `before` as `tempered` does, and then at that temperature. Gives their indices,
    and their probabilities as `softmax` has them.
    """

    def __call__(
        self, logits: Logits, temperature: float, k: int, before: float = 1.0
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """See above."""
        ...


def softmax(logits: Logits, temperature: float = 1.0) -> Probabilities:
    """Temperature-scaled probabilities (n, classes) of logits (n, classes).

    Computed in double precision and rounded, so that of the same logits hardly a bit tells whose instructions computed
    them: a certificate may be made on one processor and used on another.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    scaled -= np.maximum.reduce(scaled, axis=1, keepdims=True)
    np.exp(scaled, out=scaled)
    scaled /= np.add.reduce(scaled, axis=1, keepdims=True)
    return scaled.astype(np.float32)


def tempered(logits: Logits, temperature: float) -> Logits:
    """Logits that give at temperature 1 what these do at that one; from there they may be taken to another."""
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
    """The k most probable classes of one image and their probabilities; a `Ranking`."""
    probabilities = softmax(tempered(logits, before)[np.newaxis], temperature)[0]
    order = top_classes(probabilities, k)
    return tuple(order.tolist()), tuple(probabilities[order].tolist())


def average(members: Sequence[Probabilities], temperature: float = 1.0) -> Probabilities:
    """A committee's probabilities: the equal-weight mean of its members', then sharpened or softened by `temperature`.

    Members (and views of the image) are each (n, classes). Averaging probabilities rather than logits keeps one
    over-confident member from outvoting the rest (Lakshminarayanan et al., "Deep Ensembles", NeurIPS 2017, §2.4).
    """
    mean = np.asarray(np.mean(np.asarray(members), axis=0, dtype=np.float64), np.float32)
    return mean if temperature == 1.0 else softmax(log_probabilities(mean), temperature)


def unsure(first: Probabilities, accept_confidence: float) -> NDArray[np.bool_]:
    """Of which images (n,) the first member of a conditional ensemble is not sure enough to answer alone."""
    found: NDArray[np.bool_] = first.max(axis=1) < np.float32(accept_confidence)
    return found


def decided(total: Probabilities, missing: int, rounding: float = ROUNDING) -> bool:
    """Whether the first class of a sum (1, classes) of probabilities stays the first, whatever is added to it.

    Args:
        total: of the views, or members, that were seen; each adds 1 over all classes.
        missing: how many will be added; each can take at most 1 from the lead.
        rounding: by how much all of them may miss that. Who stops for it must allow for more than who checks.
    """
    second, first = np.partition(total[0], -2)[-2:]
    return missing == 0 or float(first - second) > missing + rounding


def log_probabilities(probabilities: Probabilities) -> Logits:
    """Logits that give these probabilities back at temperature 1; zero counts as float32's smallest normal number.

    Rounded from double precision, as in `softmax`.
    """
    logits = np.log(np.maximum(probabilities, np.finfo(np.float32).tiny), dtype=np.float64)
    return logits.astype(np.float32)
