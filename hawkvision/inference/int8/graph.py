"""Reads an ONNX graph as integer layers (convolutions, additions, means, logits) and the real operations behind them.

Every tensor between two layers must go through `QuantizeLinear` and `DequantizeLinear` (QDQ). Activations are uint8
with one scale. Weights are int8 with one scale per output channel and no zero point. Transposes and reshapes are
accepted if the bytes of (height, width, channels) stay where they are. Anything else is `Unsupported`, except behind
the last quantised tensors or logits: what makes the outputs of those is a model of its own, for ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.inference.int8.rest import Int8Result, rest_of

Kind: TypeAlias = Literal["pad", "convolution", "depthwise", "add", "mean", "dense"]
Sizes: TypeAlias = tuple[int, int, int]
"""(height, width, channels)."""

UINT8: Final = 2
"""ONNX's number of this element type."""
MOST_BYTES: Final = 1 << 28
"""Largest tensor; an image of 260 x 260 needs 2 MB at most."""
MOST_SIDE: Final = 1 << 12
"""Most rows, or columns, of a tensor."""
MOST_LAYERS: Final = 4096
"""Most layers of a network."""
MOST_STEP: Final = 64
"""Largest step of a window, in rows or columns."""
MOST_PRODUCT: Final = 255 * 128
"""Largest product of a byte and a weight."""
MOST_AVERAGED: Final = 1 << 22
"""Most positions in a mean."""
MOST_RATIO: Final = 1 << 16
"""Largest ratio of the step of an added or averaged tensor to the step of the result."""
BIAS_TOLERANCE: Final = 1e-5
"""Largest relative difference between the scale of a bias and that of the sums, which are computed in float32."""


class Unsupported(Exception):
    """The graph has a part without an integer layer here; the message names it."""


@dataclass(frozen=True, slots=True)
class Int8Tensor:
    """Bytes (height, width, channels) with the values `scale * (byte - zero)`."""

    sizes: Sizes
    scale: np.float32
    zero: int
    item: int = 1
    """Bytes of a value; 4 of logits, which are float32."""


@dataclass(frozen=True, slots=True)
class Int8Layer:
    """A layer that computes the tensor `out` from the tensors `inputs`."""

    kind: Kind
    inputs: tuple[int, ...]
    out: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted(Int8Layer):
    """A layer with weights.

    A convolution computes `fold` columns of its output at each of its positions. It has `fold` times as many channels
    as its output.
    """

    weights: NDArray[np.int8]
    """(made, height, width, taken). Of a depthwise convolution: (channels, height, width). Of the logits: (classes, 1,
    1, features)."""
    weight_scale: NDArray[np.float32]
    """One per output channel of the layer itself."""
    bias: NDArray[np.int32]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int] = (0, 0)
    """Rows above and columns to the left."""
    fold: int = 1


@dataclass(frozen=True, slots=True)
class Int8Network:
    """Layers in order of execution. The first pads the image."""

    image: Sizes
    results: tuple[Int8Result, ...]
    rest: bytes | None
    """An ONNX model of the outputs, which takes the results; None if they are the outputs."""
    tensors: tuple[Int8Tensor, ...]
    layers: tuple[Int8Layer, ...]


@dataclass(frozen=True, slots=True)
class _Constant:
    """A dequantised constant with a scale per element of its first axis."""

    value: NDArray[Any]
    scale: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A tensor's quantised values in the sizes and the order that the graph gives them here."""

    tensor: int
    """-1 for the image while its scale is unknown."""
    sizes: Sizes
    channels_first: bool


@dataclass(frozen=True, slots=True)
class _Sum:
    """A layer's sums before they are quantised."""

    layer: Int8Layer
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class _GraphNode:
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]


def read(model: Any) -> Int8Network:
    """The layers of an `onnx.ModelProto`.

    Raises:
        Unsupported: if it is any other network.
    """
    reader = _GraphReader(model.graph)
    ends, behind = _before(model.graph, [output.name for output in model.graph.output], ("QuantizeLinear", "Gemm"))
    _, needed = _before(model.graph, ends, ())
    for node in (model.graph.node[number] for number in sorted(needed)):
        try:
            reader.take(node)
        except Unsupported as error:
            raise Unsupported(f"node {node.name!r} ({node.op_type}): {error}") from None
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise Unsupported(f"node {node.name!r} ({node.op_type}): {error!r}") from error
    return reader.network(model, ends, behind)


def _before(graph: Any, names: Collection[str], last: Collection[str]) -> tuple[list[str], set[int]]:
    """The positions of the nodes that these names depend on, back to nodes of the `last` types, without those; and the
    names at which that ends, of their outputs and of the graph's inputs, in order.
    """
    makers = {name: number for number, node in enumerate(graph.node) for name in node.output}
    seen = {"", *(constant.name for constant in graph.initializer)}
    ends: list[str] = []
    found: set[int] = set()
    wanted = list(names)[::-1]
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in makers or graph.node[makers[name]].op_type in last:
            ends.append(name)
        elif makers[name] not in found:
            found.add(makers[name])
            wanted += graph.node[makers[name]].input
    return ends, found


class _GraphReader:
    def __init__(self, graph: Any) -> None:
        from onnx import TensorProto, helper, numpy_helper

        self._attribute = helper.get_attribute_value
        if any(t.data_location == TensorProto.EXTERNAL for t in graph.initializer):
            raise Unsupported("constants in other files")
        try:
            self._constants: dict[str, NDArray[Any]] = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        except (ValueError, TypeError, KeyError) as error:
            raise Unsupported(f"a constant cannot be read: {error}") from error
        inputs = [value for value in graph.input if value.name not in self._constants]
        if len(inputs) != 1 or not graph.output:
            raise Unsupported(f"{len(inputs)} inputs and {len(graph.output)} outputs; expected one input")
        kind = inputs[0].type.tensor_type
        sizes = tuple(dimension.dim_value for dimension in kind.shape.dim)
        if kind.elem_type != UINT8 or len(sizes) != 4 or min(sizes[1:]) < 1 or sizes[3] != 3:
            raise Unsupported(
                f"an input of element type {kind.elem_type} and sizes {sizes}; expected uint8, (n, h, w, 3)"
            )
        self._image: Sizes = (sizes[1], sizes[2], sizes[3])
        self._tensors: list[Int8Tensor] = []
        self._layers: list[Int8Layer] = []
        self._taken_once: set[int] = set()
        """Tensors that at least one layer reads; their sizes are final."""
        self._known: dict[str, _Constant | _Bytes | _Sum] = {inputs[0].name: _Bytes(-1, self._image, False)}
        self._takes = {
            "Transpose": self._transpose,
            "Reshape": self._reshape,
            "Flatten": self._flatten,
            "DequantizeLinear": self._dequantize,
            "QuantizeLinear": self._quantize,
            "Conv": self._convolve,
            "Add": self._add,
            "GlobalAveragePool": self._average,
            "Gemm": self._dense,
        }

    def take(self, node: Any) -> None:
        """Read the next node."""
        takes = self._takes.get(node.op_type)
        if takes is None or node.domain not in ("", "ai.onnx") or len(node.output) != 1:
            raise Unsupported(f"no layer of an integer network; there are {', '.join(self._takes)}")
        attributes = {a.name: self._attribute(a) for a in node.attribute}
        self._known[node.output[0]] = takes(_GraphNode(tuple(node.input), attributes))

    def network(self, model: Any, names: Sequence[str], behind: set[int]) -> Int8Network:
        """The network that was read, which gives these tensors to the nodes `behind` them."""
        results = [self._result(name) for name in names]
        whole = not behind and all(result.dtype is np.float32 for result in results)
        rest = None if whole else rest_of(model, results, behind)
        return Int8Network(self._image, tuple(results), rest, tuple(self._tensors), tuple(self._layers))

    def _result(self, name: str) -> Int8Result:
        value = self._known.get(name)
        if isinstance(value, _Sum):  # of a fully connected layer
            tensor = self._made(value.layer, value.sizes, np.array(1, np.float32), np.array(0, np.uint8))
            return Int8Result(name, tensor, value.sizes[2:], np.float32)
        if not isinstance(value, _Bytes) or value.tensor < 0:
            raise Unsupported(f"an output depends on {name!r}, and no integer layer lies between them")
        return Int8Result(name, value.tensor, value.sizes, np.uint8)

    # Nodes that move no bytes

    def _transpose(self, node: _GraphNode) -> _Bytes:
        value = self._bytes(node.inputs[0])
        expected = [0, 2, 3, 1] if value.channels_first else [0, 3, 1, 2]
        if list(node.attributes["perm"]) != expected:
            raise Unsupported(f"a transpose by {list(node.attributes['perm'])}; expected {expected}")
        return replace(value, channels_first=not value.channels_first)

    def _reshape(self, node: _GraphNode) -> _Bytes:
        value, wanted = self._bytes(node.inputs[0]), self._constants[node.inputs[1]].tolist()
        height, width, channels = value.sizes
        if value.channels_first or len(wanted) != 4 or wanted[:2] != [0, 0] or wanted[3] != -1 or wanted[2] < 1:
            raise Unsupported(f"a reshape to {wanted}; expected columns to become channels, or back")
        if width * channels % wanted[2] or node.attributes.get("allowzero", 0):
            raise Unsupported(f"{width} x {channels} values in {wanted[2]} columns")
        return replace(value, sizes=(height, wanted[2], width * channels // wanted[2]))

    def _flatten(self, node: _GraphNode) -> _Bytes:
        value = self._bytes(node.inputs[0])
        if value.sizes[:2] != (1, 1) or node.attributes.get("axis", 1) != 1:
            raise Unsupported(f"{value.sizes} are flattened; expected one position")
        return value

    # Scales

    def _dequantize(self, node: _GraphNode) -> _Constant | _Bytes:
        name, scale, zero = node.inputs[0], self._constants[node.inputs[1]], self._constants[node.inputs[2]]
        constant = self._constants.get(name)
        if constant is not None:
            fits = scale.dtype == np.float32 and scale.shape in ((), constant.shape[:1])
            fits = fits and bool(np.isfinite(scale).all() and (scale >= 0).all())
            first_axis = scale.shape == () or node.attributes.get("axis", 1) == 0
            if zero.any() or constant.dtype not in (np.int8, np.int32) or not fits or not first_axis:
                raise Unsupported(f"constant {name!r}: expected int8 or int32, scaled by its first axis, its zero at 0")
            return _Constant(constant, np.broadcast_to(scale, constant.shape[:1]))
        value = self._bytes(name)
        if value.tensor < 0:  # the image becomes a tensor in these sizes
            value = replace(value, tensor=self._made(Int8Layer("pad", (len(self._tensors),)), value.sizes, scale, zero))
        known = self._tensors[value.tensor]
        if known.scale != scale or known.zero != zero:
            raise Unsupported(f"{name!r} is dequantised with another scale than it was quantised with")
        return value

    def _quantize(self, node: _GraphNode) -> _Bytes:
        made = self._known[node.inputs[0]]
        if not isinstance(made, _Sum):
            raise Unsupported(f"{node.inputs[0]!r} is quantised, which no layer made")
        if made.layer.kind == "dense":
            raise Unsupported("a fully connected layer that is not the last")
        scale, zero = self._constants[node.inputs[1]], self._constants[node.inputs[2]]
        self._check_steps(made.layer, scale)
        return _Bytes(self._made(made.layer, made.sizes, scale, zero), made.sizes, True)

    def _check_steps(self, layer: Int8Layer, scale: NDArray[Any]) -> None:
        """Refuse values that overflow an integer when counted in steps of the result."""
        for taken in layer.inputs:
            step = self._tensors[taken].scale
            most = step * layer.weight_scale.max() if isinstance(layer, Weighted) else step / MOST_RATIO
            if not most <= scale:
                raise Unsupported(f"a result in steps of {scale}, of what is in steps of {most}; expected smaller ones")

    def _made(self, layer: Int8Layer, sizes: Sizes, scale: NDArray[Any], zero: NDArray[Any]) -> int:
        """Add a layer. Returns the number of its tensor."""
        if scale.shape or zero.shape or zero.dtype != np.uint8 or scale.dtype != np.float32:
            raise Unsupported(f"activations of {zero.dtype}, scaled by {scale.dtype}; expected uint8, by one float32")
        if len(self._layers) >= MOST_LAYERS or max(sizes[:2]) > MOST_SIDE:
            raise Unsupported(
                f"{sizes} of layer {len(self._layers)}; expected {MOST_SIDE} rows and {MOST_LAYERS} layers"
            )
        if not np.isfinite(scale) or scale <= 0 or sizes[0] * sizes[1] * sizes[2] > MOST_BYTES:
            raise Unsupported(
                f"{sizes} bytes with scale {scale}; expected a positive one, and {MOST_BYTES} bytes at most"
            )
        self._layers.append(replace(layer, out=len(self._tensors)))
        item = 4 if layer.kind == "dense" else 1
        self._tensors.append(Int8Tensor(sizes, np.float32(scale), int(zero), item))
        return len(self._tensors) - 1

    # Layers

    def _convolve(self, node: _GraphNode) -> _Sum:
        value, weights, bias = self._taken(node.inputs[0]), *self._weights(node)
        made, taken, rows, columns = weights.value.shape
        height, width, channels = value.sizes
        top, left, bottom, right = node.attributes.get("pads", [0, 0, 0, 0])
        down, across = node.attributes.get("strides", [1, 1])
        group = node.attributes.get("group", 1)
        if not all(isinstance(number, int) for number in (top, left, bottom, right, down, across)):
            raise Unsupported("padding or steps that are no integers")
        if list(node.attributes.get("dilations", [1, 1])) != [1, 1] or node.attributes.get("auto_pad", b"") not in (
            b"",
            b"NOTSET",
        ):
            raise Unsupported("a dilated convolution, or one whose padding is not stated")
        if (
            not 0 <= min(top, bottom) <= max(top, bottom) < rows
            or not 0 <= min(left, right) <= max(left, right) < columns
        ):
            raise Unsupported(
                f"padding of {top, left, bottom, right} around {rows} x {columns}; expected less than those"
            )
        steps = 1 <= min(down, across) <= max(down, across) <= MOST_STEP
        if not steps or height + top + bottom < rows or width + left + right < columns:
            raise Unsupported(f"windows of {rows} x {columns} in steps of {down, across} of {height} x {width}")
        sizes = (height + top + bottom - rows) // down + 1, (width + left + right - columns) // across + 1, made
        layer = Weighted(
            "convolution",
            (value.tensor,),
            weights=np.ascontiguousarray(weights.value.transpose(0, 2, 3, 1)),
            weight_scale=weights.scale,
            bias=bias,
            strides=(down, across),
            pads=(top, left),
        )
        if group == 1:
            if taken != channels or columns * channels % 4:
                raise Unsupported(f"{columns} x {channels} values in a row of a window; expected a multiple of four")
            return _Sum(layer, sizes)
        if group != channels or taken != 1 or made != channels or channels % 16:
            raise Unsupported(f"{group} groups of {channels} channels; expected one, or one for each of 16 n channels")
        if rows != columns or rows not in (3, 5) or (down, across) not in ((1, 1), (2, 2)):
            raise Unsupported(
                f"depthwise windows of {rows} x {columns} in steps of {down, across}; expected 3 or 5, 1 or 2"
            )
        return _Sum(replace(layer, kind="depthwise", weights=np.ascontiguousarray(weights.value[:, 0])), sizes)

    def _add(self, node: _GraphNode) -> _Sum:
        one, other = self._taken(node.inputs[0]), self._taken(node.inputs[1])
        if one.sizes != other.sizes:
            raise Unsupported(f"{one.sizes} and {other.sizes} are added; expected the same sizes")
        return _Sum(Int8Layer("add", (one.tensor, other.tensor)), one.sizes)

    def _average(self, node: _GraphNode) -> _Sum:
        value = self._taken(node.inputs[0])
        if value.sizes[0] * value.sizes[1] > MOST_AVERAGED:
            raise Unsupported(f"a mean of {value.sizes}; expected {MOST_AVERAGED} positions at most")
        return _Sum(Int8Layer("mean", (value.tensor,)), (1, 1, value.sizes[2]))

    def _dense(self, node: _GraphNode) -> _Sum:
        value, weights, bias = self._taken(node.inputs[0]), *self._weights(node)
        plain = node.attributes.get("alpha", 1.0) == 1.0 and node.attributes.get("beta", 1.0) == 1.0
        if not plain or node.attributes.get("transB", 0) != 1 or node.attributes.get("transA", 0) != 0:
            raise Unsupported("a fully connected layer with factors, or whose weights are not (classes, features)")
        classes, features = weights.value.shape
        if value.sizes != (1, 1, features) or features % 4:
            raise Unsupported(f"{value.sizes} to a fully connected layer of {features}; expected as many, and 4 n")
        flat = weights.value.reshape(classes, 1, 1, features)
        layer = Weighted("dense", (value.tensor,), weights=flat, weight_scale=weights.scale, bias=bias)
        return _Sum(layer, (1, 1, classes))

    # Values by name

    def _bytes(self, name: str) -> _Bytes:
        value = self._known[name]
        if not isinstance(value, _Bytes):
            raise Unsupported(f"{name!r} is not quantised where it must be")
        return value

    def _taken(self, name: str) -> _Bytes:
        """A layer's input. If it is read in other sizes than it was computed in, its layer computes those."""
        value = self._bytes(name)
        if value.tensor < 0 or (not value.channels_first and value.sizes[:2] != (1, 1)):
            raise Unsupported(f"{name!r} has no scale, or its channels come last")
        tensor = self._tensors[value.tensor]
        taken, self._taken_once = value.tensor in self._taken_once, self._taken_once | {value.tensor}
        if tensor.sizes == value.sizes:
            return value
        at = next(number for number, layer in enumerate(self._layers) if layer.out == value.tensor)
        maker, fold = self._layers[at], value.sizes[1] // tensor.sizes[1]
        whole = isinstance(maker, Weighted) and maker.kind == "convolution" and fold * tensor.sizes[1] == value.sizes[1]
        if taken or not whole:
            raise Unsupported(f"{name!r} is seen in sizes {value.sizes}; it was made in {tensor.sizes}")
        assert isinstance(maker, Weighted)
        self._layers[at] = replace(maker, fold=fold)
        self._tensors[value.tensor] = replace(tensor, sizes=value.sizes)
        return value

    def _weights(self, node: _GraphNode) -> tuple[_Constant, NDArray[np.int32]]:
        """A layer's weights, and its bias in steps of its sums."""
        taken = self._tensors[self._taken(node.inputs[0]).tensor]
        weights, bias = self._known[node.inputs[1]], self._known[node.inputs[2]]
        if not isinstance(weights, _Constant) or weights.value.dtype != np.int8:
            raise Unsupported(f"{node.inputs[1]!r} are no int8 weights")
        if not isinstance(bias, _Constant) or bias.value.dtype != np.int32 or bias.value.shape != weights.scale.shape:
            raise Unsupported(f"{node.inputs[2]!r} is no int32 bias of as many as there are outputs")
        if not len(bias.value):
            raise Unsupported(f"{node.inputs[1]!r}: no weights")
        if weights.value[0].size * MOST_PRODUCT + np.abs(bias.value.astype(np.int64)).max() >= 1 << 31:
            raise Unsupported(f"{node.inputs[1]!r}, {node.inputs[2]!r}: sums that may not fit 32 bits")
        if not np.allclose(bias.scale, taken.scale * weights.scale, rtol=BIAS_TOLERANCE, atol=0):
            raise Unsupported(f"{node.inputs[2]!r} has another scale than the sums that it is added to")
        return weights, bias.value
