"""The small convolutional networks that the project trains itself, described once for trainer, builder and compiler.

A network is a chain of 3x3 convolutions with batch normalisation and ReLU, some followed by 2x2 max pooling, some added
to their input, then one linear layer. Every part maps to an integer pipeline on a small FPGA, and ReLU
before pooling keeps the order in which hardware applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import onnx

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.onnx_builders import Emitter, GraphBuilder, Weights, first_kernel, rgb_mean
from hawkvision.models.manifest import InputSpec

EPSILON: Final = 1e-5
"""Added to the variance in batch normalisation."""

LUMINANCE: Final = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue in a grey value (ITU-R BT.601), which is what JPEG and OpenCV use."""


@dataclass(frozen=True, slots=True)
class ConvLayer:
    """One 3x3 convolution with padding 1, batch normalisation and ReLU, with what precedes and follows it."""

    channels: int
    pool: bool = False
    """Halve height and width afterwards: the maximum of each 2x2, an odd last row or column left out."""
    residual: bool = False
    """Add the layer's input to its output (He et al., arXiv 1512.03385, with one convolution a branch)."""


@dataclass(frozen=True, slots=True)
class ConvNet:
    """A whole network. `grey` ones read luminance only; `head` connects the last map to the classes."""

    layers: tuple[ConvLayer, ...]
    grey: bool = False
    head: Literal["flatten", "average"] = "average"

    @property
    def input_channels(self) -> int:
        """Planes that the first convolution reads."""
        return 1 if self.grey else 3

    def features(self, height: int, width: int) -> int:
        """Inputs of the linear layer for images of that size."""
        if self.head == "average":
            return self.layers[-1].channels
        halvings = sum(layer.pool for layer in self.layers)
        return self.layers[-1].channels * (height >> halvings) * (width >> halvings)

    def multiplications(self, height: int, width: int, classes: int) -> int:
        """Multiply-accumulates per image."""
        total, channels = self.features(height, width) * classes, self.input_channels
        for layer in self.layers:
            total += height * width * 9 * channels * layer.channels
            channels = layer.channels
            if layer.pool:
                height, width = height // 2, width // 2
        return total


def _layers(*channels: int, pool: tuple[int, ...], residual: tuple[int, ...] = ()) -> tuple[ConvLayer, ...]:
    return tuple(ConvLayer(c, i in pool, i in residual) for i, c in enumerate(channels))


CONVNETS: Final[Mapping[str, ConvNet]] = {
    # Three layers and a linear one, the shape of the prototype that was placed on an ECP5: 19,000 and 15,000 weights.
    "convnet_tiny": ConvNet(_layers(16, 32, 32, pool=(0, 1, 2)), head="flatten"),
    "convnet_tiny_grey": ConvNet(_layers(16, 32, 32, pool=(0, 1, 2)), grey=True, head="flatten"),
    "convnet_small": ConvNet(_layers(32, 64, 64, 96, 96, pool=(0, 2, 4))),
    "convnet_small_grey": ConvNet(_layers(16, 32, 32, 64, 64, pool=(0, 2, 4)), grey=True),
    "convnet_large": ConvNet(_layers(32, 64, 64, 128, 128, 256, 256, pool=(1, 3, 5), residual=(2, 4, 6))),
    "convnet_large_grey": ConvNet(_layers(32, 64, 64, 128, 128, 128, pool=(1, 3), residual=(2, 4, 5)), grey=True),
}


def convnet_emitter(name: str) -> Emitter:
    """A function that writes the float32 graph of `CONVNETS[name]`, batch normalisation folded, from a trained weight
    file.

    The number of classes is that of the linear layer; inputs are RGB.
    """
    net = CONVNETS[name]

    def emit(weights: Weights, spec: InputSpec) -> onnx.ModelProto:
        weights.expect(_shapes(net, spec))
        builder = GraphBuilder(name)
        x = builder.pixels(rgb_mean(spec))
        for index, layer in enumerate(net.layers):
            at = f"layers.{index}"
            kernel, bias = weights.convolution(f"{at}.conv", f"{at}.norm", EPSILON)
            if index == 0:
                # Grey is a weighting of the planes, so it is one of the kernel; graphs always read RGB.
                kernel = first_kernel(kernel * LUMINANCE.reshape(1, 3, 1, 1) if net.grey else kernel, spec)
            made = builder.relu(builder.conv(x, f"layer{index}", kernel, bias, pads=(1, 1, 1, 1)))
            x = builder.node("Add", [made, x], f"layer{index}.add") if layer.residual else made
            if layer.pool:
                x = builder.node("MaxPool", [x], f"layer{index}.pool", kernel_shape=[2, 2], strides=[2, 2])
        bias = weights.take("head.bias", 1)
        weights.expect({"head.weight": (len(bias), net.features(spec.height, spec.width))})
        kernel = weights.take("head.weight", 2)
        if net.head == "average":
            builder.classifier(x, kernel, bias)
        else:
            builder.linear(builder.node("Flatten", [x], "features", axis=1), kernel, bias)
        weights.finish()
        return builder.model(spec.height, spec.width, len(bias))

    return emit


def _shapes(net: ConvNet, spec: InputSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights but the linear layer's.

    Raises:
        ArtifactError: if `spec` orders its channels in another way than these networks were trained.
    """
    if spec.channel_order != "rgb":
        raise ArtifactError(f"networks trained here take RGB in, but the input says {spec.channel_order!r}")
    shapes: dict[str, tuple[int, ...]] = {}
    channels = net.input_channels
    for index, layer in enumerate(net.layers):
        shapes[f"layers.{index}.conv.weight"] = (layer.channels, channels, 3, 3)
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"layers.{index}.norm.{part}"] = (layer.channels,)
        channels = layer.channels
    return shapes
