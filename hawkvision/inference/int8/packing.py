"""Weights in the order in which the kernel reads them (`layers.h`)."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.inference.int8.program import ALIGNMENT, VECTOR

GROUP: Final = 64
"""Channels of a depthwise window that are computed together; biases and scales are padded to a multiple of it."""


def together(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Copies in one block of memory, each aligned to the size of a vector."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] - -array.nbytes // ALIGNMENT * ALIGNMENT)
    # Pages of its own, which begin at such a multiple.
    memory = np.frombuffer(mmap.mmap(-1, max(1, starts[-1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    held = [
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]
    for copy, array in zip(held, arrays, strict=True):
        copy[...] = array
    return held


def padded(values: NDArray[Any]) -> NDArray[Any]:
    """(channels,), padded with zeros to whole groups."""
    return np.pad(values, (0, -len(values) % GROUP))


def product_weights(weights: NDArray[np.int8], vectors: int) -> NDArray[np.int8]:
    """(made, taken) in groups of `vectors` vectors: for each four bytes taken, 16 channels x 4 bytes of each vector."""
    made, taken = weights.shape
    whole = np.pad(weights, ((0, -made % VECTOR), (0, 0))).reshape(-1, VECTOR, taken // 4, 4)
    groups = [whole[first : first + vectors].transpose(2, 0, 1, 3).ravel() for first in range(0, len(whole), vectors)]
    return np.concatenate(groups)


def in_lanes(values: NDArray[Any]) -> NDArray[Any]:
    """(channels,) in the order of interleaved bytes: of each 64, every fourth group of four."""
    return np.ascontiguousarray(values.reshape(-1, 4, 4, 4).transpose(0, 2, 1, 3)).ravel()


def depthwise_weights(weights: NDArray[np.int8], stride: int) -> NDArray[np.int8]:
    """(channels, size, size) in groups of 64 channels, for two rows of outputs.

    The rows of inputs of both outputs come in groups of four, which are the four bytes of a channel. A row that one of
    the outputs does not read has the weight zero there.
    """
    channels, size, _ = weights.shape
    groups = -(-(size + stride) // 4)
    rows = np.zeros((2, groups * 4, size, channels + -channels % GROUP), np.int8)
    for made in range(2):
        rows[made, made * stride : made * stride + size, :, :channels] = weights.transpose(1, 2, 0)
    # made, group of rows, row, column, 64 channels, lane of 128 bits, vector, channel of four
    lanes = rows.reshape(2, groups, 4, size, -1, 4, 4, 4)
    return np.ascontiguousarray(lanes.transpose(4, 0, 1, 3, 6, 5, 7, 2)).ravel()
