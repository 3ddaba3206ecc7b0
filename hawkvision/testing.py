"""The backend contract as tests: subclass, give a factory, and pytest does the rest.

    class TestMyBackend(BackendConformance):
        @pytest.fixture
        def make_backend(self) -> Callable[[], Backend]:
            return lambda: MyBackend("model.bin")

For those who write backends; the only module of the library that imports pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels
from hawkvision.inference.backends.interface import Backend


def random_images(backend: Backend, n: int, seed: int = 0) -> Pixels:
    """`n` images of noise of the backend's input shape, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, (n, *backend.input_shape), dtype=np.uint8)


class BackendConformance:
    """What every `Backend` owes its callers."""

    atol: ClassVar[float] = 1e-4
    """How far an image's logits may differ between batch sizes: kernels may sum in another order for each."""

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
        """Input shape and classes are positive and consistent with the protocol."""
        assert isinstance(backend, Backend)
        height, width, channels = backend.input_shape
        assert height > 0
        assert width > 0
        assert channels == 3
        assert backend.classes >= 2

    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_logits_are_float32_rows_one_per_image(self, backend: Backend, n: int) -> None:
        """(n, classes) of finite float32."""
        logits = backend.infer(random_images(backend, n))
        assert logits.shape == (n, backend.classes)
        assert logits.dtype == np.float32
        assert np.isfinite(logits).all()

    def test_batch_gives_each_image_what_it_gets_alone(self, backend: Backend) -> None:
        """Row i of a batch equals the answer to image i, within `atol`."""
        batch = random_images(backend, 4)
        alone = np.concatenate([backend.infer(batch[i : i + 1]) for i in range(4)])
        np.testing.assert_allclose(backend.infer(batch), alone, rtol=0, atol=self.atol)

    def test_order_of_images_is_kept(self, backend: Backend) -> None:
        """Reversing the batch reverses the logits."""
        batch = random_images(backend, 4)
        np.testing.assert_allclose(
            backend.infer(np.ascontiguousarray(batch[::-1])), backend.infer(batch)[::-1], rtol=0, atol=self.atol
        )

    def test_same_batch_gives_same_logits(self, backend: Backend) -> None:
        """Two runs agree bit for bit."""
        batch = random_images(backend, 3)
        np.testing.assert_array_equal(backend.infer(batch), backend.infer(batch))

    def test_two_openings_agree(self, make_backend: Callable[[], Backend], backend: Backend) -> None:
        """A second backend over the same model gives the same logits."""
        batch = random_images(backend, 2)
        second = make_backend()
        np.testing.assert_array_equal(second.infer(batch), backend.infer(batch))
        second.close()

    def test_four_threads_get_what_one_gets(self, backend: Backend) -> None:
        """Concurrent calls do not disturb one another."""
        batches = [random_images(backend, 1 + seed % 3, seed) for seed in range(16)]
        expected = [backend.infer(batch) for batch in batches]
        with ThreadPoolExecutor(4) as pool:
            for found, wanted in zip(pool.map(backend.infer, batches), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)

    def test_non_contiguous_batch_is_read_right(self, backend: Backend) -> None:
        """A strided view counts as what it shows."""
        wide = random_images(backend, 6)
        np.testing.assert_array_equal(backend.infer(wide[::2]), backend.infer(wide[::2].copy()))

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
        assert len(backend.infer(random_images(backend, 1))) == 1

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
        """Later calls do not overwrite earlier logits, nor does writing to them change later ones."""
        first = backend.infer(random_images(backend, 2, seed=1))
        kept = first.copy()
        second = backend.infer(random_images(backend, 2, seed=2))
        np.testing.assert_array_equal(first, kept)
        assert not np.shares_memory(first, second)
        first[:] = 0
        np.testing.assert_array_equal(backend.infer(random_images(backend, 2, seed=1)), kept)

    def test_closed_backend_refuses_to_infer(self, make_backend: Callable[[], Backend]) -> None:
        """After close, infer is a BackendError; closing again does no harm."""
        backend = make_backend()
        batch = random_images(backend, 1)
        backend.close()
        backend.close()
        with pytest.raises(BackendError):
            backend.infer(batch)
