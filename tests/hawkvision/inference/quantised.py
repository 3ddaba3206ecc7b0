"""Writes random quantised networks as ONNX models, layer by layer, the way exporters do (QDQ)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tests.hawkvision.inference.graphs import Array, model

Padding = tuple[int, int, int, int]
"""(top, left, bottom, right)."""


@dataclass(frozen=True)
class Value:
    """A quantised tensor: its name, (height, width, channels), and scale."""

    name: str
    sizes: tuple[int, int, int]
    scale: float


class Quantised:
    """Collects the layers of one network; every method returns what it adds."""

    def __init__(self, seed: int, height: int, width: int, fold: int = 1) -> None:
        """A network of images; the first layer sees `fold` columns of them as one."""
        self._draw = np.random.default_rng(seed)
        self._height, self._width = height, width
        self._nodes: list[Any] = []
        self._constants: dict[str, Array] = {}
        self._names = 0
        self._gives: list[tuple[str, int, list[int | str]]] = []
        taken = "image"
        if fold > 1:
            taken = self._node("Reshape", [taken, self._constant(np.array([0, 0, width // fold, -1]))])
        self._node("Transpose", [taken], "pixels", perm=[0, 3, 1, 2])
        scale, zero = self._scale(1.0), self._constant(np.array(127, np.uint8))
        self._scales: dict[str, tuple[str, str]] = {"pixels": (scale, zero)}
        self.image = Value("pixels", (height, width // fold, 3 * fold), 1.0)

    def convolution(
        self,
        taken: Value,
        made: int,
        size: tuple[int, int] = (1, 1),
        strides: tuple[int, int] = (1, 1),
        pads: Padding = (0, 0, 0, 0),
        *,
        depthwise: bool = False,
        relu: bool = False,
    ) -> Value:
        """A convolution; with `relu` nothing below zero is left."""
        height, width, channels = taken.sizes
        shape = (made, 1 if depthwise else channels, *size)
        inputs, scale = self._weighted(taken, shape)
        sums = self._node(
            "Conv",
            inputs,
            kernel_shape=list(size),
            strides=list(strides),
            pads=list(pads),
            group=channels if depthwise else 1,
        )
        sizes = (
            (height + pads[0] + pads[2] - size[0]) // strides[0] + 1,
            (width + pads[1] + pads[3] - size[1]) // strides[1] + 1,
            made,
        )
        spread = scale * 73 * 73 * float(np.sqrt(np.prod(shape[1:])))
        return self._quantised(sums, sizes, spread / (255 if relu else 100), 0 if relu else None)

    def unfolded(self, taken: Value, fold: int) -> Value:
        """The same bytes with `fold` columns in the place of each column."""
        height, width, channels = taken.sizes
        rows = self._node("Transpose", [taken.name], perm=[0, 2, 3, 1])
        columns = self._node("Reshape", [rows, self._constant(np.array([0, 0, width * fold, -1]))])
        name = self._node("Transpose", [columns], perm=[0, 3, 1, 2])
        self._scales[name] = self._scales[taken.name]
        return Value(name, (height, width * fold, channels // fold), taken.scale)

    def addition(self, one: Value, other: Value) -> Value:
        """The sum of two."""
        sums = self._node("Add", [self._real(one), self._real(other)])
        return self._quantised(sums, one.sizes, one.scale + other.scale * self._draw.uniform(0.1, 1.0))

    def rows(self, taken: Value, name: str, *, real: bool = False) -> None:
        """An output: a sigmoid of each position's values but the third, with `real` after a layer in float."""
        height, width, channels = taken.sizes
        values = self._real(taken)
        if real:
            weights, channels = self._draw.normal(0, 0.1, (20, channels, 1, 1)).astype(np.float32), 20
            bias = self._constant(self._draw.normal(0, 1, 20).astype(np.float32))
            values = self._node("Conv", [values, self._constant(weights), bias], kernel_shape=[1, 1])
        last = self._node("Transpose", [values], perm=[0, 2, 3, 1])
        flat = self._node("Reshape", [last, self._constant(np.array([0, height * width, channels]))])
        kept = self._constant(np.delete(np.arange(channels), 2))
        self._node("Sigmoid", [self._node("Gather", [flat, kept], axis=2)], name)
        self._gives.append((name, TensorProto.FLOAT, ["n", height * width, channels - 1]))

    def logits(self, taken: Value, classes: int, name: str = "logits") -> bytes:
        """An output: the mean of all positions and a fully connected layer; and with it the model so far."""
        means = self._node("GlobalAveragePool", [self._real(taken)])
        pooled = self._quantised(means, (1, 1, taken.sizes[2]), taken.scale * self._draw.uniform(0.2, 1.0))
        flat = self._node("Flatten", [pooled.name], axis=1)
        self._scales[flat] = self._scales[pooled.name]
        inputs, _ = self._weighted(Value(flat, pooled.sizes, pooled.scale), (classes, taken.sizes[2]))
        self._node("Gemm", inputs, name, transB=1)
        self._gives.append((name, TensorProto.FLOAT, ["n", classes]))
        return self.model()

    def model(self) -> bytes:
        """The model with the outputs so far."""
        given: tuple[str, int, list[int | str]] = ("image", TensorProto.UINT8, ["n", self._height, self._width, 3])
        return model(self._nodes, self._constants, given, *self._gives)

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}{self._names}"

    def _node(self, kind: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or self._name(kind.lower())
        self._nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, value: Array) -> str:
        name = self._name("constant")
        self._constants[name] = value
        return name

    def _scale(self, scale: Any) -> str:
        return self._constant(np.asarray(scale, np.float32))

    def _real(self, value: Value) -> str:
        return self._node("DequantizeLinear", [value.name, *self._scales[value.name]])

    def _weighted(self, taken: Value, shape: tuple[int, ...]) -> tuple[list[str], float]:
        """Names of what a layer takes, its weights and its bias; and a typical scale of its sums."""
        made = shape[0]
        scales = self._draw.uniform(0.001, 0.01, made).astype(np.float32)
        weights = self._draw.integers(-128, 128, shape, dtype=np.int8)
        bias = self._draw.integers(-5000, 5000, made, dtype=np.int32)
        names = [self._real(taken)]
        for value, scale in ((weights, scales), (bias, np.float32(taken.scale) * scales)):
            zero = self._constant(np.zeros(made, value.dtype))
            names.append(self._node("DequantizeLinear", [self._constant(value), self._scale(scale), zero], axis=0))
        return names, float(taken.scale * scales.mean())

    def _quantised(self, sums: str, sizes: tuple[int, int, int], scale: float, zero: int | None = None) -> Value:
        zero = int(self._draw.integers(90, 160)) if zero is None else zero
        said = self._scale(scale), self._constant(np.array(zero, np.uint8))
        name = self._node("QuantizeLinear", [sums, *said])
        self._scales[name] = said
        return Value(name, sizes, float(np.float32(scale)))


def residual_network(seed: int = 0, height: int = 36, width: int = 30, classes: int = 11) -> bytes:
    """A stem, a block with a residual while the image is tall and one when it is small, and a head."""
    net = Quantised(seed, height, width, fold=2)
    stem = net.convolution(net.image, 32, (3, 2), (1, 1), (1, 0, 1, 1), relu=True)
    taken = net.unfolded(stem, 2)
    for stride in (1, 2):
        taken = net.convolution(taken, 24)
        up = net.convolution(taken, 96, relu=True)
        window = net.convolution(up, 96, (3, 3), (1, 1), (1, 1, 1, 1), depthwise=True, relu=True)
        taken = net.addition(net.convolution(window, 24), taken)
        up = net.convolution(taken, 48, relu=True)
        window = net.convolution(up, 48, (5, 5), (stride, stride), (2, 2, 2, 2), depthwise=True, relu=True)
        taken = net.convolution(window, 40)
    return net.logits(net.convolution(taken, 80, relu=True), classes)


def two_outputs(seed: int = 0) -> bytes:
    """A network with an output of rows beside its logits."""
    net = Quantised(seed, 36, 30, fold=2)
    stem = net.convolution(net.image, 32, (3, 2), (1, 1), (1, 0, 1, 1), relu=True)
    net.logits(stem, 11)
    net.rows(net.convolution(stem, 24), "rows", real=True)
    return net.model()
