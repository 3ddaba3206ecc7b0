"""Writes an integer graph as a plain ONNX model that any runtime computes exactly; the model carries the graph along.

    image, uint8 RGB (n, height, width, 3)  →  logits, float32 (n, classes) = integer logits · logit_scale

Sums below 2^24 are computed in float32, which is exact in any order of addition; layers with larger sums use
`ConvInteger`. `Requantise` is a float64 product, exact up to 2^53. Maxima are taken before it, on a quarter of the
values, because it never decreases.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from hawkvision.integer.artifact import GRAPH_KEY
from hawkvision.integer.ir import IntegerGraph, to_bytes
from hawkvision.integer.nodes import KEPT_BITS, Conv, ConvStage, Requantise
from hawkvision.integer.reference import LUMINANCE
from hawkvision.models.onnx_layers import GraphWriter

PRODUCER: Final = "hawkvision.fpga"
EXACT: Final = 1 << 24
"""Integers below this are exact in float32."""
_INTERMEDIATE: Final = 128
"""The zero of signed weights that are stored as unsigned bytes."""


def write(graph: IntegerGraph) -> bytes:
    """The model's bytes; always the same for the same graph."""
    writer = _IntegerOnnxWriter(graph.name, PRODUCER)
    x = writer.planes(graph.input.channels)
    *inner, last = graph.stages
    for stage in inner:
        x = writer.stage(x, stage)
    writer.head(x, last, graph.logit_scale)
    carried = {GRAPH_KEY: base64.b64encode(to_bytes(graph)).decode("ascii")}
    model = writer.model(graph.input.height, graph.input.width, graph.classes, carried)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def exact_in_float32(conv: Conv, activation_bits: int) -> bool:
    """Whether every partial sum is exact in float32."""
    low, high = conv.accumulator_range(activation_bits)
    return max(-low, high) < EXACT


class _IntegerOnnxWriter(GraphWriter):
    """`GraphWriter` with the operations of integer graphs."""

    def cast(self, x: str, output: str, to: int) -> str:
        return self.node("Cast", [x], output, to=to)

    def whole(self, x: str, output: str) -> str:
        """Non-negative numbers without their fractions, as float32; casts truncate, and every runtime has them."""
        return self.cast(self.cast(x, f"{output}.int", TensorProto.INT32), output, TensorProto.FLOAT)

    def clip(self, x: str, output: str, greatest: int, kind: type[np.floating[Any]] = np.float32) -> str:
        at = f"{np.dtype(kind).name}.{greatest}"
        low = self.constant(f"{np.dtype(kind).name}.0", np.array(0, kind))
        return self.node("Clip", [x, low, self.constant(at, np.array(greatest, kind))], output)

    def planes(self, channels: int) -> str:
        """The image as float planes; for grey networks its luminance, rounded as in `reference.luminance`."""
        x = self.cast("image", "image.float", TensorProto.FLOAT)
        x = self.node("Transpose", [x], "image.planes", perm=[0, 3, 1, 2])
        if channels == 3:
            return x
        # in 256ths, which float32 holds exactly
        weights = self.constant("luminance.weight", np.array(LUMINANCE, np.float32).reshape(1, 3, 1, 1) / 256)
        half = self.constant("luminance.half", np.array([0.5], np.float32))
        return self.whole(self.node("Conv", [x, weights, half], "luminance", kernel_shape=[1, 1]), "grey")

    def stage(self, x: str, stage: ConvStage) -> str:
        """One stage's activations, as float32."""
        assert stage.requantise is not None
        kept, whole = self.kept(x, stage, stage.requantise)
        if stage.pool is not None:
            kept = self.node("MaxPool", [kept], f"{stage.name}.pool", kernel_shape=[2, 2], strides=[2, 2])
        if not whole:
            kept = self.whole(kept, f"{stage.name}.whole")
        return self.requantised(kept, stage.requantise, stage.name)

    def kept(self, x: str, stage: ConvStage, node: Requantise) -> tuple[str, bool]:
        """The sums after `pre_shift`, as float32, and whether they are whole numbers."""
        conv, name, scale = stage.conv, stage.name, 2.0**-node.pre_shift
        kernel = conv.weights.transpose(0, 3, 1, 2)
        how = {"kernel_shape": [conv.kernel] * 2, "pads": [conv.pad] * 4}
        greatest = (1 << KEPT_BITS) - 1
        if exact_in_float32(conv, stage.taken.bits):
            # A power of two is exact, so the weights may include it.
            weights = self.constant(f"{name}.weight", (kernel * scale).astype(np.float32))
            bias = self.constant(f"{name}.bias", (conv.bias * scale).astype(np.float32))
            sums = self.node("Conv", [x, weights, bias], f"{name}.sums", **how)
            return self.clip(sums, f"{name}.kept", greatest), node.pre_shift == 0
        sums = self.integer_sums("ConvInteger", x, kernel, conv.bias.reshape(1, -1, 1, 1), name, **how)
        factor = self.constant(f"{name}.pre_shift", np.array(scale))
        shifted = self.node("Mul", [self.cast(sums, f"{name}.wide", TensorProto.DOUBLE), factor], f"{name}.shifted")
        return self.whole(self.clip(shifted, f"{name}.clipped", greatest, np.float64), f"{name}.kept"), True

    def requantised(self, kept: str, node: Requantise, name: str) -> str:
        """Activations from the shifted sums; float64 holds the products exactly."""
        factors = (node.multiplier * 2.0**-node.shift).reshape(1, -1, 1, 1)
        x = self.cast(kept, f"{name}.exact", TensorProto.DOUBLE)
        x = self.node("Mul", [x, self.constant(f"{name}.multiplier", factors)], f"{name}.scaled")
        x = self.node("Add", [x, self.constant("half", np.array(0.5))], f"{name}.rounded")
        return self.clip(self.whole(x, f"{name}.nearest"), f"{name}.activation", (1 << node.bits) - 1)

    def head(self, x: str, stage: ConvStage, logit_scale: float) -> None:
        """The logits: a matrix product over all that is left, times the logit scale."""
        conv, name = stage.conv, stage.name
        inside = slice(conv.pad, conv.kernel - conv.pad)  # the rest meets padding only
        rows = conv.weights[:, inside, inside].transpose(0, 3, 1, 2).reshape(conv.channels, -1)
        x = self.node("Flatten", [x], "features", axis=1)
        if exact_in_float32(conv, stage.taken.bits):
            weights = self.constant(f"{name}.weight", rows.astype(np.float32))
            bias = self.constant(f"{name}.bias", conv.bias.astype(np.float32))
            x = self.node("Gemm", [x, weights, bias], f"{name}.sums", transB=1)
        else:
            x = self.integer_sums("MatMulInteger", x, rows.T, conv.bias, name)
            x = self.cast(x, f"{name}.float", TensorProto.FLOAT)
        self.node("Mul", [x, self.constant("logit_scale", np.array(logit_scale, np.float32))], "logits")

    def integer_sums(
        self, op: str, x: str, weights: NDArray[np.int8], bias: NDArray[np.int32], name: str, **how: Any
    ) -> str:
        """Accumulators as int32.

        Weights are unsigned bytes around 128: for signed ones, ONNX Runtime adds pairs of products in 16 bits on CPUs
        with AVX2 only, and these saturate.
        """
        narrow = self.cast(x, f"{name}.bytes", TensorProto.UINT8)
        bytes_ = self.constant(f"{name}.weight", (weights.astype(np.int16) + _INTERMEDIATE).astype(np.uint8))
        zeros = [self.constant(f"byte.{zero}", np.array(zero, np.uint8)) for zero in (0, _INTERMEDIATE)]
        products = self.node(op, [narrow, bytes_, *zeros], f"{name}.products", **how)
        return self.node("Add", [products, self.constant(f"{name}.bias", bias)], f"{name}.sums")
