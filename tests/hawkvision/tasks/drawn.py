"""Drawing what models of different kinds may give, and what may be true.

Each is made of one draw of bytes, which is fast and shrinks well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawkvision.tasks.kind import Tensors

MOST = 6
"""Boxes of an image."""


def numbers(*shape: int) -> st.SearchStrategy[NDArray[np.uint8]]:
    """0..255."""
    size = int(np.prod(shape))
    return st.binary(min_size=size, max_size=size).map(lambda drawn: np.frombuffer(drawn, np.uint8).reshape(shape))


def corners(drawn: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Boxes (..., 4) within 0..1 of numbers (..., 4), on a coarse grid so that they touch and coincide."""
    sides = (drawn % 32).astype(np.float64)
    return np.concatenate([sides[..., :2], sides[..., :2] + 1 + sides[..., 2:]], -1) / 64


def true_boxes(labels: int) -> st.SearchStrategy[tuple[Any, Any]]:
    """The label of an image of objects."""
    drawn = st.integers(0, MOST).flatmap(lambda m: numbers(m, 5))
    return drawn.map(lambda rows: (corners(rows[:, :4]), rows[:, 4].astype(np.intp) % labels))


def box_tensors(n: int, labels: int) -> st.SearchStrategy[Tensors]:
    """What decoders of boxes give: best first, padded with score 0."""

    def of(rows: NDArray[np.uint8]) -> Tensors:
        return {
            "boxes": corners(rows[..., :4]).astype(np.float32),
            "scores": -np.sort(-(rows[..., 4] / 255.0), axis=1).astype(np.float32),
            "classes": (rows[..., 5] % labels).astype(np.float32),
        }

    return st.integers(0, MOST).flatmap(lambda k: numbers(n, k, 6)).map(of)


def logits(n: int, labels: int) -> st.SearchStrategy[Tensors]:
    """What a classifier gives, ties among them."""
    return numbers(n, labels).map(lambda drawn: {"logits": ((drawn - 128.0) / 8).astype(np.float32)})
