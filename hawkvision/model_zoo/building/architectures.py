"""All architectures of the zoo, by their names in manifests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import onnx

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.checkpoint import StateDict
from hawkvision.model_zoo.tfjs.convert import centernet, ssdlite_float_from, ssdlite_mobilenet_v2
from hawkvision.model_zoo.tfjs.graph import TfjsGraph
from hawkvision.models.manifest import InputSpec
from hawkvision.models.onnx_layers import F32 as F32
from hawkvision.models.onnx_layers import NO_PADS, Pads
from hawkvision.models.onnx_layers import PRODUCER as PRODUCER
from hawkvision.models.onnx_layers import GraphBuilder as GraphBuilder
from hawkvision.models.onnx_layers import first_kernel as first_kernel
from hawkvision.models.onnx_layers import rgb_mean as rgb_mean
from hawkvision.models.onnx_layers import same_pads as same_pads

# ONNX graphs written directly from weights, without a framework; and the ImageNet architectures.
#
# Every graph takes `image`, uint8 (n, height, width, 3) RGB with any n, and gives `logits`, float32 (n, classes). Batch
# normalisation and the division by the standard deviation are folded into the convolutions. The mean is subtracted by
# a node of its own: folded into the first convolution's bias it would be wrong at the border, where padding is zero
# *after* normalisation. Tensors are named after the layer that makes them, and those names key the activation ranges.
#
# The same weights always give the same bytes, so the manifest can pin an artefact's SHA-256.

Emitter: TypeAlias = Callable[["Weights", InputSpec], onnx.ModelProto]


class Weights:
    """A state dict that is used up name by name, so that a weight neither lacks nor is left over unnoticed."""

    def __init__(self, state: StateDict, where: str) -> None:
        self._state = dict(state)
        self._where = where

    def take(self, name: str, dimensions: int) -> F32:
        """The array of that name as float32.

        Raises:
            ArtifactError: if it is missing or has another number of dimensions.
        """
        array = self._state.pop(name, None)
        if array is None or array.ndim != dimensions:
            found = "no such weight" if array is None else f"shape {array.shape}"
            raise ArtifactError(f"{self._where}: {name}: expected {dimensions} dimensions, found {found}")
        return np.ascontiguousarray(array, dtype=np.float32)

    def convolution(self, conv: str, norm: str, epsilon: float) -> tuple[F32, F32]:
        """Kernel (out, in, h, w) and bias of a convolution with the batch normalisation after it folded in."""
        scale = self.take(f"{norm}.weight", 1) / np.sqrt(self.take(f"{norm}.running_var", 1) + np.float32(epsilon))
        bias = self.take(f"{norm}.bias", 1) - self.take(f"{norm}.running_mean", 1) * scale
        self._state.pop(f"{norm}.num_batches_tracked", None)
        return self.take(f"{conv}.weight", 4) * scale[:, None, None, None], bias

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """State that the named weights are there, of those shapes.

        Raises:
            ArtifactError: naming the first that is not.
        """
        for name, shape in shapes.items():
            array = self._state.get(name)
            if array is None or array.shape != shape:
                found = "no such weight" if array is None else f"shape {array.shape}"
                raise ArtifactError(f"{self._where}: {name}: expected shape {shape}, found {found}")

    def finish(self) -> None:
        """State that all weights have been taken.

        Raises:
            ArtifactError: naming the first few left over.
        """
        if self._state:
            left = ", ".join(sorted(self._state)[:3])
            raise ArtifactError(f"{self._where}: {len(self._state)} weights fit no layer of this architecture: {left}")


class _InvertedResiduals:
    """The body that MobileNetV2 and EfficientNet-Lite share (arXiv 1801.04381, section 3): blocks of a widening 1x1
    convolution, a depthwise one and a narrowing one without activation; added to their input where shapes allow.
    """

    def __init__(self, builder: GraphBuilder, size: tuple[int, int], epsilon: float, *, same: bool) -> None:
        self._builder = builder
        self._size = size
        self._epsilon = epsilon
        self._same = same

    def _pads(self, kernel: int, stride: int) -> Pads:
        pads = same_pads(self._size, kernel, stride) if self._same else (kernel // 2,) * 4
        self._size = (math.ceil(self._size[0] / stride), math.ceil(self._size[1] / stride))
        return pads

    def stem(self, x: str, weights: Weights, conv: str, norm: str, spec: InputSpec) -> str:
        """The 3x3 convolution of stride 2 that reads pixels."""
        kernel, bias = weights.convolution(conv, norm, self._epsilon)
        pads = self._pads(kernel.shape[2], 2)
        return self._builder.relu6(self._builder.conv(x, "stem", first_kernel(kernel, spec), bias, stride=2, pads=pads))

    def block(
        self, x: str, name: str, weights: Weights, layers: list[tuple[str, str]], *, stride: int, add: bool
    ) -> str:
        """One block; `layers` names (convolution, normalisation) of expand (not in the first), depthwise, project."""
        builder, source = self._builder, x
        for conv, norm in layers[:-2]:
            x = builder.relu6(builder.conv(x, f"{name}.expand", *weights.convolution(conv, norm, self._epsilon)))
        kernel, bias = weights.convolution(*layers[-2], self._epsilon)
        pads = self._pads(kernel.shape[2], stride)
        x = builder.relu6(builder.conv(x, f"{name}.depthwise", kernel, bias, stride, pads, groups=kernel.shape[0]))
        x = builder.conv(x, f"{name}.project", *weights.convolution(*layers[-1], self._epsilon))
        return builder.node("Add", [x, source], f"{name}.add") if add else x

    def head(self, x: str, weights: Weights, conv: str, norm: str) -> str:
        """The last 1x1 convolution."""
        kernel, bias = weights.convolution(conv, norm, self._epsilon)
        return self._builder.relu6(self._builder.conv(x, "head", kernel, bias))


def mobilenet_v2(weights: Weights, spec: InputSpec) -> onnx.ModelProto:
    """MobileNetV2 1.0 from torchvision's state dict."""
    stages = ((1, 1), (2, 2), (3, 2), (4, 2), (3, 1), (3, 2), (1, 1))  # (blocks, stride of the first), table 2
    builder = GraphBuilder("mobilenet_v2")
    body = _InvertedResiduals(builder, (spec.height, spec.width), 1e-5, same=False)
    x = body.stem(builder.pixels(rgb_mean(spec)), weights, "features.0.0", "features.0.1", spec)
    index = 0
    for stage, (blocks, first_stride) in enumerate(stages):
        for i in range(blocks):
            index += 1
            at = f"features.{index}.conv"
            wide = 0 if stage == 0 else 1
            layers = [(f"{at}.{k}.0", f"{at}.{k}.1") for k in range(wide + 1)]
            layers.append((f"{at}.{wide + 1}", f"{at}.{wide + 2}"))
            x = body.block(x, f"block{index}", weights, layers, stride=first_stride if i == 0 else 1, add=i > 0)
    x = body.head(x, weights, "features.18.0", "features.18.1")
    builder.classifier(x, weights.take("classifier.1.weight", 2), weights.take("classifier.1.bias", 1))
    weights.finish()
    return builder.model(spec.height, spec.width, 1000)


def efficientnet_lite(depth: float, name: str) -> Emitter:
    """EfficientNet-Lite of that depth coefficient, from the state dict of `efficientnet-lite-pytorch`.

    Source of the numbers: tensorflow/tpu, models/official/efficientnet/lite. First and last stage are never deepened,
    there is no squeeze-and-excitation, and the activation is ReLU6.
    """
    stages = ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1))  # (blocks at depth 1, stride of the first)

    def emit(weights: Weights, spec: InputSpec) -> onnx.ModelProto:
        builder = GraphBuilder(name)
        body = _InvertedResiduals(builder, (spec.height, spec.width), 1e-3, same=True)
        x = body.stem(builder.pixels(rgb_mean(spec)), weights, "_conv_stem", "_bn0", spec)
        index = 0
        for stage, (blocks, first_stride) in enumerate(stages):
            repeats = blocks if stage in (0, len(stages) - 1) else math.ceil(depth * blocks)
            for i in range(repeats):
                at = f"_blocks.{index}"
                layers = [] if stage == 0 else [(f"{at}._expand_conv", f"{at}._bn0")]
                layers += [(f"{at}._depthwise_conv", f"{at}._bn1"), (f"{at}._project_conv", f"{at}._bn2")]
                index += 1
                x = body.block(x, f"block{index}", weights, layers, stride=first_stride if i == 0 else 1, add=i > 0)
        x = body.head(x, weights, "_conv_head", "_bn1")
        builder.classifier(x, weights.take("_fc.weight", 2), weights.take("_fc.bias", 1))
        weights.finish()
        return builder.model(spec.height, spec.width, 1000)

    return emit


def squeezenet1_1(weights: Weights, spec: InputSpec) -> onnx.ModelProto:
    """SqueezeNet 1.1 (arXiv 1602.07360) from the pickle of `ndf`: lists of kernel (h, w, in, out) and bias."""
    builder = GraphBuilder("squeezenet1_1")

    def take(layer: str) -> tuple[F32, F32]:
        return np.ascontiguousarray(weights.take(f"{layer}.0", 4).transpose(3, 2, 0, 1)), weights.take(f"{layer}.1", 1)

    def conv(x: str, layer: str, name: str, pads: Pads = NO_PADS) -> str:
        return builder.node("Relu", [builder.conv(x, name, *take(layer), pads=pads)], f"{name}.relu")

    def pool(x: str, name: str) -> str:
        return builder.node("MaxPool", [x], name, kernel_shape=[3, 3], strides=[2, 2])

    kernel, bias = take("conv1")
    pads = same_pads((spec.height, spec.width), kernel.shape[2], 2)
    x = builder.conv(builder.pixels(rgb_mean(spec)), "stem", first_kernel(kernel, spec), bias, 2, pads)
    x = pool(builder.node("Relu", [x], "stem.relu"), "pool1")
    for index in range(2, 10):
        squeezed = conv(x, f"fire{index}/squeeze1x1", f"fire{index}.squeeze")
        narrow = conv(squeezed, f"fire{index}/expand1x1", f"fire{index}.expand1")
        broad = conv(squeezed, f"fire{index}/expand3x3", f"fire{index}.expand3", pads=(1, 1, 1, 1))
        x = builder.node("Concat", [narrow, broad], f"fire{index}.concat", axis=1)
        if index in (3, 5):
            x = pool(x, f"pool{index}")
    # The average of the last convolution's maps equals that convolution of the averages, at 1/169 of the work.
    kernel, bias = take("conv10")
    builder.classifier(x, np.ascontiguousarray(kernel[:, :, 0, 0]), bias)
    weights.finish()
    return builder.model(spec.height, spec.width, 1000)


# The small convolutional networks that the project trains itself, described once for trainer, builder and compiler.
#
# A network is a chain of 3x3 convolutions with batch normalisation and ReLU, some followed by 2x2 max pooling, some
# added to their input, then one linear layer. Every part maps to an integer pipeline on a small FPGA, and ReLU before
# pooling keeps the order in which hardware applies them.

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


TfjsEmitter: TypeAlias = Callable[[TfjsGraph, InputSpec, str], onnx.ModelProto]

EMITTERS: Final[Mapping[str, Emitter]] = {
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_lite0": efficientnet_lite(1.0, "efficientnet_lite0"),
    "efficientnet_lite1": efficientnet_lite(1.1, "efficientnet_lite1"),
    "efficientnet_lite2": efficientnet_lite(1.2, "efficientnet_lite2"),
    "squeezenet1_1": squeezenet1_1,
    **{name: convnet_emitter(name) for name in CONVNETS},
}
TFJS_EMITTERS: Final[Mapping[str, TfjsEmitter]] = {
    "ssdlite_mobilenet_v2": ssdlite_mobilenet_v2,
    "centernet": centernet,
}
"""Emitters of the architectures that come as TensorFlow.js graphs."""
FLOAT_FROM: Final[Mapping[str, tuple[str, ...]]] = {"ssdlite_mobilenet_v2": ssdlite_float_from()}
"""The tensors from which on a quantised graph stays float, by architecture; elsewhere none do."""


def emit(architecture: str, state: StateDict, spec: InputSpec, where: str) -> onnx.ModelProto:
    """The float32 graph of an architecture; `where` names the weights in errors.

    Raises:
        ArtifactError: if the architecture is unknown or the weights are not its own.
    """
    emitter = EMITTERS.get(architecture)
    if emitter is None:
        raise ArtifactError(f"{where}: no architecture {architecture!r}; known are {', '.join(EMITTERS)}")
    return emitter(Weights(state, where), spec)


def emit_tfjs(architecture: str, graph: TfjsGraph, spec: InputSpec, where: str) -> onnx.ModelProto:
    """The float32 graph of an architecture that comes as a TensorFlow.js graph; `where` names it in errors.

    Raises:
        ArtifactError: if the architecture is unknown or the graph is not its own.
    """
    emitter = TFJS_EMITTERS.get(architecture)
    if emitter is None:
        raise ArtifactError(f"{where}: no architecture {architecture!r}; known are {', '.join(TFJS_EMITTERS)}")
    return emitter(graph, spec, where)
