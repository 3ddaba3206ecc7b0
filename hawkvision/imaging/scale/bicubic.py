"""Bicubic scaling by our own kernel on processors with AVX-512 VBMI, with exactly OpenCV's pixels.

    image (height, width, 3) ──► four rows, scaled horizontally, in float32 ──► one row of the result

OpenCV uses Intel's IPP, which weights four values of a row, then four of these sums, in float32. The kernel adds in the
same order. At the edges, where some of the four values are outside the image, IPP adds in an order that is not known.
Where the last bit may matter there, OpenCV scales the image. The weights are read from OpenCV: an image that is black
except for single white columns yields them.

`prepare` compares the kernel with OpenCV on this machine before it is used.
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
"""The processor feature that this kernel needs beyond those of the library, as Linux names it."""
TAPS: Final = 4
VALUES: Final = 16
"""Values of a row that are computed together."""
BYTES: Final = 64
"""Bytes of a row that `VALUES` are computed from."""
LEAST_SIDE: Final = 8
"""Shortest side in pixels; below four, OpenCV computes other values."""
MOST_WIDTH: Final = 1024
"""Widest result in pixels, which bounds the kernel's memory."""
MOST_SHRINKING: Final = 2.0
"""From this factor on OpenCV scales, because 16 values would need more than `BYTES` of a row."""
REMEMBERED: Final = 256
"""Plans kept, one per pair of sizes, 20 kB each."""
TRIED: Final = ((227, 224), (256, 224), (331, 240), (440, 224), (96, 224), (24, 64))
"""Pairs of sides, before and after, for the comparison with OpenCV."""
MOST_DRAWN: Final = 8
"""Most images drawn for each pair, because OpenCV scales some of them."""
_PERIOD: Final = 8
"""Distance of white columns; more than the four columns that are weighted together."""

_Floats = NDArray[np.float32]


class _Scaling(ctypes.Structure):
    """`Scaling` in `bicubic.h`."""

    _fields_ = [
        ("rows_in", ctypes.c_int32),
        ("rows_out", ctypes.c_int32),
        ("values_out", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("base", "there", "pick", "across", "edge", "first", "down")),
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The kernel's argument for images of one size, and the arrays that it points to."""

    struct: _Scaling
    kept: tuple[NDArray[Any], ...]


_kernel: Any = None
"""`bicubic_scale`, after `prepare` found that it agrees with OpenCV."""


def prepare() -> bool:
    """Make `scaled` use the kernel, if this machine can run it and it agrees with OpenCV. Returns whether it does."""
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
    """Scale an image (h, w, 3) to (height, width, 3), exactly as `cv2.resize` with `INTER_CUBIC`.

    Rows may have a stride larger than their length, as in a part of an image.
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
    """Whether the kernel supports these sizes and strides."""
    rows, columns, channels = pixels.shape
    return (
        min(rows, columns) >= LEAST_SIDE
        and rows * width == columns * height  # scaled alike in both directions, because only that order is known
        and rows < MOST_SHRINKING * height
        and width <= MOST_WIDTH
        and channels == 3
        and pixels.strides[1:] == (3, 1)
    )


def _scaled(kernel: Any, pixels: Pixels, width: int, height: int) -> Pixels | None:
    """The kernel's result; None if values at the edges might be rounded differently by OpenCV."""
    made = np.empty((height, width, 3), np.uint8)
    plan = _plan(pixels.shape[0], pixels.shape[1], height, width)
    unsure = kernel(ctypes.addressof(plan.struct), pixels.ctypes.data, pixels.strides[0], made.ctypes.data)
    return None if unsure else made


def _agrees(kernel: Any, before: int, after: int) -> bool:
    """Whether the kernel and OpenCV agree on an image of noise that the kernel scales."""
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
    # The byte in a row for each tap of each value, (values, taps); beyond the edge the edge's pixel is repeated.
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
    """For each resulting pixel of a row, the first of its four source pixels (after,), and OpenCV's weights (after, 4).

    The row is scaled three times over, one copy behind another, because at the edges OpenCV sums some of the weights.
    """
    asked = np.zeros((_PERIOD, 3 * before), np.float32)
    columns = np.arange(3 * before)
    asked[columns % _PERIOD, columns] = 1.0
    reported = cv2.resize(asked, (3 * after, _PERIOD), interpolation=cv2.INTER_CUBIC)
    pixel = np.arange(after)
    # The middle of pixel p is at (p + 1/2) * before / after - 1/2; the second of the four is at or before it.
    first = ((2 * pixel + 1) * before - after) // (2 * after) - 1
    taps = first[:, None] + np.arange(TAPS)
    return first, reported[(taps + before) % _PERIOD, after + pixel[:, None]]
