"""The layers of image networks as ONNX, and what they have to know of the input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from hawkvision.models.input_spec import InputSpec

# Writes a model as ONNX, node by node: `image`, uint8 RGB (n, height, width, 3) with any n, to float32 outputs; of
# classifiers `logits` (n, classes).
#
# The same nodes and constants always give the same model, so that an artefact's SHA-256 can stand in a manifest.

OPSET: Final = 17
IR_VERSION: Final = 8
NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})


class GraphWriter:
    """Collects nodes and constants in order; each method returns the name of what it adds."""

    def __init__(self, name: str, producer: str) -> None:
        self._name, self._producer = name, producer
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """A constant; the same name is stored once."""
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
        return name

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """A node with one output, which names it."""
        self._nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def many(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> list[str]:
        """A node with several outputs; the first names it."""
        self._nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], **attributes))
        return outputs

    def model(
        self, height: int, width: int, classes: int, metadata: Mapping[str, str] = NO_METADATA
    ) -> onnx.ModelProto:
        """The finished, checked classifier."""
        return self.model_of(height, width, {"logits": (classes,)}, metadata)

    def model_of(
        self,
        height: int,
        width: int,
        outputs: Mapping[str, tuple[int, ...]],
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> onnx.ModelProto:
        """The finished, checked model, with the shape of each output for one image."""
        graph = helper.make_graph(
            self._nodes,
            self._name,
            [helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", height, width, 3])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape]) for name, shape in outputs.items()],
            list(self._constants.values()),
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name=self._producer)
        if metadata:
            helper.set_model_props(model, dict(metadata))
        onnx.checker.check_model(model, full_check=True)
        return model


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
