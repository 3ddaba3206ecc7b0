"""What an ONNX file says of itself: what it takes in and gives out, and what stands at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.own.graphs.reading import dims

Layout: TypeAlias = Literal["nchw", "nhwc"]

TYPES: Final[Mapping[int, str]] = {
    TensorProto.UINT8: "uint8",
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
}
"""Types of images that graphs may take."""
ACTIVATIONS: Final = ("Softmax", "LogSoftmax", "Sigmoid")
"""Operators at the end of a graph that turn logits into probabilities."""
SIDES: Final = (8, 4096)
"""Least and largest height and width of an input."""
_FLOATS: Final = ("FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16")
_TRANSPARENT: Final = ("Identity", "Cast")
_CHANNELS: Final = (1, 3)


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """One output of a graph; None stands for a length that is not fixed."""

    name: str
    shape: tuple[int | None, ...]
    activation: str | None
    """The operator of `ACTIVATIONS` that makes it, if one does."""
    type: str
    """Of its numbers, as ONNX names it; `MAP` and the like for what is no tensor."""
    maker: str
    """The operator that gives it."""
    source: str
    """What that operator reads first."""

    @property
    def is_tensor_of_numbers(self) -> bool:
        """Whether it is a tensor of numbers, not of text, a map or a sequence."""
        return self.type in _FLOATS or self.type.startswith(("INT", "UINT", "BOOL"))

    @property
    def is_float(self) -> bool:
        """Whether its numbers may be logits or probabilities, as far as their type says; quantised ones may be too."""
        return self.type in (*_FLOATS, "UINT8", "INT8")

    def __str__(self) -> str:
        kind = "" if self.type == "FLOAT" else f" {self.type.lower()}"
        last = "" if self.activation is None else f", by {self.activation}"
        return f"{self.name!r}{kind} {_shape(self.shape)}{last}"


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
    quantised: bool
    """Whether it has integer layers, so that numbers that differ in the last bit may be rounded apart."""
    dynamic: bool
    """Whether ranges are measured over the whole batch, so that images of a batch change one another's numbers."""

    def __str__(self) -> str:
        layout = "layout unknown" if self.layout is None else self.layout.upper()
        outputs = "; ".join(map(str, self.outputs))
        return f"input {self.input!r} {self.type} {_shape(self.shape)} ({layout}); output {outputs}"

    def sizes(self, layout: Layout) -> tuple[int | None, int | None, int | None]:
        """(height, width, channels) as this layout reads the shape."""
        _, first, second, third = self.shape
        return (second, third, first) if layout == "nchw" else (first, second, third)


def facts_of(model: onnx.ModelProto, where: str) -> GraphFacts:
    """What a graph says; `where` names it in errors.

    Raises:
        ArtifactError: if it does not take exactly one batch of images.
    """
    inputs = list(model.graph.input)
    if len(inputs) != 1:
        names = ", ".join(f"{each.name!r} {_shape(dims(each))}" for each in inputs) or "none"
        raise ArtifactError(
            f"{where}: expected one input, found {names}; `--set NAME=VALUES` makes others constant, as in "
            "`--set orig_target_sizes=640,640`"
        )
    shape, kind = dims(inputs[0]), inputs[0].type.tensor_type.elem_type
    if len(shape) != 4 or kind not in TYPES:
        found = f"{TensorProto.DataType.Name(kind)} {_shape(shape)}"
        raise ArtifactError(
            f"{where}: input {inputs[0].name!r}: expected images, float32, float16 or uint8 of (n, channels, height, "
            f"width) or (n, height, width, channels), found {found}"
        )
    layout = _layout(shape)
    _check_channels(shape, f"{where}: input {inputs[0].name!r}")
    made = {name: node for node in model.graph.node for name in node.output}
    operators = {node.op_type for node in model.graph.node}
    facts = GraphFacts(
        inputs[0].name, TYPES[kind], layout, shape[0], None, None, None, shape,
        tuple(_output(value, made) for value in model.graph.output),
        has_integer_layers(model), "DynamicQuantizeLinear" in operators,
    )  # fmt: skip
    if layout is None:
        return facts
    height, width, channels = facts.sizes(layout)
    return replace(facts, height=height, width=width, channels=channels)


def _check_channels(shape: Sequence[int | None], where: str) -> None:
    """Raises: ArtifactError if neither axis of channels can have 1 or 3."""
    if all(size is not None and size not in _CHANNELS for size in (shape[1], shape[3])):
        raise ArtifactError(f"{where}: expected images of 1 or 3 channels, found {_shape(shape)}")


def _output(value: onnx.ValueInfoProto, made: Mapping[str, onnx.NodeProto]) -> OutputFacts:
    kind = str(value.type.WhichOneof("value")).removesuffix("_type").upper()
    if kind == "TENSOR":
        kind = str(TensorProto.DataType.Name(value.type.tensor_type.elem_type))
    maker = made.get(value.name)
    while maker is not None and maker.op_type in _TRANSPARENT and maker.input[0] in made:
        maker = made[maker.input[0]]
    source = "" if maker is None or not maker.input else str(maker.input[0])
    name = "" if maker is None else str(maker.op_type)
    return OutputFacts(value.name, dims(value), _activation(made, value.name), kind, name, source)


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


def _shape(sizes: Sequence[int | None]) -> str:
    return f"({', '.join('any' if size is None else str(size) for size in sizes)})"
