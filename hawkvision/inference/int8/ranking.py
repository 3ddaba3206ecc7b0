"""The most probable classes of one image, found by the kernels' library.

One call replaces some thirty of NumPy's, whose code a processor has often evicted from its caches by the next image.
"""

from __future__ import annotations

import ctypes

import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Logits
from hawkvision.native import library


def most_probable(
    logits: Logits, temperature: float, k: int, before: float = 1.0
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """As `tasks.class_scores.most_probable`, except for numbers next to the middle of two float32 values.

    Raises:
        BackendError: if there is no library, or no memory.
    """
    row = np.ascontiguousarray(logits, np.float32)
    k = min(k, row.size)
    numbers, probabilities = (ctypes.c_int32 * k)(), (ctypes.c_float * k)()
    if not library.library().most_probable(
        row.ctypes.data, row.size, before, temperature, k, numbers, probabilities
    ):  # fmt: skip
        raise BackendError("int8: no memory to rank classes")
    return tuple(numbers), tuple(probabilities)
