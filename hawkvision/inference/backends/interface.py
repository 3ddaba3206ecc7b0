"""The interface of backends, which run variants: ONNX Runtime, NumPy, our own kernels, FPGAs.

`hawkvision.testing.BackendConformance` states the contract as tests, which every backend must pass.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Logits, Pixels

OnnxPrecision: TypeAlias = Literal["model", "fp16"]
"""Of a model's layers in ONNX Runtime: as in its file, or float16 (`half_precision`)."""


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
        """Free memory and threads. A second call does nothing."""
        ...


@runtime_checkable
class Prefetching(Backend, Protocol):
    """A backend that can prepare while an image is being decoded."""

    def expect(self) -> None:
        """Announce that an image is likely to follow within a millisecond. Never raises; none need follow."""
        ...


def check_batch(batch: Pixels, input_shape: tuple[int, int, int]) -> None:
    """Check a batch against the contract of `Backend.infer`.

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
