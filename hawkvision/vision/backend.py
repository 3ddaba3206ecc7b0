"""What runs a variant: the one small interface that ONNX Runtime, NumPy and an FPGA all fit.

`hawkvision.testing.BackendConformance` states this contract as tests; every backend must pass them.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hawkvision.types import Logits, Pixels


@runtime_checkable
class Backend(Protocol):
    """A loaded variant. `infer` may be called from several threads at once."""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(height, width, 3) of one picture."""
        ...

    @property
    def classes(self) -> int:
        """Number of logits per picture."""
        ...

    def infer(self, batch: Pixels) -> Logits:
        """Logits (n, classes) of n ≥ 1 pictures (n, height, width, 3), in order.

        Raises:
            BackendError: if the batch has another shape or dtype, or the backend is closed.
        """
        ...

    def close(self) -> None:
        """Give back memory and threads. Closing twice does no harm."""
        ...
