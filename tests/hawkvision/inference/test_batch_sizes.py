"""Batches on devices that prepare for each size: which sizes are used, and that every image keeps its own answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import BackendError
from hawkvision.core.types import LOGITS, Pixels, Tensors
from hawkvision.inference.backends.interface import Backend, Outputs
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.inference.batch_sizes import (
    BUDGET_S,
    SIZES,
    FixedBatches,
    chosen,
    measured,
    prepares_sizes,
    with_fixed_batches,
)
from tests.hawkvision.inference.backend_conformance import BackendConformance, random_images
from tests.hawkvision.inference.graphs import tiny_classifier


class Device:
    """A device whose clock moves by what a batch costs; it has memory for so many images."""

    input_shape = (2, 2, 3)
    outputs: ClassVar[Outputs] = {LOGITS: (4,)}

    def __init__(self, cost: Callable[[int], float], room: int = 10**6) -> None:
        self.cost, self.room = cost, room
        self.now = 0.0
        self.ran: list[int] = []

    def infer(self, batch: Pixels) -> Tensors:
        if len(batch) > self.room:
            raise BackendError("out of memory")
        self.ran.append(len(batch))
        self.now += self.cost(len(batch))
        return {LOGITS: np.repeat(batch[:, 0, 0, :1].astype(np.float32), 4, axis=1)}

    def close(self) -> None:
        self.room = 0


class TestFixedBatches(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: FixedBatches(OnnxRuntimeBackend(tiny_classifier()), (1, 4))


@given(st.integers(1, 200), st.sets(st.sampled_from(SIZES[1:])))
def test_only_warm_sizes_run_and_images_keep_their_order(images: int, larger: set[int]) -> None:
    device = Device(lambda _: 0.0)
    sizes = (1, *sorted(larger))
    fixed = FixedBatches(device, sizes)
    assert device.ran == list(sizes)
    batch = np.zeros((images, 2, 2, 3), np.uint8)
    batch[:, 0, 0, 0] = np.arange(images)
    assert fixed.infer(batch)[LOGITS][:, 0].tolist() == list(range(images))
    assert set(device.ran) == set(sizes)
    assert sum(device.ran) - sum(sizes) < images + sizes[-1]  # padding is less than one batch


def test_sizes_stop_where_throughput_does_and_small_ones_stay_where_they_are_quicker() -> None:
    times = measured(device := Device(lambda images: 1e-3 + 1e-3 * max(images, 8)), lambda: device.now)
    assert list(times) == list(SIZES)
    assert chosen(times) == (1, 8, 16)  # 2 and 4 images cost as much as 8; 16 have 95 % of the throughput of 64
    assert chosen({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.6, 16: 5.2}) == (1, 2, 4)
    assert chosen({1: 1.0, 2: 2.0, 4: 4.0}) == (1,)
    assert chosen({1: 1.0, 2: 1.01, 4: 1.02}) == (1, 4)


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=len(SIZES)))
def test_chosen_sizes_have_nearly_the_best_throughput(seconds: list[float]) -> None:
    times = dict(zip(SIZES, seconds, strict=False))
    sizes = chosen(times)
    assert sizes[0] == 1
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] / times[sizes[-1]] >= 0.95 * max(size / taken for size, taken in times.items())


def test_measurement_ends_with_the_gain_the_memory_or_the_time() -> None:
    worse = Device(lambda images: 1e-3 * images**2)
    assert list(measured(worse, lambda: worse.now)) == [1, 2]
    small = Device(lambda _: 1e-3, room=8)
    assert list(measured(small, lambda: small.now)) == [1, 2, 4, 8]
    slow = Device(lambda images: 0.4 * images**0.5)
    times = measured(slow, lambda: slow.now)
    assert slow.now <= BUDGET_S
    assert len(times) < len(SIZES)
    with pytest.raises(BackendError, match="out of memory"):
        measured(Device(lambda _: 1.0, room=0))


def test_size_that_is_set_is_not_measured() -> None:
    device = Device(lambda _: 1e-3)
    assert with_fixed_batches(device, 24).sizes == (1, 2, 4, 8, 16)
    assert device.ran == [1, 2, 4, 8, 16]


def test_real_model_is_measured_within_its_bounds_and_answers_as_before() -> None:
    backend = OnnxRuntimeBackend(tiny_classifier())
    fixed = with_fixed_batches(backend)
    assert fixed.sizes[0] == 1
    assert set(fixed.sizes) <= set(SIZES)
    images = random_images(backend, 2 * fixed.sizes[-1] + 1)
    np.testing.assert_allclose(fixed.infer(images)[LOGITS], backend.infer(images)[LOGITS], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "providers", "does"),
    [
        ("auto", ("CUDAExecutionProvider", "CPUExecutionProvider"), True),
        ("onnxruntime", ("TensorrtExecutionProvider",), True),
        ("auto", ("CPUExecutionProvider",), False),
        ("int8", ("CUDAExecutionProvider",), False),
    ],
)
def test_only_other_providers_of_onnx_runtime_prepare_sizes(
    backend: str, providers: tuple[str, ...], does: bool
) -> None:
    assert prepares_sizes(backend, providers) is does
