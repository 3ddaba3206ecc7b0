"""Writes what follows the integer layers of a graph, operations on real numbers, as an ONNX model of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Int8Result:
    """A tensor that integer layers give: float32 (classes,), or uint8 (height, width, channels)."""

    name: str
    tensor: int
    shape: tuple[int, ...]
    dtype: type[np.float32 | np.uint8]


def rest_of(model: Any, results: Sequence[Int8Result], behind: Collection[int]) -> bytes:
    """The ONNX model of some nodes of an `onnx.ModelProto`, by their positions; its inputs are `results`, in order."""
    from onnx import TensorProto, helper

    inputs, nodes = [], []
    for result in results:
        logits = result.dtype is np.float32
        name = result.name if logits else f"{result.name}/rows"
        kind = TensorProto.FLOAT if logits else TensorProto.UINT8
        inputs.append(helper.make_tensor_value_info(name, kind, ["n", *result.shape]))
        if not logits:
            nodes.append(helper.make_node("Transpose", [name], [result.name], perm=[0, 3, 1, 2]))
    nodes += [model.graph.node[number] for number in sorted(behind)]
    taken = {name for node in nodes for name in node.input}
    constants = [tensor for tensor in model.graph.initializer if tensor.name in taken]
    graph = helper.make_graph(nodes, "rest", inputs, model.graph.output, constants)
    rest = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    _gather_rows(rest)
    written: bytes = rest.SerializeToString()
    return written


def _gather_rows(model: Any) -> None:
    """Let each `Gather` by a list take whole rows, between two transposes: a fifth of the time, because ONNX Runtime
    copies values one by one if it gathers along the last axis.
    """
    from onnx import helper, shape_inference

    try:
        inferred = shape_inference.infer_shapes(model).graph
    except shape_inference.InferenceError:  # ONNX Runtime says what is wrong with the model
        return
    ranks = {each.name: len(each.type.tensor_type.shape.dim) for each in inferred.value_info}
    lists = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 1}
    nodes = []
    for node in model.graph.node:
        axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
        if node.op_type != "Gather" or node.input[1] not in lists or not 0 < axis < ranks.get(node.input[0], 0):
            nodes.append(node)
            continue
        name, others = node.output[0], [other for other in range(ranks[node.input[0]]) if other != axis]
        back = [0 if other == axis else 1 + others.index(other) for other in range(len(others) + 1)]
        nodes += [
            helper.make_node("Transpose", [node.input[0]], [f"{name}/rows"], perm=[axis, *others]),
            helper.make_node("Gather", [f"{name}/rows", node.input[1]], [f"{name}/gathered"], axis=0),
            helper.make_node("Transpose", [f"{name}/gathered"], [name], perm=back),
        ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
