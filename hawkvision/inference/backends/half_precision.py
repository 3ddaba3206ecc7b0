"""Half precision: a float model's layers in float16, for GPUs, where they take about half the time and memory.

Everything from the first layer with weights on is float16: weights, activations and constants. What comes before it
reads pixels and stays float32, because means and pixel values would lose digits. Casts stand at both borders, so inputs
and outputs are those of the model file. A processor without arithmetic for float16 computes in float32 and rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hawkvision.core.errors import BackendError

FP16: Final = "fp16"
"""The precision in fingerprints. Change the word when this module computes other numbers from the same model file."""
LARGEST: Final = float(np.finfo(np.float16).max)
_WEIGHTED: Final = frozenset({"Conv", "Gemm", "MatMul"})
# fmt: off
_OTHERS: Final = frozenset({
    "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Div", "Dropout", "Erf", "Flatten",
    "GlobalAveragePool", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "MaxPool", "Mul", "Pad", "ReduceMean",
    "Relu", "Reshape", "Sigmoid", "Slice", "Softmax", "Split", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze",
})
# fmt: on
"""Operators that take float16 in every place where they take float32."""


def in_half_precision(model: bytes, where: str) -> bytes:
    """The model file with layers in float16; the same bytes every time.

    Raises:
        BackendError: if it is no model file, is not float32, has an operator or a weight that float16 does not have, or
            the package `onnx` is missing. `where` names the model.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ModuleNotFoundError as error:
        raise BackendError(
            f"{where}: the package {error.name}, which half precision needs, is missing: "
            "in a checkout, pip install '.[gpu]'"
        ) from None
    try:
        found = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
    except (DecodeError, ValueError, RuntimeError) as error:
        raise BackendError(f"{where}: no model file: {error}") from None
    made = _Halving(onnx, found.graph, where).graph()
    result = onnx.helper.make_model(
        made, opset_imports=list(found.opset_import), ir_version=found.ir_version, producer_name="hawkvision.half"
    )
    data: bytes = result.SerializeToString(deterministic=True)
    return data


class _Halving:
    """One pass over a graph; `_halves` maps each float tensor that was met to its float16 counterpart."""

    def __init__(self, onnx: Any, graph: Any, where: str) -> None:
        self._onnx, self._graph, self._where = onnx, graph, where
        self._constants: Mapping[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
        kinds |= {name: tensor.data_type for name, tensor in self._constants.items()}
        self._floats = {name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT}
        self._halves: dict[str, str] = {}
        self._nodes: list[Any] = []
        self._halved: list[Any] = []

    def graph(self) -> Any:
        """The graph in float16.

        Raises:
            BackendError: as `in_half_precision`.
        """
        for node in self._graph.node:
            if node.op_type in _WEIGHTED or any(name in self._halves for name in node.input):
                self._add_half(node)
            else:
                self._nodes.append(node)
        if not self._halves:
            raise BackendError(f"{self._where}: half precision is for float models; this one has no float32 layer")
        for output in self._graph.output:
            if output.name in self._halves:
                self._cast(self._halves[output.name], output.name, self._onnx.TensorProto.FLOAT)
        read = {name for node in self._nodes for name in node.input}
        kept = [tensor for name, tensor in self._constants.items() if name in read]
        graph, helper = self._graph, self._onnx.helper
        return helper.make_graph(self._nodes, graph.name, graph.input, graph.output, [*kept, *self._halved])

    def _add_half(self, node: Any) -> None:
        if node.op_type not in _WEIGHTED | _OTHERS:
            raise BackendError(
                f"{self._where}: node {node.name or node.output[0]!r}: half precision is for float models; it does not "
                f"know the operator {node.op_type}"
            )
        inputs = [self._half(name) if name in self._floats else name for name in node.input]
        outputs = [self._new(name) if name in self._floats else name for name in node.output]
        copy = self._onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.input[:], copy.output[:]
        copy.input.extend(inputs)
        copy.output.extend(outputs)
        self._nodes.append(copy)

    def _half(self, name: str) -> str:
        """The float16 counterpart of a float tensor, made if it is a constant or comes from before the first layer."""
        if name in self._halves:
            return self._halves[name]
        if name not in self._constants:
            self._cast(name, self._new(name), self._onnx.TensorProto.FLOAT16)
            return self._halves[name]
        values = self._onnx.numpy_helper.to_array(self._constants[name])
        largest = float(np.abs(values).max(initial=0.0))
        if not largest <= LARGEST:
            raise BackendError(
                f"{self._where}: constant {name!r} goes to {largest:.4g}; half precision holds {LARGEST:.0f} at most"
            )
        self._halved.append(self._onnx.numpy_helper.from_array(values.astype(np.float16), self._new(name)))
        return self._halves[name]

    def _new(self, name: str) -> str:
        self._halves[name] = f"{name}.{FP16}"
        return self._halves[name]

    def _cast(self, source: str, target: str, to: int) -> None:
        self._nodes.append(self._onnx.helper.make_node("Cast", [source], [target], name=f"{target}.cast", to=to))
