"""The plain ONNX twin of an integer graph: exact in any runtime, and it carries the graph along."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from hawkvision.core.errors import CompileError
from hawkvision.core.types import LOGITS, Logits, Pixels
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.integer import reference
from hawkvision.integer.artifact import GRAPH_KEY, graph_of
from hawkvision.integer.ir import IntegerGraph, to_bytes
from hawkvision.integer.nodes import Conv
from hawkvision.integer.onnx_writer import exact_in_float32, write
from tests.fuzz.examples import examples
from tests.hawkvision.integer.graphs import cifar_shape, fashion_shape, random_graph


def rgb(graph: IntegerGraph, n: int = 3, seed: int = 0) -> Pixels:
    size = (n, graph.input.height, graph.input.width, 3)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def expected(graph: IntegerGraph, images: Pixels) -> Logits:
    whole = reference.logits(graph, reference.planes(graph, images))
    return whole.astype(np.float32) * np.float32(graph.logit_scale)


@given(
    seed=st.integers(0, 10_000),
    side=st.integers(5, 13),
    planes=st.sampled_from([1, 3]),
    channels=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    pools=st.sets(st.integers(0, 2)),
    bits=st.integers(2, 8),
)
@settings(max_examples=examples(300), deadline=None)
def test_onnxruntime_gives_the_references_logits(
    seed: int, side: int, planes: int, channels: list[int], pools: set[int], bits: int
) -> None:
    halved = tuple(pools if side >= 8 else set())
    graph = random_graph(
        seed, side=side, planes=planes, channels=tuple(channels), pools=halved, weight_bits=bits, classes=3
    )
    images = rgb(graph, seed=seed)
    assert (OnnxRuntimeBackend(write(graph)).infer(images)[LOGITS] == expected(graph, images)).all()


def test_sums_beyond_single_precision_are_exact_too() -> None:
    graph = random_graph(3, side=10, channels=(32, 32), pools=(), kernel=9, weight_bits=8)
    assert [exact_in_float32(stage.conv, stage.taken.bits) for stage in graph.stages] == [True, False, False]
    images = rgb(graph, 20)
    assert (OnnxRuntimeBackend(write(graph)).infer(images)[LOGITS] == expected(graph, images)).all()


@pytest.mark.parametrize("graph", [fashion_shape(), cifar_shape(weight_bits=8)], ids=lambda graph: graph.name)
def test_every_runtime_gives_the_same_bits_at_every_extreme(graph: IntegerGraph) -> None:
    noise = rgb(graph, 4)
    images = np.concatenate([noise, np.zeros_like(noise[:1]), np.full_like(noise[:1], 255)])
    model = write(graph)
    by_the_standard = ReferenceEvaluator(onnx.load_from_string(model)).run(None, {"image": images})[0]
    for found in (OnnxRuntimeBackend(model).infer(images)[LOGITS], by_the_standard):
        assert (found == expected(graph, images)).all()


def test_exactness_is_judged_by_every_part_of_a_sum() -> None:
    up = Conv("c", np.full((1, 1, 1, 300), 127, np.int8), np.array([-(1 << 23)], np.int32), 8)
    assert exact_in_float32(up, 8)
    assert not exact_in_float32(dataclasses.replace(up, weights=np.full((1, 1, 1, 600), 127, np.int8)), 8)


def test_model_carries_its_graph_and_has_the_same_bytes_every_time(tmp_path: Path) -> None:
    graph = random_graph(5)
    assert write(graph) == write(graph)
    (tmp_path / "model.onnx").write_bytes(write(graph))
    for model in (write(graph), tmp_path / "model.onnx"):
        assert to_bytes(graph_of(model)) == to_bytes(graph)


def with_metadata(value: str | None) -> bytes:
    model = onnx.load_from_string(write(random_graph()))
    onnx.helper.set_model_props(model, {} if value is None else {GRAPH_KEY: value})
    data: bytes = model.SerializeToString()
    return data


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (with_metadata(None), "carries no integer graph"),
        (with_metadata("%%"), GRAPH_KEY),
        (with_metadata("AAAA"), "not an integer graph"),
        (b"no model", "cannot read the model"),
        (Path("/nowhere/model.onnx"), r"^/nowhere/model.onnx: cannot read the model"),
    ],
    ids=["none", "no base64", "no graph", "no model", "no file"],
)
def test_models_without_a_readable_graph_are_refused(model: Path | bytes, says: str) -> None:
    with pytest.raises(CompileError, match=says):
        graph_of(model)
