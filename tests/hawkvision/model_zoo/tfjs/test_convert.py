from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.tfjs.convert import convert
from hawkvision.model_zoo.tfjs.graph import read_model
from hawkvision.model_zoo.tfjs.operations import BATCH, Tensor
from hawkvision.models.onnx_layers import GraphBuilder
from hawkvision.system.onnx_runtime import ort
from tests.fuzz.examples import examples
from tests.hawkvision.model_zoo.tfjs.tfjs_files import (
    conv_attributes,
    integers,
    model_files,
    node,
    reference,
    texts,
)

SIZE = 8
STD = (50.0, 60.0, 70.0)
Nodes = Sequence[Mapping[str, Any]]
Weights = dict[str, NDArray[Any]]


def converted(nodes: Nodes, weights: Weights, outputs: Sequence[str], size: int = SIZE) -> onnx.ModelProto:
    files = model_files(nodes, weights)
    builder = GraphBuilder("test")
    pixels = Tensor(builder.pixels((0.0, 0.0, 0.0)), (BATCH, size, size, 3), planar=True)
    graph = read_model(files["model.json"], files, "file")
    made = convert(graph, builder, outputs, {"image": pixels}, STD, "file")
    named = {builder.node("Identity", [each.name], f"out{i}"): tuple(each.shape[1:]) for i, each in enumerate(made)}
    return builder.model_of(size, size, named)


def check(nodes: Nodes, weights: Weights, *outputs: str, size: int = SIZE) -> onnx.ModelProto:
    """The converted graph, after comparing its results for two images with TensorFlow's."""
    model = converted(nodes, weights, outputs, size)
    images = np.random.default_rng(1).integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = reference(nodes, {**weights, "image": images.astype(np.float32) / np.array(STD, np.float32)})
    for name, found in zip(outputs, session.run(None, {"image": images}), strict=True):
        np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-4)
    return model


def kernel(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype(np.float32)


def operations(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


@settings(deadline=None, max_examples=examples(125))
@given(
    st.integers(8, 11), st.sampled_from([1, 3, 5]), st.integers(1, 2), st.sampled_from(["SAME", "VALID"]), st.booleans()
)
def test_convolutions_pad_as_tensorflow_does(size: int, width: int, stride: int, padding: str, old: bool) -> None:
    attributes = conv_attributes(stride, padding, old)
    nodes = [
        node("a", "Conv2D", "image", "k", **attributes),
        node("b", "DepthwiseConv2dNative", "image", "d", **attributes),
    ]
    check(nodes, {"k": kernel(width, width, 3, 4), "d": kernel(width, width, 3, 1)}, "a", "b", size=size)


def test_what_is_linear_in_each_channel_is_folded_into_the_convolution() -> None:
    statistics = {name: np.abs(kernel(4, seed=i)) + 0.1 for i, name in enumerate(("gamma", "beta", "mean", "var"))}
    nodes = [
        node("a", "Conv2D", "image", "k", **conv_attributes()),
        node("b", "FusedBatchNorm", "a", *statistics, epsilon={"f": 0.001}),
        node("c", "Mul", "half", "b"),
        node("d", "BiasAdd", "c", "beta"),
        node("e", "Relu6", "d"),
    ]
    weights: Weights = {"k": kernel(3, 3, 3, 4), "half": np.array(0.5, np.float32), **statistics}
    assert set(operations(check(nodes, weights, "e"))) == {"Cast", "Transpose", "Sub", "Conv", "Clip", "Identity"}
    assert operations(converted(nodes, weights, ["e"])).count("Conv") == 1


def test_convolution_with_two_users_is_computed_once() -> None:
    nodes = [
        node("a", "Conv2D", "image", "k", **conv_attributes()),
        node("b", "Mul", "a", "half"),
        node("c", "Add", "a", "half"),
        node("d", "Mul", "b", "c"),
    ]
    weights = {"k": kernel(3, 3, 3, 4), "half": np.array(0.5, np.float32)}
    assert operations(check(nodes, weights, "d")).count("Conv") == 1


def test_bias_behind_a_residual_sum_is_folded_as_well() -> None:
    nodes = [
        node("a", "_FusedConv2D", "image", "k", "bias", **conv_attributes(), fused_ops=texts("BiasAdd", "Relu")),
        node("b", "Conv2D", "a", "k2", **conv_attributes()),
        node("c", "AddN", "b", "a"),
        node("d", "Add", "c", "bias"),
        node("e", "Mul", "d", "bias"),
    ]
    weights = {"k": kernel(3, 3, 3, 4), "k2": kernel(1, 1, 4, 4, seed=1), "bias": kernel(4, seed=2)}
    model = check(nodes, weights, "e")
    assert operations(model).count("Add") == 1
    check(nodes, weights, "d", "a")


JOINED = [
    node("a", "Conv2D", "image", "k", **conv_attributes(2)),
    node("b", "Sigmoid", "a"),
    node("c", "Mean", "b", "positions", keep_dims={"b": True}),
    node("d", "Mul", "b", "c"),
    node("e", "ResizeBilinear", "d", "size"),
    node("f", "FusedDepthwiseConv2dNative", "image", "dw", "bias", **conv_attributes(), fused_ops=texts("BiasAdd")),
    node("g", "Identity", "f"),
    node("h", "Conv2D", "g", "up", **conv_attributes(1, "VALID")),
    node("i", "ConcatV2", "e", "h", "axis"),
    node("j", "Relu", "i"),
]
JOINED_WEIGHTS: Weights = {
    "k": kernel(3, 3, 3, 4),
    "positions": np.array([1, 2], np.int32),
    "size": np.array([8, 8], np.int32),
    "dw": kernel(3, 3, 3, 1),
    "bias": kernel(3),
    "up": kernel(1, 1, 3, 2),
    "axis": np.array(3, np.int32),
}
SHAPED = [
    node("a", "Conv2D", "image", "k", **conv_attributes(3)),
    node("b", "Shape", "a"),
    node("c", "StridedSlice", "b", "zero", "one", "one", shrink_axis_mask={"i": "1"}),
    node("d", "Pack", "c", "nine", "single", "four"),
    node("e", "Reshape", "a", "d"),
    node("f", "ConcatV2", "e", "e", "axis"),
    node("g", "Squeeze", "f", squeeze_dims=integers(2)),
]
SHAPED_WEIGHTS: Weights = {
    **{name: np.array(n, np.int32) for name, n in {"nine": 9, "single": 1, "four": 4, "axis": 1}.items()},
    "k": kernel(1, 1, 3, 4),
    "zero": np.zeros(1, np.int32),
    "one": np.ones(1, np.int32),
}


def test_squeeze_and_excitation_resizing_and_joining() -> None:
    check(JOINED, JOINED_WEIGHTS, "j", "e")


def test_shapes_that_follow_the_number_of_images_become_constants() -> None:
    model = check(SHAPED, SHAPED_WEIGHTS, "g")
    assert "Shape" not in operations(model)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([node("y", "Softplus", "image")], "Softplus of node 'y': the converter does not know it; it knows Add,"),
        ([node("y", "Relu", "nothing")], "no node 'nothing'"),
        ([node("y", "Relu", "z"), node("z", "Relu", "y")], "'y' depends on itself"),
        ([node("y", "Conv2D", "image", "image", **conv_attributes())], "input 1 must be constant"),
        ([node("y", "Conv2D", "image", "k", **conv_attributes(padding="ODD"))], "padding 'ODD'"),
        ([node("y", "Conv2D", "image", "k")], "'strides'"),
        ([node("y", "Relu", "k")], "'k' is constant where a tensor was expected"),
        ([node("c", "Conv2D", "image", "k", **conv_attributes()), node("y", "Add", "c")], "expected 2 inputs, got 1"),
        (
            [node("c", "Conv2D", "image", "k", **conv_attributes()), node("y", "Mul", "c", "k")],
            "neither one number nor one per channel",
        ),
        (
            [node("c", "Conv2D", "image", "k", **conv_attributes()), node("y", "Reshape", "c", "one")],
            "begin with the number of images",
        ),
        ([node("y", "Conv2D", "image", "k", **conv_attributes(0))], "only square kernels and strides"),
        (
            [node("y", "Conv2D", "image", "wide", **conv_attributes(1, "VALID"))],
            "the kernel of 9 leaves nothing of 8x8",
        ),
        ([node("y", "Conv2D", "image", "one", **conv_attributes())], "its inputs do not fit"),
        ([node("y", "Mean", "image", "one")], "fed to convolutions only"),
        (
            [node("c", "Conv2D", "image", "k", **conv_attributes()), node("y", "Mean", "c", "one")],
            "only the mean over height and width",
        ),
    ],
)
def test_what_cannot_be_converted_is_named(nodes: Nodes, says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        converted(nodes, {"k": kernel(3, 3, 3, 4), "wide": kernel(9, 9, 3, 1), "one": np.ones(1, np.int32)}, ["y"])
