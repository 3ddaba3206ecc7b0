"""The ONNX operators that the zoo's graphs use, in NumPy, as the operator specification (opset 17) defines them.

Right and clear rather than fast. Each takes its inputs (None where an optional one is left out) and its attributes.
An operator refuses attributes that it does not know, for ignoring one would give a wrong answer silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Tensor: TypeAlias = NDArray[Any]
Inputs: TypeAlias = Sequence[Tensor | None]
Attributes: TypeAlias = Mapping[str, Any]

DTYPES: dict[int, type[np.generic]] = {
    1: np.float32,
    2: np.uint8,
    3: np.int8,
    6: np.int32,
    7: np.int64,
    11: np.float64,
}
"""`TensorProto.DataType` numbers of the types that occur."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What computes a node's one output, and the attributes it understands."""

    compute: Callable[[Inputs, Attributes], Tensor]
    attributes: frozenset[str]


def _needed(inputs: Inputs, index: int) -> Tensor:
    value = inputs[index] if index < len(inputs) else None
    if value is None:
        raise ValueError(f"input {index} is missing")
    return value


def _optional(inputs: Inputs, index: int) -> Tensor | None:
    return inputs[index] if index < len(inputs) else None


def _cast(inputs: Inputs, attributes: Attributes) -> Tensor:
    return _needed(inputs, 0).astype(DTYPES[attributes["to"]])


def _transpose(inputs: Inputs, attributes: Attributes) -> Tensor:
    return _needed(inputs, 0).transpose(attributes.get("perm"))


def _clip(inputs: Inputs, _: Attributes) -> Tensor:
    result, low, high = _needed(inputs, 0), _optional(inputs, 1), _optional(inputs, 2)
    if low is not None:
        result = np.maximum(result, low)
    return result if high is None else np.minimum(result, high)


def _relu(inputs: Inputs, _: Attributes) -> Tensor:
    x = _needed(inputs, 0)
    positive: Tensor = np.maximum(x, x.dtype.type(0))
    return positive


def _arithmetic(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Inputs, Attributes], Tensor]:
    return lambda inputs, _: function(_needed(inputs, 0), _needed(inputs, 1))


def _divide(a: Tensor, b: Tensor) -> Tensor:
    if np.issubdtype(a.dtype, np.integer):
        raise ValueError("integer division is not implemented")
    quotient: Tensor = a / b
    return quotient


def _conv(inputs: Inputs, attributes: Attributes) -> Tensor:
    """Grouped 2-D cross-correlation as one matrix product per image and group (im2col)."""
    x, kernel, bias = _needed(inputs, 0), _needed(inputs, 1), _optional(inputs, 2)
    groups = int(attributes.get("group", 1))
    outputs, depth, rows, columns = kernel.shape
    if x.shape[1] != depth * groups or outputs % groups:
        raise ValueError(f"{x.shape[1]} channels do not fit a kernel of {kernel.shape} in {groups} groups")
    top, left, bottom, right = _pads(attributes)
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = _windows(padded, (rows, columns), attributes)
    n, _, height, width = windows.shape[:4]
    grouped = windows.reshape(n, groups, depth, height, width, rows, columns)
    patches = grouped.transpose(0, 1, 3, 4, 2, 5, 6).reshape(n, groups, height * width, depth * rows * columns)
    weights = kernel.reshape(groups, outputs // groups, -1).transpose(0, 2, 1)
    result: Tensor = (patches @ weights).transpose(0, 1, 3, 2).reshape(n, outputs, height, width)
    return result if bias is None else result + bias.reshape(1, -1, 1, 1)


def _max_pool(inputs: Inputs, attributes: Attributes) -> Tensor:
    x = _needed(inputs, 0)
    kernel = _pair(attributes["kernel_shape"])
    strides, dilations = _pair(attributes.get("strides", (1, 1))), _pair(attributes.get("dilations", (1, 1)))
    top, left, bottom, right = _pads(attributes)
    ends = []
    for axis, (before, after) in enumerate(((top, bottom), (left, right))):
        size, stride = x.shape[2 + axis], strides[axis]
        span = size + before + after - (dilations[axis] * (kernel[axis] - 1) + 1)
        steps = math.ceil(span / stride) if attributes.get("ceil_mode", 0) else span // stride
        if steps * stride >= size + before:  # the last window must begin within the image or its leading pad
            steps -= 1
        ends.append(max(after, after + steps * stride - span))
    lowest = -np.inf if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).min
    padded = np.pad(x, ((0, 0), (0, 0), (top, ends[0]), (left, ends[1])), constant_values=lowest)
    result: Tensor = _windows(padded, kernel, attributes).max(axis=(4, 5))
    return result


def _global_average_pool(inputs: Inputs, _: Attributes) -> Tensor:
    x = _needed(inputs, 0)
    mean: Tensor = x.mean(axis=tuple(range(2, x.ndim)), keepdims=True, dtype=x.dtype)
    return mean


def _reduce_mean(inputs: Inputs, attributes: Attributes) -> Tensor:
    """Axes are an attribute up to opset 17 and an input after it; none means all."""
    x, given = _needed(inputs, 0), _optional(inputs, 1)
    axes = given.tolist() if given is not None else attributes.get("axes")
    return np.asarray(
        x.mean(axis=tuple(axes) if axes else None, keepdims=bool(attributes.get("keepdims", 1)), dtype=x.dtype)
    )


def _concat(inputs: Inputs, attributes: Attributes) -> Tensor:
    return np.concatenate([_needed(inputs, i) for i in range(len(inputs))], axis=attributes["axis"])


def _flatten(inputs: Inputs, attributes: Attributes) -> Tensor:
    x = _needed(inputs, 0)
    axis = attributes.get("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _reshape(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, shape = _needed(inputs, 0), _needed(inputs, 1).tolist()
    if not attributes.get("allowzero", 0):  # zero copies the input's size
        shape = [size or x.shape[i] for i, size in enumerate(shape)]
    return x.reshape(shape)


def _gemm(inputs: Inputs, attributes: Attributes) -> Tensor:
    a, b, c = _needed(inputs, 0), _needed(inputs, 1), _optional(inputs, 2)
    a = a.T if attributes.get("transA", 0) else a
    b = b.T if attributes.get("transB", 0) else b
    product: Tensor = np.float32(attributes.get("alpha", 1.0)) * (a @ b)
    return product if c is None else product + np.float32(attributes.get("beta", 1.0)) * c


def _quantize(inputs: Inputs, attributes: Attributes) -> Tensor:
    """Round half to even, then saturate. Without a zero point: uint8 around 0."""
    x, zero = _needed(inputs, 0), _optional(inputs, 2)
    zero = np.uint8(0) * np.ones((), np.uint8) if zero is None else zero
    scale = _along(_needed(inputs, 1), x, attributes)
    limits = np.iinfo(zero.dtype)
    levels = np.rint(x / scale) + _along(zero, x, attributes).astype(np.float32)
    saturated: Tensor = np.clip(levels, limits.min, limits.max).astype(zero.dtype)
    return saturated


def _dequantize(inputs: Inputs, attributes: Attributes) -> Tensor:
    x, zero = _needed(inputs, 0), _optional(inputs, 2)
    scale = _along(_needed(inputs, 1), x, attributes)
    levels = x.astype(np.int32) if zero is None else x.astype(np.int32) - _along(zero, x, attributes).astype(np.int32)
    result: Tensor = levels.astype(np.float32) * scale
    return result


def _along(parameter: Tensor, x: Tensor, attributes: Attributes) -> Tensor:
    """A scalar as it is, or one value per index of the node's axis, shaped to broadcast over `x`."""
    if parameter.size == 1:
        return parameter.reshape(())
    shape = [1] * x.ndim
    shape[attributes.get("axis", 1)] = -1
    return parameter.reshape(shape)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    if len(values) != 2:
        raise ValueError(f"only two spatial dimensions are implemented, got {tuple(values)}")
    return int(values[0]), int(values[1])


def _pads(attributes: Attributes) -> tuple[int, int, int, int]:
    """(top, left, bottom, right)."""
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise ValueError(f"auto_pad = {attributes['auto_pad']!r} is not implemented; write the pads out")
    top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
    return top, left, bottom, right


def _windows(padded: Tensor, kernel: tuple[int, int], attributes: Attributes) -> Tensor:
    """Every window of the kernel's size as (n, channels, out height, out width, rows, columns), without copying."""
    down, across = _pair(attributes.get("strides", (1, 1)))
    far_down, far_across = _pair(attributes.get("dilations", (1, 1)))
    reach = (far_down * (kernel[0] - 1) + 1, far_across * (kernel[1] - 1) + 1)
    return sliding_window_view(padded, reach, axis=(2, 3))[:, :, ::down, ::across, ::far_down, ::far_across]


_SPATIAL = frozenset({"auto_pad", "dilations", "kernel_shape", "pads", "strides"})
_NONE: frozenset[str] = frozenset()

OPERATORS: dict[str, Operator] = {
    "Add": Operator(_arithmetic(np.add), _NONE),
    "Cast": Operator(_cast, frozenset({"to"})),
    "Clip": Operator(_clip, _NONE),
    "Concat": Operator(_concat, frozenset({"axis"})),
    "Conv": Operator(_conv, _SPATIAL | {"group"}),
    "DequantizeLinear": Operator(_dequantize, frozenset({"axis"})),
    "Div": Operator(_arithmetic(_divide), _NONE),
    "Flatten": Operator(_flatten, frozenset({"axis"})),
    "Gemm": Operator(_gemm, frozenset({"alpha", "beta", "transA", "transB"})),
    "GlobalAveragePool": Operator(_global_average_pool, _NONE),
    "Identity": Operator(lambda inputs, _: _needed(inputs, 0), _NONE),
    "MatMul": Operator(_arithmetic(np.matmul), _NONE),
    "MaxPool": Operator(_max_pool, _SPATIAL | {"ceil_mode"}),
    "Mul": Operator(_arithmetic(np.multiply), _NONE),
    "QuantizeLinear": Operator(_quantize, frozenset({"axis"})),
    "ReduceMean": Operator(_reduce_mean, frozenset({"axes", "keepdims"})),
    "Relu": Operator(_relu, _NONE),
    "Reshape": Operator(_reshape, frozenset({"allowzero"})),
    "Sub": Operator(_arithmetic(np.subtract), _NONE),
    "Transpose": Operator(_transpose, frozenset({"perm"})),
}
