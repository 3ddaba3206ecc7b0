"""QONNX files: read into graphs that compute the same, and refused by name where something is not taken."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from hawkvision.core.errors import CompileError
from hawkvision.core.types import Logits, Pixels
from hawkvision.integer import reference
from hawkvision.integer.ir import from_bytes, to_bytes
from hawkvision.integer.qonnx import MAX_BYTES, read_qonnx
from hawkvision.integer.qonnx_chain import QUANT_DOMAIN
from hawkvision.model_zoo.own.qonnx_export import QuantisedNet, write_qonnx
from tests.fuzz.examples import examples
from tests.hawkvision.integer.quantised_nets import random_net


class Quant(OpRun):  # type: ignore[misc]  # onnx has no types here
    """The operator as the qonnx package computes it."""

    op_domain = QUANT_DOMAIN

    def _run(self, x: Any, scale: Any, zero: Any, bits: Any, **how: Any) -> tuple[Any]:
        qonnx = importlib.import_module("qonnx.custom_op.general.intquant")
        found = qonnx.int_quant(x, scale, zero, bits, how["signed"], how["narrow"], how["rounding_mode"])
        return (found.astype(np.float32),)


def in_floats(content: bytes, pixels: Pixels) -> Logits:
    """Logits (n, classes) of onnx's reference, with the qonnx package's own `Quant`."""
    pytest.importorskip("qonnx", reason="the qonnx package, which says what Quant means, is not installed")
    evaluator = ReferenceEvaluator(onnx.load_from_string(content), new_ops=[Quant])
    planes = (pixels.astype(np.float32) * np.float32(1 / 255)).transpose(0, 3, 1, 2)
    return np.concatenate([evaluator.run(None, {"pixels": plane[None]})[0] for plane in planes])


def noise(net: QuantisedNet, n: int = 4, seed: int = 0) -> Pixels:
    size = (n, net.side, net.side, len(net.fill))
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_graph_computes_what_the_qonnx_package_says(bits: int, planes: int) -> None:
    net = random_net(bits, planes=planes, bits=bits)
    content, pixels = write_qonnx(net, "net"), noise(net)
    graph, expected = read_qonnx(content, "net"), in_floats(content, pixels)
    found = reference.logits(graph, pixels) * graph.logit_scale
    # Multipliers of nine bits and halves rounded up: far less than what tells logits apart.
    assert np.abs(found - expected).max() < 0.02 * np.ptp(expected, axis=1).min()


def test_graph_keeps_weights_fill_and_names() -> None:
    net = random_net(planes=3)
    graph = read_qonnx(write_qonnx(net, "a/b net"), "net")
    assert [stage.name for stage in graph.stages] == ["conv0", "conv1", "head"]
    assert (graph.name, graph.fill, graph.input.channels) == ("a_b_net", net.fill, 3)
    for stage, layer in zip(graph.stages, net.layers, strict=True):
        assert (stage.conv.weights == layer.weights.transpose(0, 2, 3, 1)).all()
        assert stage.conv.weight_bits == net.weight_bits
    assert [stage.pool is not None for stage in graph.stages] == [True, True, False]


Change = Callable[[onnx.GraphProto], None]


def changed(*changes: Change, net: QuantisedNet | None = None) -> bytes:
    model = onnx.load_from_string(write_qonnx(net or random_net(), "net"))
    for change in changes:
        change(model.graph)
    data: bytes = model.SerializeToString()
    return data


def node(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(found for found in graph.node if found.name == name)


def attribute(name: str, key: str, value: Any) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        attributes = node(graph, name).attribute
        kept = [entry for entry in attributes if entry.name != key]
        del attributes[:]
        attributes.extend([*kept, helper.make_attribute(key, value)])

    return change


def constant(name: str, value: Any) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        tensor = next(found for found in graph.initializer if found.name == name)
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(value, np.float32), name))

    return change


def tall(name: str, scales: list[float]) -> Change:
    """Weights that are 1 everywhere, in steps of these."""

    def change(graph: onnx.GraphProto) -> None:
        steps = np.array(scales).reshape(-1, 1, 1, 1)
        constant(f"{name}.weight", np.broadcast_to(steps, (len(scales), 1, 3, 3)))(graph)
        constant(f"{name}.weight.scale", steps)(graph)

    return change


def operator(name: str, op: str) -> Change:
    return lambda graph: setattr(node(graph, name), "op_type", op)


def rewired(name: str, position: int, source: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        node(graph, name).input[position] = source

    return change


def outside(graph: onnx.GraphProto) -> None:
    graph.initializer[0].data_location = TensorProto.EXTERNAL


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (operator("conv1", "ConvTranspose"), "ConvTranspose conv1: expected Conv, or Gemm or MatMul"),
        (operator("conv1.relu", "Sigmoid"), "Sigmoid conv1.relu: expected Relu, MaxPool or Quant"),
        (attribute("conv0", "strides", [2, 2]), "Conv conv0: strides: expected [1, 1], got [2, 2]"),
        (attribute("conv0", "group", 4), "Conv conv0: group: expected 1, got 4"),
        (attribute("conv0", "pads", [0, 1, 0, 1]), "Conv conv0: pads: expected four equal ones"),
        (attribute("conv0", "pads", [float("inf")] * 4), "Conv conv0: pads: expected four equal ones"),
        (attribute("conv0", "kernel_shape", [1, 1]), "Conv conv0: kernel_shape"),
        (attribute("conv0", "magic", 1), "Conv conv0: magic: not taken"),
        (attribute("conv0.pool", "kernel_shape", [3, 3]), "MaxPool conv0.pool: expected kernels of 2x2"),
        (attribute("features", "axis", 2), "Flatten features: axis: expected 1"),
        (attribute("head", "transB", 0), "Gemm head: "),
        (attribute("input.quantised", "signed", 1), "Quant input.quantised: expected unsigned activations"),
        (attribute("conv0.weight.quantised", "signed", 0), "conv0.weight.quantised: unsigned numbers cannot be narrow"),
        (constant("conv0.weight.bits", 9), "Quant conv0.weight.quantised: expected signed weights of 2 to 8 bits"),
        (attribute("conv0.activation.quantised", "rounding_mode", "FLOOR"), "rounding_mode: expected ROUND"),
        (constant("input.bits", 4), "expected pixels of 8 bits, got 4"),
        (constant("conv0.activation.bits", 9), "expected unsigned activations of 2 to 8 bits"),
        (constant("conv0.activation.bits", 3.5), "expected a whole number of bits"),
        (constant("conv0.activation.zero_point", 1), "expected a zero point of 0"),
        (constant("conv0.activation.scale", -1), "expected positive scales"),
        (constant("conv0.activation.scale", [0.1, 0.2]), "expected unsigned activations of 2 to 8 bits with one scale"),
        (constant("conv0.activation.scale", 1e-9), "conv0: one unit of its sums is"),
        (constant("conv0.weight.scale", np.ones((4, 1, 3, 1)) * np.arange(1, 4)[:, None]), "one for each output"),
        (constant("conv0.weight.scale", np.ones(7)), "scales of shape (7,) do not fit"),
        (tall("conv0", [1, 1, 1, 1e-3]), "conv0: channel 3 has a 1000 times smaller scale than the greatest"),
        (constant("head.weight.scale", np.arange(1, 6).reshape(5, 1)), "head: the last layer gives logits"),
        (constant("conv0.weight", np.full((4, 1, 3, 3), np.nan)), "a value is not finite"),
        (constant("conv0.weight", np.full((4, 2, 3, 3), 0.01)), "conv0: weights of (4, 3, 3, 2) do not fit 12x12x1"),
        (constant("conv0.weight", np.full((4, 9), 0.01)), "expected weights of 4 dimensions"),
        (constant("conv0.weight", np.full((4, 1, 3, 3), -9.0)), "conv0: a weight is beyond ±7"),
        (constant("conv0.bias", [1e30] * 4), "conv0: a bias is beyond 32 bits"),
        (constant("conv0.bias", [1.0]), "bias: expected 4 values"),
        (rewired("conv0", 1, "conv0.weight"), "Conv conv0: expected weights out of a Quant"),
        (rewired("conv1", 0, "input.quantised"), "'input.quantised' is read by 2 nodes; expected a chain"),
        (rewired("conv0.activation.quantised", 1, "pixels"), "expected"),
        (outside, "expected float or int values inside the file"),
        (lambda graph: graph.node.pop(), "is read by 0 nodes; expected a chain"),
        (lambda graph: graph.input.pop(), "expected one input and one output, got 0 and 1"),
    ],
)  # fmt: skip
def test_what_is_not_taken_is_refused_by_name(change: Change, says: str) -> None:
    with pytest.raises(CompileError) as caught:
        read_qonnx(changed(change), "some file")
    assert says in caught.value.message
    assert "some file" in caught.value.message or "net: " in caught.value.message


def swapped_pool(graph: onnx.GraphProto) -> None:
    """Conv → Relu → MaxPool → Quant, which is the same function."""
    quant, pool = node(graph, "conv0.activation.quantised"), node(graph, "conv0.pool")
    quant.input[0], pool.input[0], node(graph, "conv1").input[0] = pool.output[0], quant.input[0], quant.output[0]


def product(graph: onnx.GraphProto) -> None:
    """MatMul and Add instead of Gemm, Reshape instead of Flatten."""
    head, flatten = node(graph, "head"), node(graph, "features")
    weights = next(found for found in graph.initializer if found.name == "head.weight")
    turned = numpy_helper.to_array(weights).T
    weights.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(turned), "head.weight"))
    graph.initializer.append(numpy_helper.from_array(np.array([1, -1]), "row"))
    flat = helper.make_node("Reshape", [flatten.input[0], "row"], ["features"], name="row")
    times = helper.make_node("MatMul", list(head.input[:2]), ["product"], name="head")
    plus = helper.make_node("Add", ["head.bias", "product"], ["logits"], name="plus")
    kept = [found for found in graph.node if found.name not in ("head", "features")]
    del graph.node[:]
    graph.node.extend([*kept, flat, times, plus])


@pytest.mark.parametrize("change", [swapped_pool, product], ids=["pooled first", "product and sum"])
def test_other_spellings_give_the_same_graph(change: Change) -> None:
    expected = read_qonnx(changed(), "net")
    assert to_bytes(read_qonnx(changed(change), "net")) == to_bytes(expected)


def test_channel_without_weights_keeps_its_constant() -> None:
    net = random_net()
    values = net.layers[0].weights * net.layers[0].weight_step.reshape(-1, 1, 1, 1)
    values[1] = 0
    steps = net.layers[0].weight_step.copy()
    steps[1] = 1e-12
    content = changed(constant("conv0.weight", values), constant("conv0.weight.scale", steps.reshape(4, 1, 1, 1)))
    pixels = noise(net)
    graph, expected = read_qonnx(content, "net"), in_floats(content, pixels)
    found = reference.logits(graph, pixels) * graph.logit_scale
    assert np.abs(found - expected).max() < 0.02 * np.ptp(expected, axis=1).min()


WHOLE = write_qonnx(random_net(side=8, channels=(2,), classes=2), "net")


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=examples(300), deadline=None)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_damaged_files_are_refused_or_graphs_that_can_be_written(damage: list[tuple[int, int]]) -> None:
    content = bytearray(WHOLE)
    for at, value in damage:
        content[at] = value
    for damaged in (bytes(content), bytes(content[: damage[0][0]]), bytes(content[damage[0][0] :])):
        with contextlib.suppress(CompileError):
            graph = read_qonnx(damaged, "file")
            assert to_bytes(from_bytes(to_bytes(graph), "again")) == to_bytes(graph)


def test_files_beyond_the_bound_are_refused_unread() -> None:
    with pytest.raises(CompileError, match=f"more than {MAX_BYTES} bytes"):
        read_qonnx(bytes(MAX_BYTES + 1), "file")
