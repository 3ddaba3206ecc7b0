"""The layers of image networks as ONNX, and what they have to know of the input."""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from hawkvision.models.input_spec import InputSpec
from hawkvision.models.onnx_graph_writer import GraphWriter

F32: TypeAlias = NDArray[np.float32]
Pads: TypeAlias = tuple[int, int, int, int]
"""Top, left, bottom, right, as ONNX orders them."""

PRODUCER: Final = "hawkvision.zoo"  # part of the pinned bytes
NO_PADS: Final[Pads] = (0, 0, 0, 0)


class GraphBuilder(GraphWriter):
    """`GraphWriter` with the layers of the zoo's networks."""

    def __init__(self, name: str) -> None:
        super().__init__(name, PRODUCER)

    def conv(
        self, x: str, name: str, kernel: F32, bias: F32, stride: int = 1, pads: Pads = NO_PADS, groups: int = 1
    ) -> str:
        """A square convolution with bias."""
        constants = [self.constant(f"{name}.weight", kernel), self.constant(f"{name}.bias", bias)]
        return self.node(
            "Conv",
            [x, *constants],
            name,
            kernel_shape=list(kernel.shape[2:]),
            strides=[stride, stride],
            pads=list(pads),
            group=groups,
        )

    def relu(self, x: str) -> str:
        """max(x, 0)."""
        return self.node("Relu", [x], f"{x}.relu")

    def relu6(self, x: str) -> str:
        """min(max(x, 0), 6)."""
        low, high = self.constant("zero", np.array(0, np.float32)), self.constant("six", np.array(6, np.float32))
        return self.node("Clip", [x, low, high], f"{x}.relu6")

    def pixels(self, mean: tuple[float, float, float]) -> str:
        """The input as float (n, 3, height, width) less its mean."""
        floats = self.node("Cast", ["image"], "image.float", to=TensorProto.FLOAT)
        planes = self.node("Transpose", [floats], "image.planes", perm=[0, 3, 1, 2])
        offset = self.constant("image.mean", np.array(mean, np.float32).reshape(1, 3, 1, 1))
        return self.node("Sub", [planes, offset], "pixels")

    def classifier(self, x: str, kernel: F32, bias: F32) -> None:
        """Average over all positions, then a linear layer (classes, channels) into `logits`."""
        pooled = self.node("GlobalAveragePool", [x], "pool")
        self.linear(self.node("Flatten", [pooled], "features", axis=1), kernel, bias)

    def linear(self, x: str, kernel: F32, bias: F32) -> None:
        """A linear layer (classes, features) into `logits`."""
        constants = [self.constant("logits.weight", kernel), self.constant("logits.bias", bias)]
        self.node("Gemm", [x, *constants], "logits", transB=1)


def same_pads(size: tuple[int, int], kernel: int, stride: int) -> Pads:
    """TensorFlow's SAME padding: the output has ceil(size / stride) positions, and the odd pixel goes behind."""
    total = [max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in size]
    return total[0] // 2, total[1] // 2, total[0] - total[0] // 2, total[1] - total[1] // 2


def first_kernel(kernel: F32, spec: InputSpec) -> F32:
    """The first convolution's kernel for RGB pixels that are not divided by their standard deviation."""
    scaled = kernel / np.array(spec.std, np.float32).reshape(1, 3, 1, 1)
    return scaled if spec.channel_order == "rgb" else np.ascontiguousarray(scaled[:, ::-1])


def rgb_mean(spec: InputSpec) -> tuple[float, float, float]:
    """The mean in the order of the graph's planes."""
    first, second, third = spec.mean
    return spec.mean if spec.channel_order == "rgb" else (third, second, first)
