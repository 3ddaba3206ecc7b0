"""Batch sizes on devices that prepare for each size, such as GPUs.

A GPU chooses kernels and memory for each shape, so the first batch of a size takes many times longer than the next. A
model therefore runs at a few fixed sizes, and each has run before the process is ready. A batch between two sizes is
padded to the larger one; a batch beyond the largest is split.

Which sizes pay is measured when the model is loaded. With t(b) the time of a batch of b images, the largest size is the
smallest b whose throughput b / t(b) reaches 95 % of the best. A smaller size is used if it saves 5 % of the time of the
next larger one. A model that becomes free starts at once with what waits: to wait for more images lengthens both mean
and tail at every load, whatever t(b).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Final

import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backend_registry import ON_THE_CPU
from hawkvision.inference.backends.interface import Backend, Outputs, check_batch, joined

log = logging.getLogger("hawkvision.inference")

SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
"""All that are ever used."""
ENOUGH: Final = 0.95
"""Share of the best throughput that the largest size must reach."""
LEAST_SAVING: Final = 0.05
"""Share of a larger size's time that a smaller one must save."""
RUNS: Final = 5
"""Runs of each size after its first; the shortest counts, because other replicas may be using the device."""
BUDGET_S: Final = 10.0
"""The measurement of a model goes on to no size that would end later."""


def prepares_sizes(backend: str, providers: Sequence[str]) -> bool:
    """Whether the device prepares for each batch size: all of ONNX Runtime's but the CPU."""
    return backend in ("auto", "onnxruntime") and tuple(providers) != ON_THE_CPU


class FixedBatches:
    """A backend that runs batches of a few sizes only, all of which have run when it is made."""

    def __init__(self, backend: Backend, sizes: Sequence[int]) -> None:
        """Run each size once.

        Args:
            backend: runs the padded batches.
            sizes: rising, from 1.

        Raises:
            BackendError: if a size does not run.
        """
        assert list(sizes) == sorted({1, *sizes}), sizes
        self.sizes = tuple(sizes)
        self._backend = backend
        for size in self.sizes:
            backend.infer(_blank(backend, size))

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """See `Backend.input_shape`."""
        return self._backend.input_shape

    @property
    def outputs(self) -> Outputs:
        """See `Backend.outputs`."""
        return self._backend.outputs

    def infer(self, batch: Pixels) -> Tensors:
        """See `Backend.infer`."""
        check_batch(batch, self.input_shape)
        most = self.sizes[-1]
        return joined([self._padded(batch[start : start + most]) for start in range(0, len(batch), most)])

    def close(self) -> None:
        """See `Backend.close`."""
        self._backend.close()

    def _padded(self, batch: Pixels) -> Tensors:
        size = next(size for size in self.sizes if size >= len(batch))
        if size == len(batch):
            return self._backend.infer(batch)
        whole = _blank(self._backend, size)
        whole[: len(batch)] = batch
        return {name: found[: len(batch)] for name, found in self._backend.infer(whole).items()}


def with_fixed_batches(backend: Backend, most: int = 0) -> FixedBatches:
    """The backend at the sizes up to `most`; 0 measures which pay.

    Raises:
        BackendError: if the backend cannot run a size; a measurement ends there, unless it is the first.
    """
    if most:
        return FixedBatches(backend, tuple(takewhile(lambda size: size <= most, SIZES)))
    times = measured(backend)
    sizes = chosen(times)
    shown = ", ".join(f"{size}: {seconds * 1e3:.2f}" for size, seconds in times.items())
    log.info("batch sizes %s, of milliseconds by size {%s}", "/".join(map(str, sizes)), shown)
    return FixedBatches(backend, sizes)


def measured(backend: Backend, clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Seconds of a batch of each size of `SIZES`, until larger ones no longer pay, memory ends or the time is up.

    Raises:
        BackendError: if not even one image runs.
    """
    times: dict[int, float] = {}
    begun = clock()
    for size in SIZES:
        if times and clock() - begun + (1 + RUNS) * 2.0 * next(reversed(times.values())) > BUDGET_S:
            break
        try:
            times[size] = _shortest(backend, size, clock)
        except BackendError as error:
            if not times:
                raise
            log.info("batch size %d does not run: %s", size, error.message)
            break
        if size / times[size] < ENOUGH * _best(times):
            break
    return times


def chosen(times: Mapping[int, float]) -> tuple[int, ...]:
    """The sizes that pay, rising, by the seconds that a batch of each takes; 1 is always among them."""
    largest = min(size for size, seconds in times.items() if size / seconds >= ENOUGH * _best(times))
    kept = [largest]
    for size in sorted((size for size in times if size < largest), reverse=True):
        if size == 1 or times[size] <= (1.0 - LEAST_SAVING) * times[kept[0]]:
            kept.insert(0, size)
    return tuple(kept)


def _best(times: Mapping[int, float]) -> float:
    """Images a second at the best size."""
    return max(size / seconds for size, seconds in times.items())


def _shortest(backend: Backend, size: int, clock: Callable[[], float]) -> float:
    batch, took = _blank(backend, size), []
    for _ in range(1 + RUNS):
        before = clock()
        backend.infer(batch)
        took.append(clock() - before)
    return max(min(took[1:]), 1e-9)


def _blank(backend: Backend, size: int) -> Pixels:
    return np.zeros((size, *backend.input_shape), np.uint8)
