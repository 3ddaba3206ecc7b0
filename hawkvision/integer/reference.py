"""The semantics of an integer graph in NumPy. The RTL, the compiled kernel and every device give the same integers."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.types import Pixels
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.nodes import KEPT_BITS, Conv, Requantise

Maps = NDArray[np.int64]
"""(n, height, width, channels)."""
Mask = NDArray[np.bool_]
"""(n, height, width): true where a pixel arrived."""
LUMINANCE: Final = (77, 150, 29)
"""Weights of red, green and blue in a grey value, in 256ths (ITU-R BT.601); grey images keep their values."""


def logits(graph: IntegerGraph, pixels: Pixels) -> NDArray[np.int32]:
    """Integer logits (n, classes) of images (n, height, width, channels)."""
    maps = pixels.astype(np.int64)
    for stage in graph.stages:
        maps = convolve(stage.conv, maps)
        if stage.requantise is not None:
            maps = requantise(stage.requantise, maps)
        if stage.pool is not None:
            maps = pool(maps)
    return maps.reshape(len(maps), -1).astype(np.int32)


def convolve(conv: Conv, maps: Maps) -> Maps:
    """Accumulators (n, height', width', output channels)."""
    pad, kernel = conv.pad, conv.kernel
    padded = np.pad(maps, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    height, width = padded.shape[1] - kernel + 1, padded.shape[2] - kernel + 1
    total = np.broadcast_to(conv.bias.astype(np.int64), (len(maps), height, width, conv.channels)).copy()
    # float64 holds these sums exactly (below 2^32), and its matrix product is much faster than int64's.
    for y in range(kernel):
        for x in range(kernel):
            window = padded[:, y : y + height, x : x + width].astype(np.float64)
            total += (window @ conv.weights[:, y, x].T.astype(np.float64)).astype(np.int64)
    return total


def requantise(node: Requantise, accumulators: Maps) -> Maps:
    """Activations of the same shape."""
    kept = np.clip(accumulators >> node.pre_shift, 0, (1 << KEPT_BITS) - 1)
    scaled: Maps = (kept * node.multiplier + (1 << (node.shift - 1))) >> node.shift
    return np.minimum(scaled, (1 << node.bits) - 1)


def pool(maps: Maps) -> Maps:
    """The maximum of each 2x2: (n, height // 2, width // 2, channels)."""
    n, height, width, channels = maps.shape
    even = maps[:, : height // 2 * 2, : width // 2 * 2]
    pooled: Maps = even.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
    return pooled


def filled(graph: IntegerGraph, pixels: Pixels, mask: Mask) -> Pixels:
    """Images (n, height, width, channels) with missing pixels filled as the input stage fills them.

    A missing pixel repeats the pixel above, which may itself be filled; in the first row it is the graph's `fill`.
    """
    out = pixels.copy()
    above = np.broadcast_to(np.array(graph.fill, np.uint8), out[:, 0].shape)
    for row in range(out.shape[1]):
        out[:, row] = np.where(mask[:, row, :, None], out[:, row], above)
        above = out[:, row]
    return out


def planes(graph: IntegerGraph, images: Pixels) -> Pixels:
    """The planes of the input stream, (n, height, width, 1 or 3), from RGB images (n, height, width, 3)."""
    return images if graph.input.channels == 3 else luminance(images)


def luminance(images: Pixels) -> Pixels:
    """Grey images (n, height, width, 1) from RGB images (n, height, width, 3), in integers."""
    red, green, blue = (images[..., i].astype(np.uint32) * weight for i, weight in enumerate(LUMINANCE))
    return ((red + green + blue + 128) >> 8).astype(np.uint8)[..., None]
