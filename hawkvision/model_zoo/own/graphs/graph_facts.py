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

# Reads an owner's ONNX file, and says what else a file is.

MAX_BYTES: Final = 2**31 - 1
"""The largest model with its weights: what one ONNX file can hold."""
_EXPORT: Final = "export it with `torch.onnx.export`"
_OTHERS: Final[Sequence[tuple[int, bytes, str]]] = (
    (0, b"PK\x03\x04", f"a zip archive, such as a checkpoint of PyTorch or Keras; {_EXPORT} or tf2onnx"),
    (0, b"\x80", f"a Python pickle, such as an old checkpoint of PyTorch; {_EXPORT}"),
    (0, b"\x89HDF", "HDF5, as Keras writes; convert it with tf2onnx"),
    (4, b"TFL3", "TensorFlow Lite; convert it with `python -m tf2onnx.convert --tflite FILE`"),
    (0, b"\x89PNG", "an image"),
    (0, b"\xff\xd8\xff", "an image"),
    (0, b"version https://git-lfs", "a pointer of Git LFS; fetch the file with `git lfs pull`"),
    (0, b"<", "a web page or XML"),
)
"""Files that are taken for models: place and bytes of their marks."""
QONNX: Final = ("Quant", "IntQuant", "FloatQuant", "BipolarQuant", "Trunc")
"""Operators of QONNX, which are none of ONNX's."""


def read_model(path: Path, fixed: Mapping[str, Sequence[float]], inner: Sequence[str] = ()) -> onnx.ModelProto:
    """An ONNX file with its external weights.

    Args:
        path: of the file.
        fixed: inputs that become constants of these values.
        inner: tensors that become outputs if they are none.

    Raises:
        ArtifactError: if it cannot be read, or is no valid model below 2 GB.
    """
    where = str(path)
    try:
        head = _head(path)
        model = onnx.load(where)
        _refuse_qonnx(model, where)
        _complete_shapes(model, where)
        onnx.checker.check_model(model)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot read the model: {error.strerror or error}") from None
    except (DecodeError, onnx.checker.ValidationError, ValueError) as error:
        raise ArtifactError(f"{path}: not a valid ONNX model: {_reason(head, error)}") from None
    if model.ByteSize() > MAX_BYTES:
        raise ArtifactError(f"{path}: {model.ByteSize()} bytes; expected at most {MAX_BYTES}")
    for name, values in fixed.items():
        _fix(model.graph, name, values, where)
    for name in inner:
        _expose(model, name, where)
    return _without_weights_as_inputs(model)


def dims(value: onnx.ValueInfoProto) -> tuple[int | None, ...]:
    """The lengths of a tensor's axes; None for those that are not fixed."""
    sizes = value.type.tensor_type.shape.dim
    return tuple(size.dim_value if size.HasField("dim_value") and size.dim_value > 0 else None for size in sizes)


def _refuse_qonnx(model: onnx.ModelProto, where: str) -> None:
    """Raises: ArtifactError for a graph with the quantisers of QONNX, which no runtime has."""
    found = sorted({node.op_type for node in model.graph.node if node.op_type in QONNX})
    if found:
        raise ArtifactError(
            f"{where}: a QONNX graph ({', '.join(found)}); expected ONNX's own operators: export it as QCDQ, or add "
            "the float model and make integers of it with `hawkvision models quantize --precision w8a8`"
        )


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise ArtifactError(f"{path}: not a valid ONNX model: the file is empty")
    return head


def _reason(head: bytes, error: Exception) -> str:
    found = next((what for at, mark, what in _OTHERS if head[at:].startswith(mark)), None)
    if found is not None:
        return f"it is {found}"
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    cut_off = "; the file is cut off, or of another kind" if isinstance(error, DecodeError) else ""
    return f"{said}{cut_off}"


def _complete_shapes(model: onnx.ModelProto, where: str) -> None:
    """Infer the shapes of outputs that state none.

    Raises:
        ArtifactError: naming an input or output whose shape is not known.
    """
    bare = [value for value in model.graph.output if _shapeless(value)]
    if bare:
        inferred = {value.name: value for value in _inferred(model).output}
        for value in bare:
            value.CopyFrom(inferred[value.name])
    for value in (*model.graph.input, *model.graph.output):
        if _shapeless(value):
            raise ArtifactError(
                f"{where}: {value.name!r} states no shape; expected one, of which lengths may be free: export the "
                "model again, or state it with `onnx.tools.update_model_dims`"
            )


def _shapeless(value: onnx.ValueInfoProto) -> bool:
    return value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.HasField("shape")


def _inferred(model: onnx.ModelProto) -> onnx.GraphProto:
    try:
        return onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # noqa: BLE001 - its errors derive from nothing narrower; then nothing is known
        return model.graph


def _expose(model: onnx.ModelProto, name: str, where: str) -> None:
    """Make an inner tensor an output."""
    if any(value.name == name for value in model.graph.output):
        return
    if not any(name in node.output for node in model.graph.node):
        return  # the caller lists what there is
    known = next((value for value in _inferred(model).value_info if value.name == name), None)
    if known is None or _shapeless(known):
        raise ArtifactError(f"{where}: the shape of {name!r} inside the graph is not known; make it an output")
    model.graph.output.append(known)


def _fix(graph: onnx.GraphProto, name: str, values: Sequence[float], where: str) -> None:
    found = next((each for each in graph.input if each.name == name), None)
    if found is None:
        raise ArtifactError(f"{where}: no input {name!r} to set; there are {', '.join(i.name for i in graph.input)}")
    sizes = [1 if size is None else size for size in dims(found)]
    if len(values) != int(np.prod(sizes)):
        raise ArtifactError(f"{where}: input {name!r}: expected {int(np.prod(sizes))} values, got {len(values)}")
    kind: Any = helper.tensor_dtype_to_np_dtype(found.type.tensor_type.elem_type)
    graph.initializer.append(numpy_helper.from_array(np.array(values, kind).reshape(sizes), name))
    graph.input.remove(found)


def _without_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Old exporters list weights as inputs with defaults; runtimes then do not take them for constants."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in [each for each in model.graph.input if each.name in weights]:
        model.graph.input.remove(value)
    model.ir_version = max(model.ir_version, 8)
    return model


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
    """The type of its numbers as ONNX names it; `MAP` and the like for what is no tensor."""
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
    shape: tuple[int | None, ...]
    outputs: tuple[OutputFacts, ...]
    quantised: bool
    """Whether it has integer layers, so that numbers that differ in the last bit may be rounded apart."""
    dynamic: bool
    """Whether ranges are measured over the whole batch, so that images of a batch change one another's numbers."""

    @property
    def batch(self) -> int | None:
        """The number of images."""
        return self.shape[0]

    @property
    def takes_any_size(self) -> bool:
        """Whether height or width is free, in the layout that the shape shows."""
        return self.layout is not None and None in self.sizes(self.layout)[:2]

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
    _check_channels(shape, f"{where}: input {inputs[0].name!r}")
    made = {name: node for node in model.graph.node for name in node.output}
    operators = {node.op_type for node in model.graph.node}
    return GraphFacts(
        inputs[0].name, TYPES[kind], _layout(shape), shape,
        tuple(_output(value, made) for value in model.graph.output),
        has_integer_layers(model), "DynamicQuantizeLinear" in operators,
    )  # fmt: skip


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
