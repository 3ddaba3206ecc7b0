"""Small ONNX models for tests, made with onnx.helper."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]


def model(
    nodes: list[Any],
    constants: dict[str, Array],
    given: tuple[str, int, list[int | str]],
    *gives: tuple[str, int, list[int | str]],
    opset: int = 17,
) -> bytes:
    """A serialised model of these nodes; inputs and outputs are (name, element type, shape)."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(*given)],
        [helper.make_tensor_value_info(*each) for each in gives],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(made)
    data: bytes = made.SerializeToString()
    return data


def tiny_classifier(
    height: int = 16,
    width: int = 12,
    classes: int = 7,
    batch: int | str = "n",
    element: int = TensorProto.UINT8,
    seed: int = 0,
) -> bytes:
    """Cast, transpose, two convolutions, pooling and a linear layer, with random weights."""
    rng = np.random.default_rng(seed)
    constants: dict[str, Array] = {
        "mean": np.array([120, 110, 100], np.float32).reshape(1, 3, 1, 1),
        "scale": np.array([60], np.float32),
        "w1": rng.normal(0, 0.3, (8, 3, 3, 3)).astype(np.float32),
        "b1": rng.normal(0, 0.3, 8).astype(np.float32),
        "w2": rng.normal(0, 0.3, (8, 1, 3, 3)).astype(np.float32),
        "w3": rng.normal(0, 0.5, (classes, 8)).astype(np.float32),
        "b3": rng.normal(0, 0.3, classes).astype(np.float32),
    }
    nodes = [
        helper.make_node("Cast", ["image"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["f"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node("Sub", ["t", "mean"], ["s"]),
        helper.make_node("Div", ["s", "scale"], ["d"]),
        helper.make_node("Conv", ["d", "w1", "b1"], ["c1"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], group=8),
        helper.make_node("GlobalAveragePool", ["c2"], ["p"]),
        helper.make_node("Flatten", ["p"], ["v"]),
        helper.make_node("Gemm", ["v", "w3", "b3"], ["logits"], transB=1),
    ]
    given: tuple[str, int, list[int | str]] = ("image", element, [batch, height, width, 3])
    return model(nodes, constants, given, ("logits", TensorProto.FLOAT, [batch, classes]))


def tiny_detector(height: int = 16, width: int = 12, classes: int = 3, batch: int | str = "n", seed: int = 0) -> bytes:
    """Four cells of the image, each with a box, a score per class, and these in tenths as whole numbers."""
    rng = np.random.default_rng(seed)
    cell = [height // 2, width // 2]
    constants: dict[str, Array] = {
        "w_boxes": rng.normal(0, 1 / (1000 * cell[0]), (4, 3, *cell)).astype(np.float32),
        "b_boxes": np.array([0.2, 0.15, 0.7, 0.8], np.float32),
        "w_scores": rng.normal(0, 1 / (500 * cell[0]), (classes, 3, *cell)).astype(np.float32),
        "b_scores": np.full(classes, 0.5, np.float32),
        "boxes_shape": np.array([-1, 4, 4], np.int64),
        "scores_shape": np.array([-1, classes, 4], np.int64),
        "zero": np.array(0, np.float32),
        "one": np.array(1, np.float32),
        "ten": np.array([10], np.float32),
    }
    nodes = [
        helper.make_node("Cast", ["image"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["f"], ["t"], perm=[0, 3, 1, 2]),
    ]
    for name in ("boxes", "scores"):
        nodes += [
            helper.make_node("Conv", ["t", f"w_{name}", f"b_{name}"], [f"c_{name}"], kernel_shape=cell, strides=cell),
            helper.make_node("Reshape", [f"c_{name}", f"{name}_shape"], [f"r_{name}"]),
            helper.make_node("Transpose", [f"r_{name}"], [f"l_{name}"], perm=[0, 2, 1]),
            helper.make_node("Clip", [f"l_{name}", "zero", "one"], [name]),
        ]
    nodes += [
        helper.make_node("Mul", ["scores", "ten"], ["m"]),
        helper.make_node("Cast", ["m"], ["tenths"], to=TensorProto.INT64),
    ]
    return model(
        nodes,
        constants,
        ("image", TensorProto.UINT8, [batch, height, width, 3]),
        ("boxes", TensorProto.FLOAT, [batch, 4, 4]),
        ("scores", TensorProto.FLOAT, [batch, 4, classes]),
        ("tenths", TensorProto.INT64, [batch, 4, classes]),
    )
