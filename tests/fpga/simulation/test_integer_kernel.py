"""The kernel that serves: the reference's integers, compiled or not, whatever the graph's shape."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from hawkvision.system.build_cache import build_once
from hawkvision.system.native_build import LIBRARY
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


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("planes", [1, 3])
def test_pixels_that_did_not_arrive_are_filled(planes: int, how: KernelKind) -> None:
    graph = random_graph(planes=planes)
    draw = np.random.default_rng(2)
    images = draw.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    mask = draw.random((4, 8, 8)) < [[[0.5]], [[0.0]], [[1.0]], [[0.9]]]
    expected = reference.logits(graph, reference.filled(graph, reference.planes(graph, images), mask))
    np.testing.assert_array_equal(IntegerKernel(graph, kind=how).logits(images, mask), expected)


def test_sums_beyond_single_precision_stay_exact() -> None:
    graph = random_graph(channels=(700,), pools=(), side=5, classes=3, weight_bits=8, kernel=5)
    assert max(abs(value) for value in graph.stages[1].conv.accumulator_range(8)) > 1 << 24
    images = random_images(graph, 2)
    for how in HOWS:
        np.testing.assert_array_equal(IntegerKernel(graph, kind=how).logits(images), reference.logits(graph, images))


@pytest.mark.parametrize("make", [fashion_shape, cifar_shape])
def test_code_for_any_processor_of_the_kind_is_exact_too(make: Callable[[], IntegerGraph]) -> None:
    graph = make()
    images = random_images(graph, 5)
    kernel = IntegerKernel(graph, kind="compiled", native=False)
    np.testing.assert_array_equal(kernel.logits(images), reference.logits(graph, images))


def test_code_is_compiled_once_per_machine(tmp_path: Path) -> None:
    IntegerKernel(random_graph(), tmp_path)
    (entry,) = tmp_path.iterdir()
    before = entry.stat().st_ino
    os.utime(entry, (0, 0))
    IntegerKernel(random_graph(1), tmp_path)
    assert [path.stat().st_ino for path in tmp_path.iterdir()] == [before]
    assert entry.stat().st_mtime > 0, "it was used, so it stays longer than what was not"


def test_without_a_compiler_numpy_takes_over_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    graph = random_graph()
    with caplog.at_level(logging.WARNING):
        assert IntegerKernel(graph, tmp_path).kind == "numpy"
    assert "no C++ compiler (c++, g++, clang++); install one, on Debian the package g++" in caplog.text
    with pytest.raises(CompileError, match="no C"):
        IntegerKernel(graph, tmp_path, kind="compiled")


@contextmanager
def not_root() -> Iterator[None]:
    """Root may write everywhere, so run as the user `nobody`."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_cache_that_cannot_be_written_is_said() -> None:
    with tempfile.TemporaryDirectory() as folder:  # which everybody may look into, unlike pytest's own
        Path(folder).chmod(0o555)
        with not_root(), pytest.raises(CompileError, match="cannot write: Permission denied"):
            IntegerKernel(random_graph(), Path(folder) / "fpga", kind="compiled")


def test_a_broken_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++").write_text("#!/bin/sh\necho 'fatal error: no headers' >&2; exit 1\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(CompileError, match=r"cannot compile integer_kernel\.cpp: fatal error: no headers"):
        IntegerKernel(random_graph(), tmp_path, kind="compiled")


def test_a_compiler_that_does_not_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"c\+\+ cannot be run: .*Exec format error"):
        IntegerKernel(random_graph(), tmp_path, kind="compiled")


def test_without_a_place_for_compiled_code_numpy_takes_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert IntegerKernel(random_graph(), tmp_path / "file" / "fpga").kind == "numpy"
    assert "cannot write: Not a directory" in caplog.text


def test_kept_code_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    IntegerKernel(random_graph(), tmp_path)
    (library,) = tmp_path.glob(f"*/{LIBRARY}")
    library.chmod(0o646)
    with pytest.raises(BackendError, match=r"expected code that only its owner may write, found mode 646; remove it"):
        IntegerKernel(random_graph(), tmp_path)


def test_a_kept_file_that_cannot_be_loaded_is_compiled_anew(tmp_path: Path) -> None:
    IntegerKernel(random_graph(), tmp_path / "before")
    (entry,) = (tmp_path / "before").iterdir()

    def build(work: Path) -> None:
        (work / LIBRARY).write_bytes(b"no library")

    build_once(tmp_path / "after" / entry.name, build)
    assert IntegerKernel(random_graph(), tmp_path / "after", kind="compiled").kind == "compiled"


def test_other_arrays_are_refused() -> None:
    kernel = IntegerKernel(random_graph(side=8, planes=1))
    wrong: list[NDArray[Any]] = [np.zeros((1, 8, 7, 1), np.uint8), np.zeros((1, 8, 8, 1), np.int8)]
    for images in (*wrong, np.zeros((8, 8, 1), np.uint8)):
        with pytest.raises(BackendError, match="expected images"):
            kernel.logits(images)
    with pytest.raises(BackendError, match="mask: expected bool"):
        kernel.logits(np.zeros((1, 8, 8, 1), np.uint8), np.ones((1, 8, 7), np.bool_))
