"""What runs a variant: the one small interface that ONNX Runtime, NumPy and an FPGA all fit.

`hawkvision.testing.BackendConformance` states this contract as tests; every backend must pass them.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Logits, Pixels


@runtime_checkable
class Backend(Protocol):
    """A loaded variant. `infer` may be called from several threads at once."""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(height, width, 3) of one image."""
        ...

    @property
    def classes(self) -> int:
        """Number of logits per image."""
        ...

    def infer(self, batch: Pixels) -> Logits:
        """Logits (n, classes) of n ≥ 1 images (n, height, width, 3), in order.

        Raises:
            BackendError: if the batch has another shape or dtype, or the backend is closed.
        """
        ...

    def close(self) -> None:
        """Give back memory and threads. Closing twice does no harm."""
        ...


@runtime_checkable
class Prefetching(Backend, Protocol):
    """A backend that can make use of the time until an image is ready for it."""

    def expect(self) -> None:
        """An image is likely to follow within a millisecond. Never raises, and does no harm where none follows."""
        ...


def check_batch(batch: Pixels, input_shape: tuple[int, int, int]) -> None:
    """Hold a batch against the contract of `Backend.infer`.

    Raises:
        BackendError: unless it is uint8 of (n, *input_shape) with n ≥ 1.
    """
    if batch.dtype != np.uint8 or batch.ndim != 4 or batch.shape[1:] != input_shape or not len(batch):
        raise BackendError(
            f"the batch is {batch.dtype} of shape {batch.shape}; expected uint8 of (n, "
            f"{', '.join(map(str, input_shape))}) with n >= 1"
        )


def check_open(name: str, closed: bool) -> None:
    """Refuse to run once `close` was called.

    Raises:
        BackendError: if `closed`.
    """
    if closed:
        raise BackendError(f"the {name} backend is closed")
