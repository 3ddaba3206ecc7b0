"""`hawkvision models quantize`: what a quantised stage costs, and which layers have no integer form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hawkvision.core.errors import ArtifactError, CompileError, ConfigError
from hawkvision.core.types import LOGITS
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.integer import reference
from hawkvision.integer.artifact import graph_of
from hawkvision.model_zoo.own.graphs.owner_facts import OwnerFacts
from hawkvision.model_zoo.own.quantising import Quantised, QuantiseOrder, quantise
from hawkvision.models.manifest import Precision, artifact_path
from tests.hawkvision.command import invoke
from tests.hawkvision.model_zoo.own.exports import as_keras_takes, enter, save_keras_style
from tests.hawkvision.model_zoo.own.small_cnn import LABELS, SIDE, SmallCnn, shape_images, write_folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task with one trained stage, `net`, and images that it has not seen."""
    root = tmp_path_factory.mktemp("desk")
    images, labels = shape_images(600, 0)
    net = SmallCnn((4, 8), len(LABELS))
    net.train(np.ascontiguousarray(as_keras_takes(images).transpose(0, 3, 1, 2)), labels, 3)
    save_keras_style(net, root / "net.onnx", SIDE)
    write_folder(root / "images", *shape_images(500, 1))
    facts = OwnerFacts(scale=1 / 127.5, mean=[1], std=[1], channel_order="rgb", fit="stretch", interpolation="bilinear")
    enter(root / "net.onnx", facts)
    return root


def quantised(desk: Path, precision: Precision, **more: Any) -> Quantised:
    order = QuantiseOrder("shapes", "net", desk / "images", precision, **more)
    return quantise(order, desk / "models", desk / "cache")


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.05), ("w8a8", 0.1), ("w4a8", 0.2)])
def test_a_stage_in_fewer_bits_is_entered_with_what_it_costs(precision: Precision, most: float, desk: Path) -> None:
    made = quantised(desk, precision)
    assert made.accuracy is not None
    before, after = made.accuracy
    assert before > 0.8
    assert before - after <= most
    assert made.agreement > 1 - 2 * most
    assert (made.images, made.measured) == (50, 50), "of the hundred of the profile part"
    name = made.variant.name
    assert name == f"net_{precision.removesuffix('a8')}"
    assert name in made.manifest.cascade.edge
    assert made.manifest.cascade.dc == ("net",), "the float stage stays the reference"
    listed = invoke("models", "verify", "--task", "shapes", *_folders(desk))
    assert name in listed.output, listed.output


def test_an_integer_stage_computes_its_graphs_integers(desk: Path) -> None:
    quantised(desk, "w4a8")
    path = artifact_path(desk / "cache", "shapes", "net_w4")
    graph = graph_of(path)
    pixels, _ = shape_images(4, 7)
    integers = reference.logits(graph, reference.planes(graph, pixels))
    backend = OnnxRuntimeBackend(path)
    expected = integers.astype(np.float32) * np.float32(graph.logit_scale)
    np.testing.assert_array_equal(backend.infer(pixels)[LOGITS], expected)
    backend.close()


def test_nodes_that_are_named_stay_float(desk: Path) -> None:
    made = quantised(desk, "int8", keep_float=("*dense*",), name="half")
    assert made.kept_float
    assert all("dense" in each for each in made.kept_float)
    graph = onnx.load(str(artifact_path(desk / "cache", "shapes", "half"))).graph
    linear = next(node for node in graph.node if node.op_type in ("MatMul", "Gemm"))
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    assert "DequantizeLinear" not in {made_by.get(name) for name in linear.input}
    with pytest.raises(ArtifactError, match="--keep-float 'box' fits no node"):
        quantised(desk, "int8", keep_float=("box",))


def test_every_layer_without_an_integer_form_is_named_before_anything_is_done(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    constants = {
        "a": rng.normal(size=(4, 3, 3, 3)), "b": rng.normal(size=(4, 1, 3, 3)), "c": rng.normal(size=(4, 4, 1, 1)),
        "d": rng.normal(size=(5, 4 * 8 * 8)), "e": np.zeros(5),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["conv"], name="stem", strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv"], ["relu"]),
        helper.make_node("Conv", ["relu", "b"], ["deep"], name="depthwise", group=4, pads=[1, 1, 1, 1]),
        helper.make_node("HardSwish", ["deep"], ["swish"], name="swish"),
        helper.make_node("Conv", ["swish", "c"], ["narrow"], name="project"),
        helper.make_node("Add", ["narrow", "relu"], ["sum"], name="residual"),
        helper.make_node("Flatten", ["sum"], ["flat"]),
        helper.make_node("Gemm", ["flat", "d", "e"], ["y"], name="head", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    facts = OwnerFacts(scale=1, mean=[0], std=[1], channel_order="rgb", fit="stretch", interpolation="bilinear")
    enter(tmp_path / "m.onnx", facts)
    with pytest.raises(CompileError) as refused:
        quantise(
            QuantiseOrder("shapes", "m", tmp_path / "no such folder", "w8a8"), tmp_path / "models", tmp_path / "cache"
        )
    lines = refused.value.message.splitlines()[1:]
    for name, reason in {
        "stem": "strides", "depthwise": "group 4", "swish": "no integer form", "residual": "joins branches",
        "project": "is followed by Add",
    }.items():  # fmt: skip
        assert any(f"{name}'" in line and reason in line for line in lines), (name, lines)
    assert not any("head'" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stage": "net_int8"}, "has precision int8; expected a float stage"),
        ({"precision": "w8a8", "keep_float": ("*",)}, "--keep-float applies to int8"),
        ({"data": "few"}, "4 images in the profile part .*; expected at least 40"),
    ],
)
def test_what_cannot_be_quantised_is_named(change: dict[str, Any], says: str, desk: Path) -> None:
    quantised(desk, "int8")
    write_folder(desk / "few", *shape_images(20, 2))
    fields: dict[str, Any] = {"task": "shapes", "stage": "net", **change}
    fields["data"] = desk / change.get("data", "images")
    with pytest.raises(ConfigError, match=says):
        quantise(QuantiseOrder(**fields), desk / "models", desk / "cache")


def _folders(desk: Path) -> list[str]:
    return ["--models-dir", str(desk / "models"), "--cache-dir", str(desk / "cache")]
