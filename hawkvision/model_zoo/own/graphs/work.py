"""What a graph computes for one image, counted: the same on every machine, however busy."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx

from hawkvision.model_zoo.own.graphs.graph_facts import attributes_of

_PRODUCTS: Final = ("Gemm", "MatMul", "QLinearMatMul", "MatMulInteger")
_CONVOLUTIONS: Final = ("Conv", "ConvTranspose", "QLinearConv", "ConvInteger")


def multiplications(model: bytes) -> int:
    """Multiplications of all convolutions and matrix products. Where a shape is not known, a layer counts once."""
    graph = onnx.load_from_string(model)
    for size in (value.type.tensor_type.shape.dim[0] for value in graph.graph.input):
        size.dim_value = 1
    inferred = onnx.shape_inference.infer_shapes(graph).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        shapes[value.name] = [size.dim_value or 1 for size in value.type.tensor_type.shape.dim]
    return sum(_of_node(node, shapes) for node in inferred.node)


def _of_node(node: onnx.NodeProto, shapes: dict[str, list[int]]) -> int:
    given = int(np.prod(shapes.get(node.output[0], [1]), dtype=np.int64))
    if node.op_type in _CONVOLUTIONS:
        kernel = shapes.get(node.input[3 if node.op_type == "QLinearConv" else 1], [1])
        if node.op_type == "ConvTranspose":
            taken = int(np.prod(shapes.get(node.input[0], [1]), dtype=np.int64))
            return taken * int(np.prod(kernel[1:], dtype=np.int64))
        return given * int(np.prod(kernel[1:], dtype=np.int64))
    if node.op_type in _PRODUCTS:
        first = shapes.get(node.input[0], [1])
        inner = first[0] if attributes_of(node).get("transA", 0) else first[-1]
        return given * int(inner)
    return 0
