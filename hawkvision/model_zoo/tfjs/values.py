"""What the converter knows of a tensor: its shape, how ONNX holds it, and convolutions that are not written yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from hawkvision.models.onnx_layers import F32, GraphBuilder, Pads

BATCH = -1
"""The number of images in a shape, which is not known."""
Shape: TypeAlias = tuple[int, ...]
"""In TensorFlow's order: (n, height, width, channels) for images."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the ONNX graph."""

    name: str
    shape: Shape
    planar: bool
    """ONNX holds it as (n, channels, height, width)."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution that can still take in what follows it, as long as that is linear in each channel."""

    name: str
    """Of the last operation taken in; it names the ONNX tensor."""
    source: str
    kernel: F32
    """(out, in / groups, height, width)."""
    bias: F32
    stride: int
    pads: Pads
    groups: int
    shape: Shape
    added: str | None = None
    """A tensor that is added to the result."""

    def scaled(self, name: str, factor: F32) -> Convolution:
        """Followed by a multiplication of each channel."""
        kernel = self.kernel * np.broadcast_to(factor, self.bias.shape)[:, None, None, None]
        return replace(self, name=name, kernel=kernel, bias=self.bias * factor)

    def shifted(self, name: str, offset: F32) -> Convolution:
        """Followed by an addition to each channel."""
        return replace(self, name=name, bias=(self.bias + offset).astype(np.float32))

    def write(self, builder: GraphBuilder) -> Tensor:
        """Write it to the graph."""
        name = self.name if self.added is None else f"{self.name}.conv"
        builder.conv(self.source, name, self.kernel, self.bias, self.stride, self.pads, self.groups)
        if self.added is not None:
            builder.node("Add", [name, self.added], self.name)
        return Tensor(self.name, self.shape, planar=True)
