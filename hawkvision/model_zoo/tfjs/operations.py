"""The operations of TensorFlow that the converter knows, each as a function of one node.

Images stay planar from one operation to the next; an operation that needs TensorFlow's order of axes asks for it.
Operations after a convolution that are linear in each channel (biases, normalisations, constants) are folded into it.
What depends on shapes only is computed here and becomes constant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.tfjs.graph import Node, TfjsGraph
from hawkvision.models.onnx_layers import F32, NO_PADS, GraphBuilder, Pads, same_pads

# What the converter knows of a tensor: its shape, how ONNX holds it, and convolutions that are not written yet.

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
    """The last operation's that was taken in; it names the ONNX tensor."""
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


# What is known while a graph is converted, and how operations get at their inputs.

Constant: TypeAlias = NDArray[Any]
Value: TypeAlias = Tensor | Convolution | Constant


class Context:
    """The values of a graph by the names of the nodes that make them.

    Attributes:
        builder: the ONNX graph.
        feeds: nodes whose values are given, as images whose channels are still to be divided by `divisor`.
    """

    def __init__(
        self, graph: TfjsGraph, builder: GraphBuilder, feeds: Mapping[str, Tensor], divisor: Sequence[float], where: str
    ) -> None:
        """Only the fed values and the weights are known yet; `where` names the model in errors."""
        self.builder = builder
        self.feeds = frozenset(feeds)
        self.divisor = np.asarray(divisor, np.float32)
        self._graph, self._where = graph, where
        self._values: dict[str, Value] = dict(feeds)
        self._last: dict[str, Tensor] = {}
        self._uses: Counter[str] = Counter()

    def error(self, node: Node, what: str) -> ArtifactError:
        """An error at a node."""
        return ArtifactError(f"{self._where}: operation {node.op} of node {node.name!r}: {what}")

    def use(self, names: Iterable[str]) -> None:
        """Count uses of values, before any operation is converted."""
        self._uses.update(names)

    def set(self, name: str, value: Value) -> None:
        """Store a value."""
        self._values[name] = value

    def known(self, name: str) -> bool:
        """Whether a value is stored, or a weight."""
        return name in self._values or name in self._graph.weights

    def value(self, name: str) -> Value:
        """A converted value, or a weight."""
        return self._values[name] if name in self._values else self._graph.weights[name]

    def constant(self, node: Node, index: int) -> Constant:
        """An input that must be constant."""
        value = self.value(node.inputs[index])
        if not isinstance(value, np.ndarray):
            raise self.error(node, f"input {index} must be constant")
        return value

    def tensor(self, name: str) -> Tensor:
        """A value as a tensor of the graph; a convolution takes in nothing more."""
        value = self.value(name)
        if isinstance(value, Convolution):
            value = self._values[name] = value.write(self.builder)
        if not isinstance(value, Tensor):
            raise ArtifactError(f"{self._where}: {name!r} is constant where a tensor was expected")
        return value

    def channels_last(self, name: str) -> Tensor:
        """A value as a tensor in TensorFlow's order."""
        tensor = self.tensor(name)
        if not tensor.planar:
            return tensor
        if name not in self._last:
            last = self.builder.node("Transpose", [tensor.name], f"{tensor.name}.last", perm=[0, 2, 3, 1])
            self._last[name] = Tensor(last, tensor.shape, planar=False)
        return self._last[name]

    def planar(self, node: Node, index: int = 0) -> Tensor:
        """An input that must be images, held as planes."""
        tensor = self.tensor(node.inputs[index])
        if not tensor.planar:
            raise self.error(node, f"input {index} must be images, got shape {tensor.shape}")
        return tensor

    def foldable(self, name: str) -> Convolution | None:
        """A convolution that nothing else uses."""
        value = self.value(name)
        return value if isinstance(value, Convolution) and self._uses[name] == 1 else None


def convolution(context: Context, node: Node) -> Convolution:
    """Conv2D and DepthwiseConv2dNative."""
    image = context.planar(node)
    kernel = context.constant(node, 1).astype(np.float32)
    depthwise = "Depthwise" in node.op
    if depthwise and kernel.shape[3] != 1:
        raise context.error(node, f"only one output per channel is converted, got {kernel.shape[3]}")
    planes: F32 = np.ascontiguousarray(kernel.transpose((2, 3, 0, 1) if depthwise else (3, 2, 0, 1)))
    if node.inputs[0] in context.feeds:
        planes = planes / context.divisor.reshape((-1, 1, 1, 1) if depthwise else (1, -1, 1, 1))
    _, stride, across, _ = node.integers("strides")
    if stride != across or stride < 1 or set(node.integers("dilations")) > {1} or kernel.shape[0] != kernel.shape[1]:
        raise context.error(node, "only square kernels and strides without dilation are converted")
    size = (image.shape[1], image.shape[2])
    pads = _pads(context, node, size, kernel.shape[0], stride)
    height, width = ((n + pads[i] + pads[i + 2] - kernel.shape[0]) // stride + 1 for i, n in enumerate(size))
    if min(height, width) < 1:
        raise context.error(node, f"the kernel of {kernel.shape[0]} leaves nothing of {size[0]}x{size[1]}")
    return Convolution(
        name=node.name,
        source=image.name,
        kernel=planes,
        bias=np.zeros(planes.shape[0], np.float32),
        stride=stride,
        pads=pads,
        groups=planes.shape[0] if depthwise else 1,
        shape=(BATCH, height, width, planes.shape[0]),
    )


def _pads(context: Context, node: Node, size: tuple[int, int], kernel: int, stride: int) -> tuple[int, int, int, int]:
    padding = node.text("padding")
    if padding not in ("SAME", "VALID"):
        raise context.error(node, f"padding {padding!r} is not converted")
    return same_pads(size, kernel, stride) if padding == "SAME" else NO_PADS


def fused_convolution(context: Context, node: Node) -> Value:
    """A convolution with its bias and activation."""
    made = convolution(context, node)
    fused = list(node.texts("fused_ops"))
    if fused[:1] == ["BiasAdd"]:
        made = made.shifted(node.name, _per_channel(context, node, context.constant(node, 2), made.shape[-1]))
        fused.pop(0)
    if not fused:
        return made
    if fused not in (["Relu"], ["Relu6"]):
        raise context.error(node, f"the fused operations {fused} are not converted")
    written = made.write(context.builder)
    return Tensor(_activated(context, fused[0], written.name), written.shape, planar=True)


def normalisation(context: Context, node: Node) -> Value:
    """FusedBatchNorm after a convolution."""
    before = context.foldable(node.inputs[0])
    if before is None or before.added is not None:
        raise context.error(node, "only after a convolution it is converted")
    gamma, beta, mean, variance = (context.constant(node, i).astype(np.float32) for i in range(1, 5))
    factor = gamma / np.sqrt(variance + np.float32(node.number("epsilon")))
    return before.scaled(node.name, factor).shifted(node.name, beta - mean * factor)


def add(context: Context, node: Node) -> Value:
    """Add, AddV2, AddN of two and BiasAdd: of a constant to each channel, or of two tensors."""
    first, second = _operands(context, node)
    if isinstance(second, np.ndarray):
        before = context.foldable(first)
        if before is not None:
            return before.shifted(node.name, _per_channel(context, node, second, before.shape[-1]))
        return _with_constant(context, node, "Add", first, second)
    before, other = context.foldable(first), second
    if before is None or before.added is not None:
        before, other = context.foldable(second), first
    if before is not None and before.added is None:
        return _residual(context, node, before, context.tensor(other))
    return _elementwise(context, node, "Add", context.tensor(first), context.tensor(second))


def _residual(context: Context, node: Node, before: Convolution, other: Tensor) -> Value:
    """The sum waits as well: TensorFlow's optimiser moves the bias of a convolution behind it."""
    if before.shape != other.shape or not other.planar:
        raise context.error(node, f"cannot add shapes {before.shape} and {other.shape}")
    return replace(before, name=node.name, added=other.name)


def multiply(context: Context, node: Node) -> Value:
    """Mul: by a constant for each channel, or of two tensors."""
    first, second = _operands(context, node)
    if not isinstance(second, np.ndarray):
        return _elementwise(context, node, "Mul", context.tensor(first), context.tensor(second))
    before = context.foldable(first)
    if before is not None and before.added is None:
        return before.scaled(node.name, _per_channel(context, node, second, before.shape[-1]))
    return _with_constant(context, node, "Mul", first, second)


def _operands(context: Context, node: Node) -> tuple[str, str | Constant]:
    """The names of both inputs; a constant second."""
    if len(node.inputs) != 2:
        raise context.error(node, f"expected 2 inputs, got {len(node.inputs)}")
    first, second = node.inputs
    if isinstance(context.value(first), np.ndarray):
        first, second = second, first
    value = context.value(second)
    return (first, value) if isinstance(value, np.ndarray) else (first, second)


def _with_constant(context: Context, node: Node, op: str, name: str, value: Constant) -> Tensor:
    tensor = context.tensor(name)
    numbers = _per_channel(context, node, value, tensor.shape[-1])
    shaped = numbers.reshape((-1, 1, 1) if tensor.planar and numbers.size > 1 else numbers.shape)
    operand = context.builder.constant(f"{node.name}.constant", shaped)
    return Tensor(context.builder.node(op, [tensor.name, operand], node.name), tensor.shape, tensor.planar)


def _per_channel(context: Context, node: Node, value: Constant, channels: int) -> F32:
    """A constant as one number (), or one per channel (channels,)."""
    if value.size not in (1, channels) or value.size != max(value.shape, default=1):
        raise context.error(node, f"a constant of shape {value.shape} is neither one number nor one per channel")
    numbers: F32 = value.astype(np.float32).reshape(() if value.size == 1 else -1)
    return numbers


def _elementwise(context: Context, node: Node, op: str, first: Tensor, second: Tensor) -> Tensor:
    shape = np.broadcast_shapes(*(tuple(1 if d == BATCH else d for d in each.shape) for each in (first, second)))
    if first.planar != second.planar or len(first.shape) != len(second.shape):
        raise context.error(node, f"cannot combine shapes {first.shape} and {second.shape}")
    made = context.builder.node(op, [first.name, second.name], node.name)
    return Tensor(made, (BATCH, *shape[1:]), first.planar)


def activation(context: Context, node: Node) -> Tensor:
    """Relu, Relu6 and Sigmoid."""
    tensor = context.tensor(node.inputs[0])
    return Tensor(_activated(context, node.op, tensor.name), tensor.shape, tensor.planar)


def _activated(context: Context, op: str, name: str) -> str:
    match op:
        case "Relu":
            return context.builder.relu(name)
        case "Relu6":
            return context.builder.relu6(name)
        case _:
            return context.builder.node("Sigmoid", [name], f"{name}.sigmoid")


def mean(context: Context, node: Node) -> Tensor:
    """Mean over the positions of images."""
    image = context.planar(node)
    if sorted(context.constant(node, 1).tolist()) != [1, 2] or not node.flag("keep_dims"):
        raise context.error(node, "only the mean over height and width, with both kept, is converted")
    made = context.builder.node("GlobalAveragePool", [image.name], node.name)
    return Tensor(made, (BATCH, 1, 1, image.shape[3]), planar=True)


def resize(context: Context, node: Node) -> Tensor:
    """ResizeBilinear by whole factors, as TensorFlow 1 aligns pixels."""
    image = context.planar(node)
    if node.flag("align_corners") or node.flag("half_pixel_centers"):
        raise context.error(node, "only the alignment of top left corners is converted")
    height, width = (int(n) for n in context.constant(node, 1))
    factors = (height // image.shape[1], width // image.shape[2])
    if (height, width) != (image.shape[1] * factors[0], image.shape[2] * factors[1]):
        raise context.error(node, f"only whole factors are converted, got {image.shape[1:3]} to {(height, width)}")
    scales = np.array([1, 1, *factors], np.float32)
    made = context.builder.node(
        "Resize",
        [image.name, "", context.builder.constant(f"{node.name}.scales", scales)],
        node.name,
        mode="linear",
        coordinate_transformation_mode="asymmetric",
    )
    return Tensor(made, (BATCH, height, width, image.shape[3]), planar=True)


def concatenate(context: Context, node: Node) -> Tensor:
    """ConcatV2 over one axis."""
    parts = [context.tensor(name) for name in node.inputs[:-1]]
    rank = len(parts[0].shape)
    axis = int(context.constant(node, -1)) % rank
    if len({(part.planar, len(part.shape)) for part in parts}) != 1 or axis == 0:
        raise context.error(node, "only tensors of the same rank and order of axes are joined, and not over images")
    written = (0, 2, 3, 1)[axis] if parts[0].planar else axis
    made = context.builder.node("Concat", [part.name for part in parts], node.name, axis=written)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return Tensor(made, tuple(shape), parts[0].planar)


def reshape(context: Context, node: Node) -> Tensor:
    """Reshape that keeps images apart."""
    tensor = context.channels_last(node.inputs[0])
    wanted = [int(n) for n in context.constant(node, 1)]
    if wanted[:1] != [BATCH] or BATCH in wanted[1:]:
        raise context.error(node, f"only shapes that begin with the number of images are converted, got {wanted}")
    return _reshaped(context, tensor, (BATCH, *wanted[1:]), node)


def squeeze(context: Context, node: Node) -> Tensor:
    """Squeeze of named axes of length 1."""
    tensor = context.channels_last(node.inputs[0])
    axes = {axis % len(tensor.shape) for axis in node.integers("squeeze_dims")}
    if not axes or any(tensor.shape[axis] != 1 for axis in axes):
        raise context.error(node, f"cannot squeeze the axes {sorted(axes)} of {tensor.shape}")
    return _reshaped(context, tensor, tuple(n for i, n in enumerate(tensor.shape) if i not in axes), node)


def _reshaped(context: Context, tensor: Tensor, shape: Shape, node: Node) -> Tensor:
    if np.prod(shape) != np.prod(tensor.shape):
        raise context.error(node, f"{tensor.shape} does not fit {shape}")
    target = context.builder.constant(f"{node.name}.shape", np.array((0, *shape[1:]), np.int64))
    return Tensor(context.builder.node("Reshape", [tensor.name, target], node.name), shape, planar=False)


def identity(context: Context, node: Node) -> Value:
    """Identity."""
    value = context.value(node.inputs[0])
    return value if isinstance(value, np.ndarray) else context.tensor(node.inputs[0])


def shape_of(context: Context, node: Node) -> Constant:
    """Shape."""
    value = context.value(node.inputs[0])
    return np.array(value.shape, np.int64)


def strided_slice(context: Context, node: Node) -> Constant:
    """StridedSlice of a shape, taking one number."""
    taken, begin = context.constant(node, 0), context.constant(node, 1)
    if taken.ndim != 1 or begin.shape != (1,) or node.attributes.get("shrink_axis_mask", {}).get("i") not in (1, "1"):
        raise context.error(node, "only one number of a shape is taken")
    number: Constant = taken[int(begin[0])]
    return np.asarray(number)


def pack(context: Context, node: Node) -> Constant:
    """Pack of numbers into a shape."""
    return np.stack([context.constant(node, i) for i in range(len(node.inputs))])


Operation: TypeAlias = Callable[[Context, Node], Value]

CONVOLUTIONS: Final[Collection[Operation]] = (convolution, fused_convolution)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "Conv2D": convolution,
    "DepthwiseConv2dNative": convolution,
    "_FusedConv2D": fused_convolution,
    "FusedDepthwiseConv2dNative": fused_convolution,
    "FusedBatchNorm": normalisation,
    "FusedBatchNormV3": normalisation,
    "BiasAdd": add,
    "Add": add,
    "AddV2": add,
    "AddN": add,
    "Mul": multiply,
    "Relu": activation,
    "Relu6": activation,
    "Sigmoid": activation,
    "Mean": mean,
    "ResizeBilinear": resize,
    "ConcatV2": concatenate,
    "Reshape": reshape,
    "Squeeze": squeeze,
    "Identity": identity,
    "Shape": shape_of,
    "StridedSlice": strided_slice,
    "Pack": pack,
}
