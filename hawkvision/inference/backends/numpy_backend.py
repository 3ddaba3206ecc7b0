"""The reference backend: a variant's ONNX graph interpreted node by node in NumPy.

It exists to be right and to be read: other backends are held against it, and it runs wherever NumPy does. It is about
ten times slower than ONNX Runtime (MobileNetV2: 91 against 9 ms). Needs the `onnx` package (extra `[build]`) to read
the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backends.interface import Outputs, as_tensors, check_batch, check_open, joined, named
from hawkvision.inference.backends.numpy_ops import DTYPES, OPERATORS, Operator, Tensor


@dataclass(frozen=True, slots=True)
class _Value:
    """A graph input or output: its name, `TensorProto` element type, and sizes, None where free."""

    name: str
    element: int
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _NumpyNode:
    """One operation; an empty input name is an optional input left out."""

    label: str
    operator: Operator
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, Any]


class NumpyGraph:
    """An ONNX graph of one input.

    Raises:
        BackendError: if `onnx` is not installed, the model cannot be read, or it uses an operator, attribute or tensor
            type that is not implemented; the message names the node.
    """

    def __init__(self, model: Path | bytes) -> None:
        self.where = "model" if isinstance(model, bytes) else str(model)
        graph = _read(model, self.where)
        onnx = _onnx()
        self._constants: dict[str, Tensor] = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        inputs = [value for value in graph.input if value.name not in self._constants]
        if len(inputs) != 1 or not graph.output:
            raise BackendError(
                f"{self.where}: {len(inputs)} inputs and {len(graph.output)} outputs; expected one input"
            )
        self.input, self.outputs = _value(inputs[0]), tuple(map(_value, graph.output))
        self._nodes = tuple(_node(node, self.where, onnx) for node in graph.node)
        known = {"", self.input.name, *self._constants}
        for node in self._nodes:
            unknown = [name for name in node.inputs if name not in known]
            if unknown:
                raise BackendError(f"{self.where}: {node.label}: input {unknown[0]!r} is not computed before it")
            known.add(node.output)
        for output in self.outputs:
            if output.name not in known:
                raise BackendError(f"{self.where}: nothing computes the output {output.name!r}")

    def run(self, value: Tensor) -> list[Tensor]:
        """The outputs for one input.

        Raises:
            BackendError: if a node cannot be computed, naming it.
        """
        values: dict[str, Tensor | None] = {"": None, **self._constants, self.input.name: value}
        for node in self._nodes:
            try:
                values[node.output] = node.operator.compute([values[i] for i in node.inputs], node.attributes)
            except (ValueError, TypeError, IndexError, KeyError) as error:
                raise BackendError(f"{self.where}: {node.label}: {error}") from error
        found = [values[output.name] for output in self.outputs]
        return [tensor for tensor in found if tensor is not None]


class NumpyBackend:
    """A `Backend` over `NumpyGraph`. Images are run one by one, which bounds memory and makes rows independent."""

    def __init__(self, model: Path | bytes) -> None:
        graph = NumpyGraph(model)
        taken = graph.input
        if (
            taken.element != 2
            or len(taken.shape) != 4
            or taken.shape[0] not in (None, 1)
            or None in taken.shape[1:]
            or taken.shape[3] != 3
        ):
            raise BackendError(
                f"{graph.where}: input {taken.name!r} has element type {taken.element} and shape {taken.shape}; "
                "expected uint8 (2) of (n or 1, height, width, 3)"
            )
        for given in graph.outputs:
            if given.element not in DTYPES or not given.shape:
                raise BackendError(
                    f"{graph.where}: output {given.name!r} has element type {given.element} and shape {given.shape}; "
                    "expected numbers of (n, ...)"
                )
        self._graph: NumpyGraph | None = graph
        self._shape = (taken.shape[1] or 0, taken.shape[2] or 0, 3)
        self._outputs = named([(each.name, each.shape[1:]) for each in graph.outputs])

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """See `Backend.input_shape`."""
        return self._shape

    @property
    def outputs(self) -> Outputs:
        """See `Backend.outputs`."""
        return self._outputs

    def infer(self, batch: Pixels) -> Tensors:
        """See `Backend.infer`."""
        graph = self._graph
        check_open("NumPy", graph is None)
        assert graph is not None
        check_batch(batch, self._shape)
        runs = (graph.run(batch[i : i + 1]) for i in range(len(batch)))
        return joined([as_tensors(self._outputs, found, 1, graph.where) for found in runs])

    def close(self) -> None:
        """See `Backend.close`."""
        self._graph = None


def _onnx() -> Any:
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError:
        raise BackendError(
            "the NumPy backend reads models with the package `onnx`, which is not installed; "
            "install hawkvision[build], or use backend = 'onnxruntime'"
        ) from None
    return onnx


def _read(model: Path | bytes, where: str) -> Any:
    onnx = _onnx()
    from google.protobuf import message as google_message  # what onnx itself is built on

    try:
        data = model if isinstance(model, bytes) else model.read_bytes()
    except OSError as error:
        raise BackendError(f"{where}: {error.strerror}") from None
    try:
        graph = onnx.load_model_from_string(data).graph
    except google_message.DecodeError as error:
        raise BackendError(f"{where}: not an ONNX model: {error}") from None
    if not graph.node:
        raise BackendError(f"{where}: not an ONNX model: it has no nodes")
    return graph


def _value(info: Any) -> _Value:
    tensor = info.type.tensor_type
    shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    return _Value(info.name, tensor.elem_type, shape)


def _node(node: Any, where: str, onnx: Any) -> _NumpyNode:
    label = f"node {node.name or node.output[0]!r} ({node.op_type})"
    operator = OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if operator is None:
        raise BackendError(f"{where}: {label}: the operator is not implemented; there are {', '.join(OPERATORS)}")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    unknown = sorted(set(attributes) - operator.attributes)
    if unknown:
        raise BackendError(f"{where}: {label}: the attribute {unknown[0]!r} is not implemented")
    if attributes.get("to", 1) not in DTYPES:
        raise BackendError(f"{where}: {label}: element type {attributes['to']} is not implemented")
    if len(node.output) != 1:
        raise BackendError(f"{where}: {label}: {len(node.output)} outputs; only one is implemented")
    return _NumpyNode(label, operator, tuple(node.input), node.output[0], attributes)
