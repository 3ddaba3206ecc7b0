"""One picture on several cores while they have nothing else to do, and on one core as soon as pictures compete.

Parallel inference is quicker and costs more: on two cores of an Intel Xeon, `efficientnet_lite0_int8` takes 5.4 ms
instead of 7.7, but two callers at once get 250 answers a second instead of 280. Which of both counts is known only when
a picture's turn has come. So the model is loaded twice, with one thread and with several, and whoever is alone then
takes the latter: adaptive parallelism, as search engines have it (Jeon et al., "Adaptive Parallelism for Web Search",
EuroSys 2013). ImageNet's ten networks give the same logits, bit for bit, with one to four threads.

Whether several threads pay depends on the model and on the machine: small layers do not divide, and two virtual cores
may be one real one. So a node measures it when it starts. Speed was measured with two cores only.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hawkvision.vision.backend import Backend

log = logging.getLogger("hawkvision.vision")

TRIED: Final = (2, 4)
"""Threads. The networks of the ladders have some fifty layers of a tenth of a millisecond each."""
LEAST_GAIN: Final = 0.1
"""Share of the time that several threads must save."""
RUNS: Final = 9
"""Of each, in turns; their medians are compared."""


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def divides(backend: str, providers: Sequence[str]) -> bool:
    """Whether the threads of one inference can be chosen: ONNX Runtime's, on the CPU alone."""
    return backend == "onnxruntime" and tuple(providers) == ("CPUExecutionProvider",)


def open_wide(
    narrow: Backend, opened: Callable[[int], Backend], threads: int = 0, *, known: bool = False
) -> Backend | None:
    """A backend for a picture that is alone; None where there is none that is better than `narrow`.

    Args:
        narrow: the model on one thread.
        opened: loads the same model on so many threads.
        threads: that are wanted; 0 measures which of `TRIED` are best, as far as there are so many cores.
        known: that the fewest of these pay, so that nothing is measured: for models that are loaded while somebody
            waits, or others are loaded beside them.

    Raises:
        BackendError: if it cannot be loaded again.
    """
    if threads:
        return opened(threads) if threads > 1 else None
    possible = [number for number in TRIED if number <= usable_cores()]
    if known:
        return opened(possible[0]) if possible else None
    best = narrow
    for number in possible:
        candidate = opened(number)
        before_s, with_s = _compared(best, candidate)
        quicker = with_s <= (1.0 - LEAST_GAIN) * before_s
        log.info("%d threads for a picture that is alone: %.2f ms, %.2f before", number, with_s * 1e3, before_s * 1e3)
        loser = best if quicker else candidate
        if loser is not narrow:
            loser.close()
        if not quicker:
            break
        best = candidate
    return None if best is narrow else best


def _compared(one: Backend, other: Backend) -> tuple[float, float]:
    """Median seconds of a blank picture with each."""
    blank = np.zeros((1, *one.input_shape), np.uint8)
    took: tuple[list[float], list[float]] = ([], [])
    for run in range(1 + RUNS):  # the first is slower, and counts for nothing
        for backend, its in zip((one, other), took, strict=True):
            before = time.perf_counter()
            backend.infer(blank)
            if run:
                its.append(time.perf_counter() - before)
    return statistics.median(took[0]), statistics.median(took[1])
