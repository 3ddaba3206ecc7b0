from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.architectures import EMITTERS, F32, GraphBuilder, emit
from hawkvision.model_zoo.building.quantize import (
    Affine,
    affine,
    measure_ranges,
    quantise_model,
    quantise_weights,
    quantised_tensors,
    symmetric_scales,
)
from hawkvision.models.manifest import InputSpec
from hawkvision.system.onnx_runtime import ort
from tests.hawkvision.model_zoo.tiny_states import random_state

SPEC = InputSpec(height=32, width=32, mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 40.0))
ENDS = st.floats(-1e4, 1e4, width=32)
KERNELS = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(1, 20)), elements=st.floats(-100, 100, width=32)
)


def real(how: Affine, integers: NDArray[np.uint8]) -> F32:
    return (integers.astype(np.float32) - np.float32(how.zero_point)) * how.scale


@given(a=ENDS, b=ENDS, values=hnp.arrays(np.float32, 20, elements=st.floats(0, 1, width=32)))
def test_round_trip_within_the_range_errs_by_half_a_step(a: float, b: float, values: F32) -> None:
    low, high = min(a, b, 0.0), max(a, b, 0.0)
    how = affine(low, high)
    reals = (low + values * (high - low)).astype(np.float32)
    error = np.abs(real(how, how.quantise(reals)) - reals)
    # Half a step from rounding the value, half from rounding the zero point (it moves the ends of the range).
    assert error.max() <= how.scale * 1.001 + 1e-6 * max(abs(low), abs(high))


@given(a=ENDS, b=ENDS)
def test_zero_is_represented_exactly(a: float, b: float) -> None:
    how = affine(min(a, b), max(a, b))
    zero = np.zeros(1, np.float32)
    assert real(how, how.quantise(zero))[0] == 0.0


@given(kernel=KERNELS)
def test_weights_err_by_less_than_a_step_and_keep_their_sum(kernel: F32) -> None:
    scales = symmetric_scales(kernel, saturation_free=True).astype(np.float64)
    integers = quantise_weights(kernel, scales.astype(np.float32)).astype(np.float64)
    exact = kernel / scales[:, None]
    assert np.abs(exact - integers).max() <= 1.0 + 1e-3
    assert np.abs((exact - integers).sum(axis=1)).max() <= 0.5 + 1e-3


@given(kernel=KERNELS)
def test_no_pair_of_products_saturates_sixteen_bits(kernel: F32) -> None:
    integers = quantise_weights(kernel, symmetric_scales(kernel, saturation_free=True)).astype(int)
    for channel in integers:
        pair = np.sort(channel)
        if len(pair) > 1:
            assert 255 * (pair[-1] + pair[-2]) < 2**15
            assert 255 * (pair[0] + pair[1]) >= -(2**15)


def tiny_model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(8, 3, 3, 3)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    kernel *= np.float32(0.01)
    builder = GraphBuilder("tiny")
    x = builder.relu6(builder.conv(builder.pixels((128.0, 128.0, 128.0)), "conv", kernel, bias))
    builder.classifier(x, np.eye(8, dtype=np.float32), np.zeros(8, np.float32))
    return builder.model(8, 8, 8)


def logits_of(model: onnx.ModelProto, images: np.ndarray) -> F32:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits: F32 = session.run(["logits"], {"image": images})[0]
    return logits


def test_tiny_int8_graph_is_within_its_steps_of_float() -> None:
    model = tiny_model()
    images = np.random.default_rng(1).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    quantised = quantise_model(model, {"conv.relu6": (0.0, 6.0), "pool": (0.0, 6.0)}, "test")
    error = np.abs(logits_of(quantised, images) - logits_of(model, images)).max()
    assert 0 < error < 4 * 6 / 255


@pytest.mark.parametrize("architecture", list(EMITTERS))
def test_int8_graph_runs_wholly_in_integers(architecture: str, tmp_path: Path) -> None:
    model = emit(architecture, random_state(architecture), SPEC, "test")
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    quantised = quantise_model(model, measure_ranges(model, images), "test")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(quantised.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kinds = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert "QLinearConv" in kinds
    assert not kinds & {"Conv", "FusedConv", "Gemm", "Add", "Concat", "QuantizeLinear"}
    assert np.corrcoef(logits_of(quantised, images).ravel(), logits_of(model, images).ravel())[0, 1] > 0.9


def test_missing_or_empty_range_is_named() -> None:
    model = tiny_model()
    assert quantised_tensors(model) == ("conv.relu6", "pool")
    with pytest.raises(ArtifactError, match="pool"):
        quantise_model(model, {"conv.relu6": (0.0, 6.0)}, "test")
    with pytest.raises(ArtifactError, match="not a range"):
        quantise_model(model, {"conv.relu6": (1.0, 1.0), "pool": (0.0, 6.0)}, "test")
    with pytest.raises(ArtifactError, match="no images"):
        measure_ranges(model, [])
