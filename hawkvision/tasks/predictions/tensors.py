"""Tensors of predictions in the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple


class TensorSpec(NamedTuple):
    """A tensor as it is announced."""

    datatype: Literal["BYTES", "INT64", "FP32"]
    shape: tuple[int, ...]
    """Of n predictions; -1 for n and for other lengths that vary."""
    ranked: bool = False
    """Whether it can list the best k classes in its place (Triton's classification extension)."""


class WireTensor(NamedTuple):
    """A tensor of predictions: its shape, and its elements in C order."""

    shape: tuple[int, ...]
    values: Sequence[str] | Sequence[int] | Sequence[float]


NO_TENSORS: Final[Mapping[str, TensorSpec]] = MappingProxyType({})
