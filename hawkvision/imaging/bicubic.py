"""Bicubic scaling by a kernel of our own, where the processor has AVX-512 VBMI: OpenCV's pixels, sooner.

OpenCV leaves it to Intel's library, which weighs four values of a row, then four of these sums, in float32. In which
order it adds was found by trying the orders there are on pixels that come out next to a half: 24,500 of these are as
the kernel has them. At the edges, where some of the four are beyond the image, it adds in another order, of which we
do not know the last bit: where that may decide, for one image in thirteen, OpenCV scales it. The weights themselves
OpenCV is asked for: an image that is black but for single white columns comes out as them. None of 1.7 * 10^9 values
of 3,000 images of noise differs (`python -m tests.bench.bicubic --images 3000`).

    image (height, width, 3) ──► four rows, scaled across, in float32 ──► one row of the outcome

Before it is used, `prepare` looks whether it does as OpenCV does on this machine. An image of 227 pixels a side is
scaled to 224 in 51 us instead of 88 in the mean (one core of an EPYC).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels
from hawkvision.native import library

log = logging.getLogger("hawkvision.imaging")

NEEDS: Final = "avx512vbmi"
"""Of the processor, beyond what the library needs, as Linux calls it."""
TAPS: Final = 4
VALUES: Final = 16
"""Of a row, that are computed together."""
BYTES: Final = 64
"""Of a row, that they are made of."""
LEAST_SIDE: Final = 8
"""Pixels of an image's sides. Of less than four, OpenCV has other values."""
MOST_WIDTH: Final = 1024
"""Pixels of the outcome's rows, which bounds the kernel's memory."""
MOST_SHRINKING: Final = 2.0
"""From there on OpenCV scales: by two, values at the edges are halves too often, and further, 16 values would be made
of more than `BYTES` (and `image.preprocess` averages areas)."""
REMEMBERED: Final = 256
"""Pairs of sizes, of 20 kB each. An image that is scaled bicubically has at most twice the input's side, so that few
inputs see more."""
TRIED: Final = ((227, 224), (256, 224), (331, 240), (440, 224), (96, 224), (24, 64))
"""Sides, before and after, with which it is compared with OpenCV."""
MOST_DRAWN: Final = 8
"""Images of each, for some are left to OpenCV."""
_PERIOD: Final = 8
"""Columns from one white one to the next: more than four are weighed by nobody."""

_Floats = NDArray[np.float32]


class _Scaling(ctypes.Structure):
    """As `Scaling` in `bicubic.h`."""

    _fields_ = [
        ("rows_in", ctypes.c_int32),
        ("rows_out", ctypes.c_int32),
        ("values_out", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("base", "there", "pick", "across", "edge", "first", "down")),
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the kernel takes for images of one size, and all that this points to."""

    struct: _Scaling
    kept: tuple[NDArray[Any], ...]


_kernel: Any = None
"""`bicubic_scale`, once `prepare` has found it to do as OpenCV does."""


def prepare() -> bool:
    """Have `scaled` use the kernel from now on, if this machine can run it and it does as OpenCV does."""
    global _kernel
    if _kernel is None and NEEDS in library.cpuinfo("flags").split():
        try:
            kernel = library.library().bicubic_scale
        except BackendError as error:
            log.info("bicubic: OpenCV scales: %s", error.message)
            return False
        kernel.restype = ctypes.c_int32
        kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        if all(_agrees(kernel, before, after) for before, after in TRIED):
            _kernel = kernel
        else:
            log.info("bicubic: OpenCV scales, for it has other pixels than the kernel (is it built with Intel's IPP?)")
    return _kernel is not None


def scaled(pixels: Pixels, width: int, height: int) -> Pixels:
    """An image (h, w, 3) as one of (height, width, 3), by `cv2.resize` with `INTER_CUBIC` or what gives the same.

    Its rows may lie further apart than they are long, as those of a part of an image do.
    """
    if _kernel is not None and _can(pixels, width, height):
        made = _scaled(_kernel, pixels, width, height)
        if made is not None:
            return made
    return _by_opencv(pixels, width, height)


def _by_opencv(pixels: Pixels, width: int, height: int) -> Pixels:
    made: Pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_CUBIC)
    return made


def _can(pixels: Pixels, width: int, height: int) -> bool:
    """Whether the kernel takes these sizes, and pixels that lie like this."""
    rows, columns, channels = pixels.shape
    return (
        min(rows, columns) >= LEAST_SIDE
        and rows * width == columns * height  # scaled alike in both directions: the only order that is known
        and rows < MOST_SHRINKING * height
        and width <= MOST_WIDTH
        and channels == 3
        and pixels.strides[1:] == (3, 1)
    )


def _scaled(kernel: Any, pixels: Pixels, width: int, height: int) -> Pixels | None:
    """What the kernel makes of it; None where values at the edges might be rounded the other way."""
    made = np.empty((height, width, 3), np.uint8)
    plan = _plan(pixels.shape[0], pixels.shape[1], height, width)
    unsure = kernel(ctypes.addressof(plan.struct), pixels.ctypes.data, pixels.strides[0], made.ctypes.data)
    return None if unsure else made


def _agrees(kernel: Any, before: int, after: int) -> bool:
    """Whether an image of noise, that many pixels a side, comes out as OpenCV has it; one that is not left to it."""
    draw = np.random.default_rng(before)
    for _ in range(MOST_DRAWN):
        image = draw.integers(0, 256, (before, before, 3), dtype=np.uint8)
        ours = _scaled(kernel, image, after, after)
        if ours is not None:
            return np.array_equal(ours, _by_opencv(image, after, after))
    return False


@functools.lru_cache(maxsize=REMEMBERED)
def _plan(rows: int, columns: int, height: int, width: int) -> _Plan:
    down_from, down = _weights(rows, height)
    column, weights = _weights(columns, width)
    values = np.arange(-(-3 * width // VALUES) * VALUES).clip(max=3 * width - 1)
    # The byte in a row that each tap of each value is, (values, taps): what is beyond the edge is as the edge.
    taps = column[values // 3, None] + np.arange(TAPS)
    edge = (taps.min(axis=1) < 0) | (taps.max(axis=1) >= columns)
    at = taps.clip(0, columns - 1) * 3 + values[:, None] % 3
    grouped = at.reshape(-1, VALUES, TAPS)
    base = grouped.min(axis=(1, 2))
    there = np.array([(1 << min(BYTES, 3 * columns - int(first))) - 1 for first in base], np.uint64)
    pick = (grouped - base[:, None, None]).transpose(0, 2, 1)
    assert pick.max() < BYTES, "sixteen values are made of more than is loaded at once"
    across = weights[values // 3].reshape(-1, VALUES, TAPS).transpose(0, 2, 1)
    kept = tuple(
        np.ascontiguousarray(array, kind)
        for array, kind in (
            (base, np.int32),
            (there, np.uint64),
            (pick, np.uint8),
            (across, np.float32),
            (edge.reshape(-1, VALUES) @ (1 << np.arange(VALUES)), np.uint16),
            (down_from, np.int32),
            (down, np.float32),
        )
    )
    return _Plan(_Scaling(rows, height, 3 * width, *(array.ctypes.data for array in kept)), kept)


def _weights(before: int, after: int) -> tuple[NDArray[np.int64], _Floats]:
    """Of each pixel that comes out of a row, the first of the four that it is made of (after,), and OpenCV's weights
    (after, 4).

    The row is asked about three times over, one behind another, for at the edges OpenCV adds some of the weights up.
    """
    asked = np.zeros((_PERIOD, 3 * before), np.float32)
    columns = np.arange(3 * before)
    asked[columns % _PERIOD, columns] = 1.0
    told = cv2.resize(asked, (3 * after, _PERIOD), interpolation=cv2.INTER_CUBIC)
    pixel = np.arange(after)
    # The middle of pixel p lies at (p + 1/2) * before / after - 1/2; the second of the four is at or before it.
    first = ((2 * pixel + 1) * before - after) // (2 * after) - 1
    taps = first[:, None] + np.arange(TAPS)
    return first, told[(taps + before) % _PERIOD, after + pixel[:, None]]
