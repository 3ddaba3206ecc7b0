"""Every operator of the NumPy backend against ONNX Runtime, on random shapes, values and attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from hawkvision.core.errors import BackendError
from hawkvision.inference.backends.numpy_backend import NumpyGraph
from hawkvision.inference.backends.numpy_ops import OPERATORS
from hawkvision.system.onnx_runtime import ort
from tests.fuzz.examples import examples
from tests.hawkvision.inference.graphs import Array, model

FEW = settings(max_examples=examples(125), deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
COVERED: set[str] = set()

ELEMENTS = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8, "int8": TensorProto.INT8}


def check(op: str, x: Array, constants: dict[str, Array] | None = None, atol: float = 1e-5, **given: Any) -> Array:
    """Run one node in both; the output's rank is left open by naming no shape that could be wrong."""
    constants, opset, out = constants or {}, given.pop("opset", 17), given.pop("gives", None)
    node = helper.make_node(op, ["x", *constants], ["y"], **given)
    element = ELEMENTS[str(x.dtype)]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", element, x.shape)],
        [helper.make_tensor_value_info("y", out or element, None)],
        [onnx_tensor(name, value) for name, value in constants.items()],
    )
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9).SerializeToString()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    (wanted,) = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    (found,) = NumpyGraph(data).run(x)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=atol)
    COVERED.add(op)
    return found


def onnx_tensor(name: str, value: Array) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.ascontiguousarray(value), name)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9))


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@FEW
@given(SEEDS, SIZES)
def test_arithmetic_broadcasts(op: str, seed: int, shape: tuple[int, ...]) -> None:
    check(op, normal(seed, *shape), {"b": normal(seed + 1, shape[1], 1, 1) + 9})


@FEW
@given(SEEDS, SIZES, st.permutations(range(4)))
def test_transpose(seed: int, shape: tuple[int, ...], perm: list[int]) -> None:
    check("Transpose", normal(seed, *shape), perm=perm)


@FEW
@given(SEEDS, SIZES)
def test_elementwise(seed: int, shape: tuple[int, ...]) -> None:
    x = normal(seed, *shape)
    check("Relu", x)
    check("Identity", x)
    check("Clip", x, {"low": np.array(-1, np.float32), "high": np.array(1.5, np.float32)})
    check("Cast", np.random.default_rng(seed).integers(0, 256, shape, np.uint8), to=TensorProto.FLOAT, gives=1)


@FEW
@given(SEEDS, SIZES, st.integers(0, 4))
def test_shapes(seed: int, shape: tuple[int, ...], axis: int) -> None:
    x = normal(seed, *shape)
    check("Flatten", x, axis=axis)
    check("Reshape", x, {"shape": np.array([0, -1])})
    if axis < 4:
        check("Concat", x, {"more": normal(seed + 1, *shape)}, axis=axis)


@FEW
@given(SEEDS, SIZES, st.booleans())
def test_means(seed: int, shape: tuple[int, ...], keep: bool) -> None:
    x = normal(seed, *shape)
    check("GlobalAveragePool", x)
    check("ReduceMean", x, axes=[2, 3], keepdims=int(keep))
    check("ReduceMean", x, {"axes": np.array([-1, 1])}, keepdims=int(keep), opset=18)


@FEW
@given(SEEDS, st.integers(1, 5), st.integers(1, 6), st.integers(1, 7), st.booleans(), st.booleans())
def test_matrix_products(seed: int, m: int, k: int, n: int, trans_a: bool, trans_b: bool) -> None:
    a, b = normal(seed, *((k, m) if trans_a else (m, k))), normal(seed + 1, *((n, k) if trans_b else (k, n)))
    constants = {"b": b, "c": normal(seed + 2, n)}
    check("Gemm", a, constants, transA=int(trans_a), transB=int(trans_b), alpha=0.5, beta=2.0)
    check("MatMul", normal(seed, 2, m, k), {"b": normal(seed + 1, k, n)})


@settings(max_examples=examples(300), deadline=None)
@given(
    SEEDS,
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 10), st.integers(1, 10)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(*[st.integers(0, 2)] * 4),
    st.integers(1, 2),
    st.booleans(),
)
def test_convolution(
    seed: int,
    groups: tuple[int, int, int],
    size: tuple[int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, int, int, int],
    dilation: int,
    bias: bool,
) -> None:
    group, depth, outputs = groups
    for axis in range(2):
        assume(size[axis] + pads[axis] + pads[axis + 2] >= dilation * (kernel[axis] - 1) + 1)
    constants = {"w": normal(seed, outputs * group, depth, *kernel)}
    if bias:
        constants["b"] = normal(seed + 1, outputs * group)
    x = normal(seed + 2, 2, depth * group, *size)
    check(
        "Conv", x, constants, atol=1e-4,
        kernel_shape=kernel, strides=strides, pads=pads, group=group, dilations=[dilation] * 2,
    )  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(
    SEEDS,
    SIZES,
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(*[st.integers(0, 1)] * 4),
    st.booleans(),
)
def test_max_pooling(
    seed: int,
    shape: tuple[int, int, int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, int, int, int],
    ceil: bool,
) -> None:
    for axis in range(2):
        assume(max(pads[axis], pads[axis + 2]) < kernel[axis])
        assume(shape[2 + axis] + pads[axis] + pads[axis + 2] >= kernel[axis])
    check("MaxPool", normal(seed, *shape), kernel_shape=kernel, strides=strides, pads=pads, ceil_mode=int(ceil))


@FEW
@given(SEEDS, SIZES, st.sampled_from([np.uint8, np.int8]), st.booleans())
def test_quantisation(seed: int, shape: tuple[int, ...], dtype: type[np.generic], per_channel: bool) -> None:
    rng = np.random.default_rng(seed)
    count = (shape[1],) if per_channel else ()
    scale = np.asarray(2.0 ** rng.integers(-6, 0, count), np.float32)  # powers of two: halves fall exactly, and tie
    zero = np.asarray(rng.integers(0, 100, count), dtype)
    x = (rng.integers(-400, 400, shape) / 64).astype(np.float32)
    axis = {"axis": 1} if per_channel else {}
    element = ELEMENTS[np.dtype(dtype).name]
    levels = check("QuantizeLinear", x, {"s": scale, "z": zero}, gives=element, **axis)
    check("DequantizeLinear", levels, {"s": scale, "z": zero}, gives=TensorProto.FLOAT, **axis)


def test_every_operator_was_held_against_onnx_runtime() -> None:
    if not COVERED:
        pytest.skip("the property tests were not run in this session")
    assert set(OPERATORS) == COVERED


def test_unknown_attribute_is_refused_and_not_ignored() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER")]
    data = model(nodes, {"w": normal(0, 1, 1, 3, 3)}, ("x", 1, [1, 1, 5, 5]), ("y", 1, [1, 1, 5, 5]))
    with pytest.raises(BackendError, match="auto_pad"):
        NumpyGraph(data).run(normal(0, 1, 1, 5, 5))


def test_input_of_the_wrong_size_is_an_error_that_names_the_node() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="first")]
    data = model(nodes, {"w": normal(0, 1, 2, 3, 3)}, ("x", 1, [1, 2, 5, 5]), ("y", 1, [1, 1, 3, 3]))
    with pytest.raises(BackendError, match="'first'"):
        NumpyGraph(data).run(normal(0, 1, 3, 5, 5))
