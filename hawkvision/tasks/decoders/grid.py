"""The points of a detector's grids."""

from __future__ import annotations

import functools
from typing import Annotated, TypeAlias

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.models.input_spec import InputSpec

Strides: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=1, le=256)], ...], Meta(min_length=1, max_length=8)]


@functools.lru_cache(maxsize=64)
def grid_points(spec: InputSpec, strides: tuple[int, ...], offset: float) -> NDArray[np.float64]:
    """The points (k, 3) of all grids, row by row: x and y in pixels of the input, and the stride.

    Args:
        spec: the input; a grid has ceil(side / stride) cells.
        strides: pixels per cell, of each grid in turn.
        offset: of a point in its cell: 0 its corner, 0.5 its middle.
    """
    grids = []
    for stride in strides:
        rows, columns = -(-spec.height // stride), -(-spec.width // stride)
        y, x = np.mgrid[0:rows, 0:columns].reshape(2, -1) + offset
        grids.append(np.stack([x * stride, y * stride, np.full(rows * columns, float(stride))], axis=1))
    points = np.concatenate(grids)
    points.setflags(write=False)
    return points
