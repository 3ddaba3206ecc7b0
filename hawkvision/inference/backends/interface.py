"""The interface of backends, which run variants: ONNX Runtime, our own kernels, FPGAs.

`tests/hawkvision/inference/backend_conformance.py` states the contract as tests, which every backend must pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError
from hawkvision.core.types import LOGITS, Pixels, Tensors

OnnxPrecision: TypeAlias = Literal["model", "fp16"]
"""The precision of a model's layers in ONNX Runtime: as in its file, or float16 (`half_precision`)."""

Outputs: TypeAlias = Mapping[str, tuple[int | None, ...]]
"""The shapes of a model's tensors for one image, by name; None where the length of an axis depends on the image."""


@runtime_checkable
class Backend(Protocol):
    """A loaded variant. `infer` may be called from several threads at once."""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(height, width, 3) of one image."""
        ...

    @property
    def outputs(self) -> Outputs:
        """The tensors that `infer` returns; a model's only one is called `LOGITS`."""
        ...

    def infer(self, batch: Pixels) -> Tensors:
        """The tensors (n, ...) of n ≥ 1 images (n, height, width, 3), in order.

        Raises:
            BackendError: if the batch has another shape or dtype, or the backend is closed.
        """
        ...

    def close(self) -> None:
        """Free memory and threads. A second call does nothing."""
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


def named(outputs: Sequence[tuple[str, tuple[int | None, ...]]]) -> dict[str, tuple[int | None, ...]]:
    """The outputs of a model, from the names and shapes in its file; the only one is called `LOGITS`."""
    return {LOGITS: outputs[0][1]} if len(outputs) == 1 else dict(outputs)


def as_tensors(outputs: Outputs, found: Sequence[NDArray[Any]], n: int, where: str) -> Tensors:
    """What a runtime returned for n images, as float32.

    Raises:
        BackendError: if a tensor does not have the shape of `outputs`.
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    for (name, shape), tensor in zip(outputs.items(), found, strict=True):
        fits = tensor.ndim == 1 + len(shape) and len(tensor) == n
        if not fits or any(size not in (None, real) for size, real in zip(shape, tensor.shape[1:], strict=True)):
            expected = (n, *("any" if size is None else size for size in shape))
            raise BackendError(f"{where}: the graph gave {name!r} of shape {tensor.shape}; expected {expected}")
        tensors[name] = tensor.astype(np.float32, copy=False)
    return tensors


def joined(parts: Sequence[Tensors]) -> Tensors:
    """The tensors of several batches, in order. Where lengths of an axis differ, the shorter ones end in zeros."""
    if len(parts) == 1:
        return parts[0]
    return {name: _concatenated([part[name] for part in parts]) for name in parts[0]}


def _concatenated(arrays: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    lengths = np.max([array.shape[1:] for array in arrays], axis=0).astype(int)
    if all(array.shape[1:] == tuple(lengths) for array in arrays):
        return np.concatenate(arrays)
    result = np.zeros((sum(map(len, arrays)), *lengths), np.float32)
    start = 0
    for array in arrays:
        result[(slice(start, start + len(array)), *map(slice, array.shape[1:]))] = array
        start += len(array)
    return result


def check_open(name: str, closed: bool) -> None:
    """Refuse to run once `close` was called.

    Raises:
        BackendError: if `closed`.
    """
    if closed:
        raise BackendError(f"the {name} backend is closed")
