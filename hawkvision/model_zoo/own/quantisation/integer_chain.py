"""A float graph that fits (`integer_fit`) as a chain of layers, with the preparation of pixels in the first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from hawkvision.core.errors import CompileError
from hawkvision.integer.reference import LUMINANCE
from hawkvision.model_zoo.own.graphs.conversion import IMAGE
from hawkvision.model_zoo.own.graphs.graph_facts import attributes_of
from hawkvision.model_zoo.own.quantisation.integer_fit import PASSIVE, GraphView, limits_of, misfits, padding

Reals = NDArray[np.float64]
_NCHW: Final = [0, 3, 1, 2]
_GREY: Final = np.array(LUMINANCE, np.float64) / 256
_SAME: Final = 1e-5
"""Relative difference within which a kernel counts as one of luminance."""


@dataclass(frozen=True, slots=True)
class FloatLayer:
    """A convolution with what follows it. The first reads pixels 0..255."""

    name: str
    kernel: Reals
    """(out, in, k, k); k is the side of what is left for a linear layer."""
    bias: Reals
    pad: int
    ceiling: float = float("inf")
    """The upper limit of the activation."""
    relu: bool = False
    pool: bool = False


@dataclass(frozen=True, slots=True)
class FloatChain:
    """The whole network."""

    side: int
    planes: int
    """3 for RGB, 1 for luminance."""
    layers: tuple[FloatLayer, ...]
    mean: tuple[float, ...]
    """Per plane, the pixel that the owner's normalisation maps to 0; missing pixels get it."""


def float_chain(model: onnx.ModelProto, where: str) -> FloatChain:
    """The chain of a graph by the serving contract.

    Raises:
        CompileError: listing every layer that has no integer form.
    """
    found = misfits(model)
    if found:
        raise CompileError(
            f"{where}: {len(found)} parts have no integer form, which FPGAs need:\n"
            + "\n".join(f"  {x}" for x in found)
        )
    return _Walk(GraphView(model), where).chain()


class _Walk:
    """One pass from the image to the logits."""

    def __init__(self, view: GraphView, where: str) -> None:
        self._view = view
        self._where = where
        self._factor, self._offset = np.ones(3), np.zeros(3)  # of each RGB plane
        self._order = [0, 1, 2]
        self._last_axis = True
        """Whether channels are the last axis."""
        self._channels, self._side = 3, view.height
        self._averaged = False
        self._layers: list[FloatLayer] = []

    def chain(self) -> FloatChain:
        at = IMAGE
        while readers := self._view.readers.get(at, []):
            if len(readers) != 1:
                raise CompileError(f"{self._where}: {at!r} is read by {len(readers)} nodes; expected a chain")
            self._take(readers[0])
            at = readers[0].output[0]
        if not self._layers:
            raise CompileError(f"{self._where}: the graph has no layer")
        first = self._layers[0]
        planes, layers = 3, list(self._layers)
        grey = first.kernel.sum(axis=1, keepdims=True)
        if np.abs(first.kernel - grey * _GREY.reshape(1, 3, 1, 1)).max() <= _SAME * np.abs(first.kernel).max():
            planes, layers[0] = 1, replace(first, kernel=grey)
        middle = np.where(self._factor == 0, 0, -self._offset / np.where(self._factor == 0, 1, self._factor))
        mean = [float(each) for each in np.clip(middle[np.argsort(self._order)], 0, 255)]
        return FloatChain(self._view.height, planes, tuple(layers), tuple(mean) if planes == 3 else (mean[0],))

    def _take(self, node: onnx.NodeProto) -> None:
        match node.op_type:
            case "Add" if self._layers:
                (value,) = self._view.operands(node)[1]
                self._change(bias=self._layers[-1].bias + value.astype(np.float64).reshape(-1))
            case "Add" | "Sub" | "Mul" | "Div" | "Gather":
                self._prepare(node)
            case "Transpose":
                self._turn(node)
            case "Conv":
                self._conv(node)
            case "Gemm" | "MatMul":
                self._dense(node)
            case "BatchNormalization":
                self._normalise(node)
            case "Relu" | "Clip":
                high = np.inf if node.op_type == "Relu" else limits_of(self._view, node)[1]
                self._change(relu=True, ceiling=high)
            case "MaxPool":
                if self._layers[-1].pool:
                    raise CompileError(f"{self._where}: {node.name}: two maxima behind one layer; expected one")
                self._side //= 2
                self._change(pool=True)
            case "GlobalAveragePool" | "ReduceMean":
                self._averaged = True
            case other:
                assert other in ("Flatten", "Reshape", "Squeeze", *PASSIVE), other

    def _change(self, **fields: Any) -> None:
        self._layers[-1] = replace(self._layers[-1], **fields)

    def _turn(self, node: onnx.NodeProto) -> None:
        perm = list(attributes_of(node)["perm"])
        if perm not in (_NCHW, [0, 2, 3, 1]) or (perm == _NCHW) is not self._last_axis:
            raise CompileError(f"{self._where}: {node.name}: Transpose by {perm}; expected between NCHW and NHWC")
        self._last_axis = not self._last_axis

    def _prepare(self, node: onnx.NodeProto) -> None:
        """Arithmetic on pixels: scale, shift or reorder planes."""
        (value,) = self._view.operands(node)[1]
        if node.op_type == "Gather":
            self._order = [self._order[int(index)] for index in value.reshape(-1)]
            self._factor, self._offset = self._factor[value.reshape(-1)], self._offset[value.reshape(-1)]
            return
        first = node.input[0] in self._view.constants
        number = np.broadcast_to(value.astype(np.float64).reshape(-1), (3,)) if value.size in (1, 3) else None
        if number is None or (first and node.op_type in ("Sub", "Div")):
            raise CompileError(f"{self._where}: {node.name}: expected a number for each plane, got {value.shape}")
        match node.op_type:
            case "Mul":
                self._factor, self._offset = self._factor * number, self._offset * number
            case "Div":
                self._factor, self._offset = self._factor / number, self._offset / number
            case "Add":
                self._offset = self._offset + number
            case _:
                self._offset = self._offset - number

    def _conv(self, node: onnx.NodeProto) -> None:
        kernel = self._view.constants[node.input[1]].astype(np.float64)
        bias = self._bias(node, len(kernel))
        if not self._layers:
            bias = bias + np.einsum("oihw,i->o", kernel, self._offset)
            kernel = (kernel * self._factor.reshape(1, 3, 1, 1))[:, np.argsort(self._order)]
        pad = padding(attributes_of(node), kernel.shape[2])
        assert pad is not None
        self._side += 2 * pad - kernel.shape[2] + 1
        self._add(node, kernel, bias, pad)

    def _dense(self, node: onnx.NodeProto) -> None:
        """A linear layer over all that is left, as a convolution that covers it."""
        matrix = self._view.constants[node.input[1]].astype(np.float64)
        matrix = matrix if node.op_type == "Gemm" and attributes_of(node).get("transB", 0) else matrix.T
        bias = self._bias(node, len(matrix)) if node.op_type == "Gemm" else np.zeros(len(matrix))
        side = self._side
        if not self._layers:
            raise CompileError(f"{self._where}: {node.name}: expected a convolution before the first linear layer")
        if self._averaged:
            kernel = np.repeat(matrix / side**2, side**2, axis=1).reshape(len(matrix), -1, side, side)
        elif matrix.shape[1] != self._channels * side**2:
            raise CompileError(
                f"{self._where}: {node.name}: it reads {matrix.shape[1]} features, but {self._channels} maps of "
                f"{side}x{side} are left"
            )
        elif self._last_axis:
            kernel = matrix.reshape(len(matrix), side, side, -1).transpose(0, 3, 1, 2)
        else:
            kernel = matrix.reshape(len(matrix), -1, side, side)
        self._averaged, self._side = False, 1
        self._add(node, np.ascontiguousarray(kernel), bias, 0)

    def _add(self, node: onnx.NodeProto, kernel: Reals, bias: Reals, pad: int) -> None:
        self._channels = len(kernel)
        self._layers.append(FloatLayer(str(node.name or node.output[0]), kernel, bias, pad))

    def _normalise(self, node: onnx.NodeProto) -> None:
        scale, shift, mean, variance = (self._view.constants[name].astype(np.float64) for name in node.input[1:5])
        factor = scale / np.sqrt(variance + attributes_of(node).get("epsilon", 1e-5))
        layer = self._layers[-1]
        self._change(kernel=layer.kernel * factor[:, None, None, None], bias=(layer.bias - mean) * factor + shift)

    def _bias(self, node: onnx.NodeProto, channels: int) -> Reals:
        if len(node.input) < 3 or not node.input[2]:
            return np.zeros(channels)
        return self._view.constants[node.input[2]].astype(np.float64).reshape(-1)
