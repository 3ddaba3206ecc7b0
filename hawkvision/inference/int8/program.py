"""The structures of `program.h`, which describe a network to the kernel."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from hawkvision.inference.int8.graph import Kind

KINDS: Final[tuple[Kind, ...]] = ("pad", "convolution", "depthwise", "add", "mean", "dense")
"""In the order of `Kind`."""
VECTOR: Final = 16
"""Channels in one vector of sums."""
MOST_VECTORS: Final = 4
"""Vectors of sums at one position that are computed together."""
MOST_STAGE_LAYERS: Final = 8
"""Most layers of a stage."""
ALIGNMENT: Final = 64
"""Bytes of a vector."""


def _integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int32) for name in names]


class CTensor(ctypes.Structure):
    """`Tensor` in `program.h`."""

    _fields_ = [
        *_integers("height", "width", "channels", "top", "left", "bottom", "right", "zero"),
        ("offset", ctypes.c_int64),
    ]


class CLayer(ctypes.Structure):
    """`Layer` in `program.h`."""

    _fields_ = [
        *_integers("kind", "taken", "other", "out", "kernel_height", "kernel_width", "row_stride", "column_stride"),
        *_integers("pad_top", "pad_left", "vectors", "fold", "zero", "tile", "paired"),
        ("ratio", ctypes.c_float),
        ("other_ratio", ctypes.c_float),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    ]


class CStage(ctypes.Structure):
    """`Stage` in `program.h`."""

    _fields_ = _integers("first", "count", "by_channels", "size", "units")


class CProgram(ctypes.Structure):
    """`Program` in `program.h`."""

    _fields_ = [
        *_integers("tensors", "layers", "stages", "classes"),
        ("tensor", ctypes.POINTER(CTensor)),
        ("layer", ctypes.POINTER(CLayer)),
        ("stage", ctypes.POINTER(CStage)),
        ("arena", ctypes.c_int64),
        ("scratch", ctypes.c_int64),
        ("ring", ctypes.c_int64),
    ]
