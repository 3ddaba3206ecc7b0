"""The contract of backends as tests: subclass it and say what it is about.

class TestMyBackend(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: MyBackend("model.bin")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backends.interface import Backend, joined


def random_images(backend: Backend, n: int, seed: int = 0) -> Pixels:
    """`n` images of noise of the backend's input shape, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, (n, *backend.input_shape), dtype=np.uint8)


def assert_same(found: Tensors, expected: Tensors) -> None:
    """Fail unless the tensors are equal bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


class BackendConformance:
    """Tests that every `Backend` must pass."""

    atol: ClassVar[float] = 1e-4
    """How far an image's numbers may differ between batch sizes: kernels may sum in another order for each."""

    def assert_close(self, found: Tensors, expected: Tensors) -> None:
        """Fail unless the tensors are equal within `atol`."""
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_allclose(found[name], tensor, rtol=0, atol=self.atol, err_msg=name)

    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        """Override: a function that opens a fresh backend, the same model each time."""
        raise NotImplementedError(f"{type(self).__name__} must override the fixture make_backend")

    @pytest.fixture
    def backend(self, make_backend: Callable[[], Backend]) -> Iterator[Backend]:
        """A fresh backend, closed after the test."""
        backend = make_backend()
        yield backend
        backend.close()

    def test_says_what_it_takes_and_gives(self, backend: Backend) -> None:
        """The input shape and the outputs' are positive and consistent with the protocol."""
        assert isinstance(backend, Backend)
        height, width, channels = backend.input_shape
        assert height > 0
        assert width > 0
        assert channels == 3
        assert backend.outputs
        assert all(size is None or size > 0 for shape in backend.outputs.values() for size in shape)

    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_tensors_are_float32_with_one_part_per_image(self, backend: Backend, n: int) -> None:
        """(n, ...) of finite float32, as `outputs` says."""
        tensors = backend.infer(random_images(backend, n))
        assert tensors.keys() == backend.outputs.keys()
        for name, shape in backend.outputs.items():
            assert len(tensors[name]) == n
            assert len(tensors[name].shape) == 1 + len(shape)
            sizes = zip(shape, tensors[name].shape[1:], strict=True)
            assert all(expected in (None, found) for expected, found in sizes)
            assert tensors[name].dtype == np.float32
            assert np.isfinite(tensors[name]).all()

    def test_batch_gives_each_image_what_it_gets_alone(self, backend: Backend) -> None:
        """Row i of a batch equals the answer to image i, within `atol`."""
        batch = random_images(backend, 4)
        alone = joined([backend.infer(batch[i : i + 1]) for i in range(4)])
        self.assert_close(backend.infer(batch), alone)

    def test_order_of_images_is_kept(self, backend: Backend) -> None:
        """Reversing the batch reverses the tensors."""
        batch = random_images(backend, 4)
        forward = {name: tensor[::-1] for name, tensor in backend.infer(batch).items()}
        self.assert_close(backend.infer(np.ascontiguousarray(batch[::-1])), forward)

    def test_same_batch_gives_same_tensors(self, backend: Backend) -> None:
        """Two runs agree bit for bit."""
        batch = random_images(backend, 3)
        assert_same(backend.infer(batch), backend.infer(batch))

    def test_two_openings_agree(self, make_backend: Callable[[], Backend], backend: Backend) -> None:
        """A second backend over the same model gives the same tensors."""
        batch = random_images(backend, 2)
        second = make_backend()
        assert_same(second.infer(batch), backend.infer(batch))
        second.close()

    def test_four_threads_get_what_one_gets(self, backend: Backend) -> None:
        """Concurrent calls do not disturb one another."""
        batches = [random_images(backend, 1 + seed % 3, seed) for seed in range(16)]
        expected = [backend.infer(batch) for batch in batches]
        with ThreadPoolExecutor(4) as pool:
            for found, wanted in zip(pool.map(backend.infer, batches), expected, strict=True):
                assert_same(found, wanted)

    def test_non_contiguous_batch_is_read_right(self, backend: Backend) -> None:
        """A strided view counts as what it shows."""
        wide = random_images(backend, 6)
        assert_same(backend.infer(wide[::2]), backend.infer(wide[::2].copy()))

    @pytest.mark.parametrize("change", ["height", "width", "channels", "rank", "empty"])
    def test_wrong_shape_is_refused(self, backend: Backend, change: str) -> None:
        """Any other shape is a BackendError, and the next call works."""
        height, width, channels = backend.input_shape
        shape = {
            "height": (1, height + 1, width, channels),
            "width": (1, height, width - 1, channels),
            "channels": (1, height, width, 1),
            "rank": (height, width, channels),
            "empty": (0, height, width, channels),
        }[change]
        with pytest.raises(BackendError):
            backend.infer(np.zeros(shape, np.uint8))
        assert all(len(tensor) == 1 for tensor in backend.infer(random_images(backend, 1)).values())

    @pytest.mark.parametrize("dtype", [np.float32, np.int8, np.int64])
    def test_wrong_dtype_is_refused(self, backend: Backend, dtype: type[np.generic]) -> None:
        """Nothing is converted silently: float images are on an unknown scale."""
        wrong: NDArray[Any] = np.zeros((1, *backend.input_shape), dtype)
        with pytest.raises(BackendError):
            backend.infer(wrong)

    def test_input_is_left_as_it_was(self, backend: Backend) -> None:
        """The caller's array is not written to; a read-only one will do."""
        batch = random_images(backend, 2)
        before = batch.copy()
        batch.setflags(write=False)
        backend.infer(batch)
        np.testing.assert_array_equal(batch, before)

    def test_output_is_the_callers_to_keep(self, backend: Backend) -> None:
        """Later calls do not overwrite earlier tensors, nor does writing to them change later ones."""
        first = backend.infer(random_images(backend, 2, seed=1))
        kept = {name: tensor.copy() for name, tensor in first.items()}
        second = backend.infer(random_images(backend, 2, seed=2))
        assert_same(first, kept)
        for name, tensor in first.items():
            assert not np.shares_memory(tensor, second[name])
            tensor[:] = 0
        assert_same(backend.infer(random_images(backend, 2, seed=1)), kept)

    def test_closed_backend_refuses_to_infer(self, make_backend: Callable[[], Backend]) -> None:
        """After close, infer raises BackendError; a second close does nothing."""
        backend = make_backend()
        batch = random_images(backend, 1)
        backend.close()
        backend.close()
        with pytest.raises(BackendError):
            backend.infer(batch)
