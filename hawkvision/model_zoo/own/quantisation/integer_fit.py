"""Which layers of a float graph have an integer form (`hawkvision.integer.ir`), judged one by one.

Every layer that has none is named with the reason, so that an owner sees at once what to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from hawkvision.core.types import LOGITS
from hawkvision.integer.nodes import MAX_CHANNELS, MAX_KERNEL, MAX_SIDE, MAX_WEIGHTS
from hawkvision.model_zoo.own.graphs.conversion import IMAGE
from hawkvision.model_zoo.own.graphs.graph_facts import attributes_of, constants_of

LAYERS: Final = ("Conv", "Gemm", "MatMul")
PASSIVE: Final = ("Cast", "Identity", "Dropout")
ARITHMETIC: Final = ("Add", "Sub", "Mul", "Div", "Gather")
"""Operators that prepare pixels, before the first layer."""
_BEFORE_RELU: Final = ("Add", "BatchNormalization", "MaxPool", *PASSIVE)
_KNOWN: Final = (
    "Transpose", "Relu", "Clip", "MaxPool", "BatchNormalization", "GlobalAveragePool", "ReduceMean", "Flatten",
    "Reshape", "Squeeze", "Constant",
)  # fmt: skip


class GraphView:
    """A graph by the serving contract, with its constants and who makes and reads each value."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.constants: Mapping[str, NDArray[Any]] = constants_of(model.graph)
        self.nodes: Sequence[onnx.NodeProto] = [n for n in model.graph.node if n.op_type != "Constant"]
        self.made = {name: node for node in self.nodes for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(node)
        sizes = model.graph.input[0].type.tensor_type.shape.dim
        self.height, self.width = int(sizes[1].dim_value), int(sizes[2].dim_value)
        self.outputs = [value.name for value in model.graph.output]
        self.pixels = self._pixels()

    def constant(self, name: str) -> NDArray[Any] | None:
        """The constant of that name, None if it is none."""
        return self.constants.get(name)

    def operands(self, node: onnx.NodeProto) -> tuple[list[str], list[NDArray[Any]]]:
        """The computed inputs of a node, and the constant ones."""
        computed = [name for name in node.input if name and name not in self.constants]
        return computed, [self.constants[name] for name in node.input if name in self.constants]

    def kernel(self, node: onnx.NodeProto) -> NDArray[Any] | None:
        """The weights of a layer."""
        return self.constant(node.input[1]) if len(node.input) > 1 else None

    def _pixels(self) -> set[str]:
        """Values that are pixels still: before any layer."""
        found = {IMAGE}
        for node in self.nodes:
            prepares = node.op_type in (*PASSIVE, *ARITHMETIC, "Transpose")
            if prepares and self.operands(node)[0] and set(self.operands(node)[0]) <= found:
                found |= set(node.output)
        return found


def misfits(model: onnx.ModelProto) -> list[str]:
    """What keeps a graph from an integer form, one line a layer; empty if nothing does."""
    view = GraphView(model)
    found = [f"the image: {line}" for line in _of_the_input(view)]
    for node in view.nodes:
        reason = _reason(view, node)
        if reason is not None:
            found.append(f"{node.op_type} {_name(node)}: {reason}")
    weights = sum(kernel.size for node in view.nodes if (kernel := _layer_kernel(view, node)) is not None)
    if weights > MAX_WEIGHTS:
        found.append(f"the whole: {weights:,} weights; expected at most {MAX_WEIGHTS:,}")
    if view.outputs != [LOGITS]:
        found.append(f"the outputs: expected logits only, found {', '.join(view.outputs)}")
    return found


def _of_the_input(view: GraphView) -> list[str]:
    found = []
    if view.height != view.width:
        found.append(f"expected a square input, got {view.height}x{view.width}")
    if max(view.height, view.width) > MAX_SIDE:
        found.append(f"expected at most {MAX_SIDE} pixels a side, got {max(view.height, view.width)}")
    return found


def _reason(view: GraphView, node: onnx.NodeProto) -> str | None:
    """Why a node has no integer form; None if it has one."""
    computed, constants = view.operands(node)
    if node.op_type in ARITHMETIC:
        return _reason_of_arithmetic(view, node, computed, constants)
    readers = [n for name in node.output for n in view.readers.get(name, [])]
    if len(readers) > 1:
        names = ", ".join(_name(each) for each in readers)
        return f"is read by {names}; expected a chain, without branches"
    if node.op_type in LAYERS:
        return _reason_of_layer(view, node)
    if node.op_type == "MaxPool":
        return _reason_of_pool(node)
    if node.op_type == "Clip":
        return _reason_of_clip(view, node)
    if node.op_type in ("GlobalAveragePool", "ReduceMean"):
        return _reason_of_average(view, node)
    if node.op_type not in (*_KNOWN, *PASSIVE):
        return "has no integer form; layers are convolutions and linear ones with ReLU, and maxima of 2x2"
    return None


def _reason_of_arithmetic(
    view: GraphView, node: onnx.NodeProto, computed: Sequence[str], constants: Sequence[NDArray[Any]]
) -> str | None:
    if len(computed) != 1 or len(constants) != 1:
        return "joins branches; expected a chain of layers"
    if computed[0] in view.pixels:
        return None
    maker = view.made.get(computed[0])
    if node.op_type == "Add" and maker is not None and maker.op_type in LAYERS:
        return None
    return "arithmetic between layers; only a bias may be added behind one"


def _reason_of_layer(view: GraphView, node: onnx.NodeProto) -> str | None:
    kernel = view.kernel(node)
    how = attributes_of(node)
    if kernel is None:
        return "its weights are computed, not constant"
    if node.op_type == "Conv":
        refused = _reason_of_convolution(kernel, how)
        if refused is not None:
            return refused
    elif kernel.ndim != 2 or how.get("alpha", 1.0) != 1.0 or how.get("beta", 1.0) != 1.0 or how.get("transA", 0):
        return "expected a plain matrix product with weights of two dimensions"
    if max(kernel.shape[:2]) > MAX_CHANNELS and node.op_type == "Conv":
        return f"expected at most {MAX_CHANNELS} channels, got {max(kernel.shape[:2])}"
    after = _after(view, node)
    if after is not None and after.op_type not in ("Relu", "Clip"):
        return f"is followed by {after.op_type} {_name(after)}; every layer but the last ends in a ReLU"
    return None


def _reason_of_convolution(kernel: NDArray[Any], how: Mapping[str, Any]) -> str | None:
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3] or kernel.shape[2] > MAX_KERNEL:
        return f"expected square kernels of at most {MAX_KERNEL}, got {'x'.join(map(str, kernel.shape[2:]))}"
    groups = how.get("group", 1)
    if groups != 1:
        what = "depthwise" if kernel.shape[1] == 1 else "grouped"
        return f"is {what} (group {groups}); expected group 1"
    if list(how.get("strides", [1, 1])) != [1, 1]:
        return f"strides {how['strides']}; expected 1, with a maximum of 2x2 behind it"
    if list(how.get("dilations", [1, 1])) != [1, 1]:
        return f"dilations {how['dilations']}; expected 1"
    pads = padding(how, int(kernel.shape[2]))
    if pads is None:
        found = how.get("pads", how.get("auto_pad"))
        return f"pads {found}; expected four equal ones, less than the kernel's {kernel.shape[2]}"
    return None


def padding(how: Mapping[str, Any], kernel: int) -> int | None:
    """The pixels that a convolution of stride 1 pads on each side; None if the sides differ."""
    auto = how.get("auto_pad", b"NOTSET")
    if auto in (b"SAME_UPPER", b"SAME_LOWER"):
        return kernel // 2 if kernel % 2 else None
    pads = set(how.get("pads", [0])) if auto == b"NOTSET" else {0}
    return int(pads.pop()) if len(pads) == 1 and 0 <= min(pads) < kernel else None


def _reason_of_pool(node: onnx.NodeProto) -> str | None:
    how = attributes_of(node)
    plain = list(how.get("kernel_shape", [])) == [2, 2] and list(how.get("strides", [1, 1])) == [2, 2]
    if not plain or any(how.get("pads", [])) or how.get("ceil_mode", 0) or len(node.output) != 1:
        return f"kernel {how.get('kernel_shape')}, strides {how.get('strides')}; expected 2x2 by strides of 2, unpadded"
    return None


def _reason_of_clip(view: GraphView, node: onnx.NodeProto) -> str | None:
    low, high = limits_of(view, node)
    return None if low == 0 and high > 0 else f"limits {low:g} to {high:g}; expected a lower limit of 0, as ReLU6 has"


def limits_of(view: GraphView, node: onnx.NodeProto) -> tuple[float, float]:
    """The limits of a `Clip`."""
    how = attributes_of(node)
    found = [float(how.get("min", -np.inf)), float(how.get("max", np.inf))]
    for at, name in enumerate(node.input[1:3]):
        value = view.constant(name)
        if value is not None:
            found[at] = float(value.reshape(()))
    return found[0], found[1]


def _reason_of_average(view: GraphView, node: onnx.NodeProto) -> str | None:
    after: onnx.NodeProto | None = node
    while after is not None:
        after = _next(view, after)
        if after is None or after.op_type in ("Gemm", "MatMul"):
            return None
        if after.op_type not in ("Flatten", "Reshape", "Squeeze", "Transpose", *PASSIVE):
            return (
                f"is followed by {after.op_type} {_name(after)}; an average is taken only before the last linear layer"
            )
    return None


def _after(view: GraphView, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The first node behind a layer that is neither its bias nor moves its values; None at the end."""
    found = _next(view, node)
    while found is not None and found.op_type in _BEFORE_RELU:
        if found.op_type == "Add" and len(view.operands(found)[0]) != 1:
            return found
        found = _next(view, found)
    return found


def _next(view: GraphView, node: onnx.NodeProto) -> onnx.NodeProto | None:
    readers = view.readers.get(node.output[0], [])
    return readers[0] if readers else None


def _layer_kernel(view: GraphView, node: onnx.NodeProto) -> NDArray[Any] | None:
    return view.kernel(node) if node.op_type in LAYERS else None


def _name(node: onnx.NodeProto) -> str:
    return repr(str(node.name or node.output[0]))
