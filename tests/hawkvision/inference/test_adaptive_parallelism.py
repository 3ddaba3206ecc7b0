"""One image on several cores: which backend is opened for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from hawkvision.core.types import LOGITS, Pixels, Tensors
from hawkvision.inference.adaptive_parallelism import RUNS, TRIED, divides, open_wide, usable_cores
from hawkvision.inference.backends.interface import Outputs

TWO_CORES = pytest.mark.skipif(usable_cores() < TRIED[0], reason="there is one core only")


class Working:
    """A backend that takes so much work, in units of some microseconds, and counts."""

    input_shape = (16, 16, 3)
    outputs: ClassVar[Outputs] = {LOGITS: (10,)}

    def __init__(self, work: int) -> None:
        self.work = work
        self.inferred = self.closed = 0

    def infer(self, batch: Pixels) -> Tensors:
        self.inferred += 1
        for _ in range(self.work):
            np.zeros(1000).sum()
        return {LOGITS: np.zeros((len(batch), 10), np.float32)}

    def close(self) -> None:
        self.closed += 1


class Opener:
    """Opens such backends, by number of threads, and remembers them."""

    def __init__(self, work: Callable[[int], int]) -> None:
        self.work = work
        self.opened: dict[int, Working] = {}

    def __call__(self, threads: int) -> Working:
        return self.opened.setdefault(threads, Working(self.work(threads)))


@TWO_CORES
def test_threads_that_make_the_model_quicker_are_taken() -> None:
    narrow, opener = Working(1000), Opener(lambda threads: 400 // threads)
    taken = open_wide(narrow, opener)
    assert taken is opener.opened[max(threads for threads in TRIED if threads <= usable_cores())]
    assert [each.closed for each in (narrow, *opener.opened.values()) if each is not taken] == [
        0,
        *[1] * (len(opener.opened) - 1),
    ]


@TWO_CORES
def test_threads_that_do_not_are_not_and_no_more_of_them_are_tried() -> None:
    narrow, opener = Working(300), Opener(lambda _: 1000)
    assert open_wide(narrow, opener) is None
    assert {threads: each.closed for threads, each in opener.opened.items()} == {TRIED[0]: 1}
    assert (narrow.closed, narrow.inferred) == (0, 1 + RUNS)


@pytest.mark.parametrize(
    ("wanted", "known", "threads"),
    [(1, False, None), (3, False, 3), (3, True, 3), pytest.param(0, True, TRIED[0], marks=TWO_CORES)],
)
def test_what_was_said_is_not_measured(wanted: int, known: bool, threads: int | None) -> None:
    narrow, opener = Working(1), Opener(lambda _: 1)
    wide = open_wide(narrow, opener, wanted, known=known)
    assert list(opener.opened) == ([] if threads is None else [threads])
    assert wide is (None if threads is None else opener.opened[threads])
    assert narrow.inferred == 0


@pytest.mark.parametrize(
    ("backend", "providers", "does"),
    [
        ("onnxruntime", ("CPUExecutionProvider",), True),
        ("onnxruntime", ("CUDAExecutionProvider", "CPUExecutionProvider"), False),
        ("noop", ("CPUExecutionProvider",), False),
        ("fpga-ref", ("CPUExecutionProvider",), False),
    ],
)
def test_only_onnx_runtime_on_the_cpu_divides_an_inference(
    backend: str, providers: tuple[str, ...], does: bool
) -> None:
    assert divides(backend, providers) is does
