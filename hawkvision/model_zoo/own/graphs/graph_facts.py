"""What an ONNX file says of itself: what it takes in and gives out, and what stands at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from hawkvision.core.errors import ArtifactError

Layout: TypeAlias = Literal["nchw", "nhwc"]

MAX_BYTES: Final = 2**31 - 1
"""Of a model with its weights: what one ONNX file can hold."""
TYPES: Final[Mapping[int, str]] = {
    TensorProto.UINT8: "uint8",
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
}
"""Types of images that graphs may take."""
ACTIVATIONS: Final = ("Softmax", "LogSoftmax", "Sigmoid")
"""Operators at the end of a graph that turn logits into probabilities."""
_TRANSPARENT: Final = ("Identity", "Cast")
_CHANNELS: Final = (1, 3)


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """One output of a graph; None stands for a length that is not fixed."""

    name: str
    shape: tuple[int | None, ...]
    activation: str | None
    """The operator of `ACTIVATIONS` that makes it, if one does."""

    def __str__(self) -> str:
        last = "" if self.activation is None else f", by {self.activation}"
        return f"{self.name!r} {_shape(self.shape)}{last}"


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a graph takes in and gives out; None stands for what it does not say."""

    input: str
    type: str
    """One of `TYPES`."""
    layout: Layout | None
    batch: int | None
    height: int | None
    width: int | None
    channels: int | None
    shape: tuple[int | None, ...]
    outputs: tuple[OutputFacts, ...]

    def __str__(self) -> str:
        layout = "layout unknown" if self.layout is None else self.layout.upper()
        outputs = "; ".join(map(str, self.outputs))
        return f"input {self.input!r} {self.type} {_shape(self.shape)} ({layout}); output {outputs}"

    def sizes(self, layout: Layout) -> tuple[int | None, int | None, int | None]:
        """(height, width, channels) as this layout reads the shape."""
        _, first, second, third = self.shape
        return (second, third, first) if layout == "nchw" else (first, second, third)


def read_model(path: Path, fixed: Mapping[str, Sequence[float]]) -> onnx.ModelProto:
    """An ONNX file with its external weights; inputs named by `fixed` become constants of these values.

    Raises:
        ArtifactError: if it cannot be read, or is no valid model below 2 GB.
    """
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(model)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot read the model: {error.strerror or error}") from None
    except (DecodeError, onnx.checker.ValidationError, ValueError) as error:
        raise ArtifactError(f"{path}: not a valid ONNX model: {str(error).splitlines()[0]}") from None
    if model.ByteSize() > MAX_BYTES:
        raise ArtifactError(f"{path}: {model.ByteSize()} bytes; expected at most {MAX_BYTES}")
    for name, values in fixed.items():
        _fix(model.graph, name, values, str(path))
    return _without_weights_as_inputs(model)


def facts_of(model: onnx.ModelProto, where: str) -> GraphFacts:
    """What a graph says; `where` names it in errors.

    Raises:
        ArtifactError: if it does not take exactly one batch of images.
    """
    inputs = list(model.graph.input)
    if len(inputs) != 1:
        names = ", ".join(f"{each.name!r} {_shape(_dims(each))}" for each in inputs) or "none"
        raise ArtifactError(
            f"{where}: expected one input, found {names}; `--set NAME=VALUES` makes others constant, as in "
            "`--set orig_target_sizes=640,640`"
        )
    shape, kind = _dims(inputs[0]), inputs[0].type.tensor_type.elem_type
    if len(shape) != 4 or kind not in TYPES:
        found = f"{TensorProto.DataType.Name(kind)} {_shape(shape)}"
        raise ArtifactError(
            f"{where}: input {inputs[0].name!r}: expected images, float32, float16 or uint8 of (n, channels, height, "
            f"width) or (n, height, width, channels), found {found}"
        )
    layout = _layout(shape)
    made = {name: node for node in model.graph.node for name in node.output}
    outputs = tuple(OutputFacts(o.name, _dims(o), _activation(made, o.name)) for o in model.graph.output)
    unknown = GraphFacts(inputs[0].name, TYPES[kind], layout, shape[0], None, None, None, shape, outputs)
    if layout is None:
        return unknown
    height, width, channels = unknown.sizes(layout)
    return GraphFacts(inputs[0].name, TYPES[kind], layout, shape[0], height, width, channels, shape, outputs)


def final_activation(model: onnx.ModelProto, output: str) -> onnx.NodeProto | None:
    """The node of `ACTIVATIONS` that makes an output, behind casts at most; a softmax only if over the last axis."""
    return _activation_node({name: node for node in model.graph.node for name in node.output}, output)


def has_integer_layers(model: onnx.ModelProto) -> bool:
    """Whether the graph is quantised, in whole or in part."""
    return any(
        node.op_type in ("DequantizeLinear", "ConvInteger", "MatMulInteger") or node.op_type.startswith("QLinear")
        for node in model.graph.node
    )


def constants_of(graph: onnx.GraphProto) -> dict[str, NDArray[Any]]:
    """The constants of a graph by name: initialisers and `Constant` nodes."""
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and value is not None:
            found[node.output[0]] = numpy_helper.to_array(value)
    return found


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node by name."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _activation(made: Mapping[str, onnx.NodeProto], output: str) -> str | None:
    node = _activation_node(made, output)
    return None if node is None else str(node.op_type)


def _activation_node(made: Mapping[str, onnx.NodeProto], output: str) -> onnx.NodeProto | None:
    node = made.get(output)
    while node is not None and node.op_type in _TRANSPARENT:
        node = made.get(node.input[0])
    if node is None or node.op_type not in ACTIVATIONS:
        return None
    axis = attributes_of(node).get("axis", -1)
    return node if axis in (-1, 1) else None


def _layout(shape: Sequence[int | None]) -> Layout | None:
    first, last = shape[1] in _CHANNELS, shape[3] in _CHANNELS
    if first == last:
        return None
    return "nchw" if first else "nhwc"


def _dims(value: onnx.ValueInfoProto) -> tuple[int | None, ...]:
    sizes = value.type.tensor_type.shape.dim
    return tuple(size.dim_value if size.HasField("dim_value") and size.dim_value > 0 else None for size in sizes)


def _shape(sizes: Sequence[int | None]) -> str:
    return f"({', '.join('any' if size is None else str(size) for size in sizes)})"


def _fix(graph: onnx.GraphProto, name: str, values: Sequence[float], where: str) -> None:
    found = next((each for each in graph.input if each.name == name), None)
    if found is None:
        raise ArtifactError(f"{where}: no input {name!r} to set; there are {', '.join(i.name for i in graph.input)}")
    sizes = [1 if size is None else size for size in _dims(found)]
    if len(values) != int(np.prod(sizes)):
        raise ArtifactError(f"{where}: input {name!r}: expected {int(np.prod(sizes))} values, got {len(values)}")
    kind = helper.tensor_dtype_to_np_dtype(found.type.tensor_type.elem_type)
    graph.initializer.append(numpy_helper.from_array(np.array(values, kind).reshape(sizes), name))
    graph.input.remove(found)


def _without_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Old exporters list weights as inputs with defaults; runtimes then do not take them for constants."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in [each for each in model.graph.input if each.name in weights]:
        model.graph.input.remove(value)
    model.ir_version = max(model.ir_version, 8)
    return model
