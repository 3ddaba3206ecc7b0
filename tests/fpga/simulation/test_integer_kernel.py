"""The kernel that serves: the reference's integers, compiled or not, whatever the graph's shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fpga.simulation.integer_kernel import IntegerKernel, KernelKind
from hawkvision.core.errors import BackendError, CompileError
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph
from tests.fuzz.examples import examples
from tests.hawkvision.integer.graphs import cifar_shape, fashion_shape, random_graph, random_images

HOWS: tuple[KernelKind, KernelKind] = ("compiled", "numpy")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("make", [fashion_shape, cifar_shape])
def test_stages_of_the_cascade_get_the_reference_logits(make: Callable[[], IntegerGraph], how: KernelKind) -> None:
    graph = make()
    images = random_images(graph, 5)
    np.testing.assert_array_equal(IntegerKernel(graph, kind=how).logits(images), reference.logits(graph, images))


@settings(max_examples=examples(125))
@given(
    seed=st.integers(0, 1000),
    side=st.integers(5, 13),
    planes=st.sampled_from([1, 3]),
    channels=st.lists(st.integers(1, 49), min_size=1, max_size=3),
    pooled=st.sets(st.integers(0, 1)),
    classes=st.integers(2, 40),
    bits=st.sampled_from([2, 4, 8]),
    kernel=st.sampled_from([1, 2, 3, 5]),
)
def test_any_shape_gets_the_reference_logits(
    seed: int, side: int, planes: int, channels: list[int], pooled: set[int], classes: int, bits: int, kernel: int
) -> None:
    graph = random_graph(
        seed,
        side=side,
        planes=planes,
        channels=tuple(channels),
        pools=tuple(pooled),
        classes=classes,
        weight_bits=bits,
        kernel=kernel,
    )
    images = random_images(graph, 2, seed)
    expected = reference.logits(graph, images)
    for how in HOWS:
        np.testing.assert_array_equal(IntegerKernel(graph, kind=how).logits(images), expected)


@pytest.mark.parametrize("how", HOWS)
def test_colour_images_are_seen_as_the_input_stage_sees_them(how: KernelKind) -> None:
    graph = random_graph(planes=1, side=9)
    images = np.random.default_rng(1).integers(0, 256, (3, 9, 9, 3), dtype=np.uint8)
    expected = reference.logits(graph, reference.planes(graph, images))
    np.testing.assert_array_equal(IntegerKernel(graph, kind=how).logits(images), expected)


def test_sums_beyond_single_precision_stay_exact() -> None:
    graph = random_graph(channels=(700,), pools=(), side=5, classes=3, weight_bits=8, kernel=5)
    assert max(abs(value) for value in graph.stages[1].conv.accumulator_range(8)) > 1 << 24
    images = random_images(graph, 2)
    for how in HOWS:
        np.testing.assert_array_equal(IntegerKernel(graph, kind=how).logits(images), reference.logits(graph, images))


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("PATH", "no C++ compiler (c++, g++, clang++); install one, on Debian the package g++"),
        ("HAWKVISION_BUILD_CACHE", "cannot write: Not a directory"),
    ],
)
def test_without_a_compiler_or_a_place_for_its_code_numpy_takes_over_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, variable: str, says: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HAWKVISION_BUILD_CACHE", str(tmp_path))
    monkeypatch.setenv(variable, str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING):
        assert IntegerKernel(random_graph()).kind == "numpy"
    assert says in caplog.text
    with pytest.raises(CompileError):
        IntegerKernel(random_graph(), kind="compiled")


def test_other_arrays_are_refused() -> None:
    kernel = IntegerKernel(random_graph(side=8, planes=1))
    wrong: list[NDArray[Any]] = [np.zeros((1, 8, 7, 1), np.uint8), np.zeros((1, 8, 8, 1), np.int8)]
    for images in (*wrong, np.zeros((8, 8, 1), np.uint8)):
        with pytest.raises(BackendError, match="expected images"):
            kernel.logits(images)
