"""A `SmallCnn` as the ONNX files that PyTorch and Keras write of such a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from hawkvision.core.types import Pixels
from hawkvision.model_zoo.own.adding import Added, AddOrder, add_model
from hawkvision.model_zoo.own.graphs.owner_facts import OwnerFacts
from hawkvision.models.manifest import artifact_path
from hawkvision.system.onnx_runtime import ort
from tests.hawkvision.model_zoo.own.small_cnn import LABELS, Array, SmallCnn

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def as_torch_takes(pixels: Pixels) -> Array:
    """torchvision's ToTensor and Normalize."""
    scaled = (pixels.astype(np.float32) / np.float32(255) - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def as_keras_takes(pixels: Pixels) -> Array:
    """MobileNet's `preprocess_input`: -1 to 1, channels last."""
    return pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)


class Graph:
    """Collects nodes and constants."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, value: NDArray[Any]) -> str:
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def layers(self, x: str, net: SmallCnn) -> str:
        for at, (kernel, bias) in enumerate(zip(net.kernels, net.biases, strict=True)):
            constants = [self.constant(f"layers.{at}.weight", kernel), self.constant(f"layers.{at}.bias", bias)]
            x = self.node("Conv", [x, *constants], f"conv{at}", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1])
            x = self.node("Relu", [x], f"relu{at}")
            x = self.node("MaxPool", [x], f"pool{at}", kernel_shape=[2, 2], strides=[2, 2])
        return x

    def save(self, path: Any, given: tuple[str, list[Any]], gives: tuple[str, list[Any]]) -> None:
        graph = helper.make_graph(
            self.nodes,
            "main_graph",
            [helper.make_tensor_value_info(given[0], TensorProto.FLOAT, given[1])],
            [helper.make_tensor_value_info(gives[0], TensorProto.FLOAT, gives[1])],
            self.constants,
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


def save_torch_style(net: SmallCnn, path: Any, side: int, batch: int | str = "batch") -> None:
    """NCHW, logits."""
    graph = Graph()
    x = graph.node("Flatten", [graph.layers("input", net)], "flatten", axis=1)
    constants = [graph.constant("fc.weight", net.weight), graph.constant("fc.bias", net.bias)]
    graph.node("Gemm", [x, *constants], "output", transB=1, alpha=1.0, beta=1.0)
    graph.save(path, ("input", [batch, 3, side, side]), ("output", [batch, len(net.bias)]))


def save_keras_style(net: SmallCnn, path: Any, side: int) -> None:
    """NHWC, probabilities, features in the order rows, columns, channels."""
    graph = Graph()
    x = graph.node("Transpose", ["input_1"], "model/conv2d/transpose", perm=[0, 3, 1, 2])
    x = graph.layers(x, net)
    x = graph.node("Transpose", [x], "model/pool/transpose", perm=[0, 2, 3, 1])
    left = side >> len(net.kernels)
    shape = graph.constant("model/flatten/shape", np.array([-1, net.weight.shape[1]], np.int64))
    x = graph.node("Reshape", [x, shape], "model/flatten")
    weight = net.weight.reshape(len(net.bias), -1, left, left).transpose(2, 3, 1, 0).reshape(-1, len(net.bias))
    x = graph.node("MatMul", [x, graph.constant("model/dense/kernel", weight)], "model/dense/matmul")
    x = graph.node("Add", [x, graph.constant("model/dense/bias", net.bias)], "model/dense/add")
    graph.node("Softmax", [x], "dense", axis=-1)
    graph.save(path, ("input_1", ["unk__1", side, side, 3]), ("dense", ["unk__2", len(net.bias)]))


def save_constants(path: Path, tensors: Mapping[str, NDArray[Any]], side: tuple[int, int]) -> None:
    """A graph of `images` that gives the same tensors for each, of which the first axis is 1."""
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        *(helper.make_node("Add", [f"{name} stored", "nothing"], [name]) for name in tensors),
    ]
    constants = [numpy_helper.from_array(each.astype(np.float32), f"{name} stored") for name, each in tensors.items()]
    graph = helper.make_graph(
        nodes,
        "constants",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, *side])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, each.shape) for name, each in tensors.items()],
        [numpy_helper.from_array(np.float32(0), "zero"), *constants],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))


def enter(
    path: Path, facts: OwnerFacts, labels: Sequence[str] | None = LABELS, root: Path | None = None, **more: Any
) -> Added:
    """The stage of a file, entered in the task `shapes` below `root`, which is the file's folder if none is named."""
    root = root or path.parent
    given = None if labels is None else root / "labels.txt"
    if given is not None:
        given.write_text("\n".join(labels or ()) + "\n\n")
    order = AddOrder(path=path, task="shapes", labels=given, facts=facts, **more)
    return add_model(order, root / "models", root / "cache")


def served(root: Path, name: str, pixels: Pixels) -> Array:
    """The logits as the servers run the stage: one image at a time where the graph takes no more."""
    session = ort.InferenceSession(str(artifact_path(root / "cache", "shapes", name)))
    step = session.get_inputs()[0].shape[0]
    step = step if isinstance(step, int) else len(pixels)
    return np.concatenate(
        [session.run(["logits"], {"image": pixels[i : i + step]})[0] for i in range(0, len(pixels), step)]
    )
