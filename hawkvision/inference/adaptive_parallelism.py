"""Uses several cores for one image while no other image waits, and one core otherwise.

Parallel inference is faster but takes more processor time. Which of both matters is known only when an image is about
to run. So a node loads the model twice, with one thread and with several, and a lone image uses the latter (Jeon et
al., "Adaptive Parallelism for Web Search", EuroSys 2013). The logits do not depend on the number of threads.

Whether several threads pay depends on model and machine, so a node measures it at its start. It takes two threads
unless they are slower, and more only if they save a tenth. Figures: `docs/design/inference-threads.md`.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hawkvision.inference.backends.interface import Backend

log = logging.getLogger("hawkvision.inference")

TRIED: Final = (2, 4)
"""Numbers of threads to try. The networks of the cascades have some fifty layers of a tenth of a millisecond each."""
LEAST_GAIN: Final = 0.1
"""Share of the time that more than the fewest threads must save."""
MOST_LOSS: Final = 0.05
"""Share of the time by which the fewest threads may seem slower than one."""
RUNS: Final = 9
"""Runs of each number of threads, in turns; their medians are compared."""


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def divides(backend: str, providers: Sequence[str]) -> bool:
    """Whether the threads of an inference can be chosen: with our kernels and ONNX Runtime on the CPU."""
    return backend in ("auto", "int8", "onnxruntime") and tuple(providers) == ("CPUExecutionProvider",)


def open_wide(
    narrow: Backend, opened: Callable[[int], Backend], threads: int = 0, *, known: bool = False
) -> Backend | None:
    """A backend for an image that runs alone; None if `narrow` is the fastest.

    Args:
        narrow: the model on one thread.
        opened: loads the same model on so many threads.
        threads: the number of threads; 0 measures which of `TRIED` pay, up to the number of cores.
        known: takes the fewest of these without a measurement, for models that are loaded while requests wait, or
            beside other models.

    Raises:
        BackendError: if the model cannot be loaded again.
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
        pays = with_s <= (1.0 + MOST_LOSS if best is narrow else 1.0 - LEAST_GAIN) * before_s
        log.info("%d threads for an image that is alone: %.2f ms, %.2f before", number, with_s * 1e3, before_s * 1e3)
        loser = best if pays else candidate
        if loser is not narrow:
            loser.close()
        if not pays:
            break
        best = candidate
    return None if best is narrow else best


def _compared(one: Backend, other: Backend) -> tuple[float, float]:
    """Median seconds of a blank image with each."""
    blank = np.zeros((1, *one.input_shape), np.uint8)
    took: tuple[list[float], list[float]] = ([], [])
    turn = list(zip((one, other), took, strict=True))
    for run in range(1 + RUNS):  # the first run is slower, and does not count
        for backend, its in turn:
            before = time.perf_counter()
            backend.infer(blank)
            if run:
                its.append(time.perf_counter() - before)
        turn.reverse()  # the second one finds the processors awake
    return statistics.median(took[0]), statistics.median(took[1])
