"""One image on several cores while they have nothing else to do, and on one core as soon as images compete.

Parallel inference is quicker and costs more: on two cores of an AMD EPYC, `efficientnet_lite0_int8` takes 3.4 ms
instead of 5.4, and 6.6 ms of processor time instead of 5.2. Which of both counts is known only when an image's turn
has come. So the model is loaded twice, with one thread and with several, and whoever is alone then takes the latter:
adaptive parallelism, as search engines have it (Jeon et al., "Adaptive Parallelism for Web Search", EuroSys 2013).
ImageNet's ten networks give the same logits, bit for bit, with one to four threads.

Whether several threads pay depends on the model and on the machine, so a node measures it when it starts: two make
those of 2 ms and more 1.4 to 1.7 times quicker there, and those of 0.4 ms a tenth slower (`python -m
tests.bench.helpers`). But two virtual cores may be one real one, and a host moves them together and apart within
seconds: 4.2 ms on one thread, and on two 4.2 as well or 2.7. Two threads are therefore taken unless they are found to
be slower, and more only where they save a tenth. Measured with two cores only.
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
"""Threads. The networks of the cascades have some fifty layers of a tenth of a millisecond each."""
LEAST_GAIN: Final = 0.1
"""Share of the time that more than the fewest threads must save."""
MOST_LOSS: Final = 0.05
"""Share of the time by which the fewest may seem slower than one."""
RUNS: Final = 9
"""Of each, in turns; their medians are compared."""


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def divides(backend: str, providers: Sequence[str]) -> bool:
    """Whether the threads of one inference can be chosen: our kernels', OpenVINO's and ONNX Runtime's, on the CPU."""
    return backend in ("auto", "int8", "onnxruntime", "openvino") and tuple(providers) == ("CPUExecutionProvider",)


def open_wide(
    narrow: Backend, opened: Callable[[int], Backend], threads: int = 0, *, known: bool = False
) -> Backend | None:
    """A backend for an image that is alone; None where `narrow` is best.

    Args:
        narrow: the model on one thread.
        opened: loads the same model on so many threads.
        threads: that are wanted; 0 measures which of `TRIED` pay, as far as there are so many cores.
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
    for run in range(1 + RUNS):  # the first is slower, and counts for nothing
        for backend, its in turn:
            before = time.perf_counter()
            backend.infer(blank)
            if run:
                its.append(time.perf_counter() - before)
        turn.reverse()  # who comes second finds the processors awake
    return statistics.median(took[0]), statistics.median(took[1])
