"""One picture on several cores: which backend is opened for it, and when it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from edge.rung import EdgeResult, Look, Rung
from edge.wide import RUNS, TRIED, open_wide
from edge.workers import usable_cores
from hawkvision.clock import MonotonicClock
from hawkvision.config import EdgeConfig
from hawkvision.types import Logits, Pixels, Quality, Score
from hawkvision.vision.image import probe
from tests.edge.bench import SPEC, SURE, GatedBackend, bench
from tests.pictures import encoded

TWO_CORES = pytest.mark.skipif(usable_cores() < TRIED[0], reason="there is one core only")


class Working:
    """A backend that takes so much work, in units of some microseconds, and counts."""

    input_shape, classes = (16, 16, 3), 10

    def __init__(self, work: int) -> None:
        self.work = work
        self.inferred = self.closed = 0

    def infer(self, batch: Pixels) -> Logits:
        self.inferred += 1
        for _ in range(self.work):
            np.zeros(1000).sum()
        return np.zeros((len(batch), 10), np.float32)

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
    taken = open_wide(EdgeConfig(), narrow, opener)
    assert taken is opener.opened[max(threads for threads in TRIED if threads <= usable_cores())]
    assert [each.closed for each in (narrow, *opener.opened.values()) if each is not taken] == [
        0,
        *[1] * (len(opener.opened) - 1),
    ]


@TWO_CORES
def test_threads_that_do_not_are_not_and_no_more_of_them_are_tried() -> None:
    narrow, opener = Working(300), Opener(lambda _: 1000)
    assert open_wide(EdgeConfig(), narrow, opener) is None
    assert {threads: each.closed for threads, each in opener.opened.items()} == {TRIED[0]: 1}
    assert (narrow.closed, narrow.inferred) == (0, 1 + RUNS)


@pytest.mark.parametrize(
    ("config", "known", "threads"),
    [
        (EdgeConfig(intra_op_threads=1), False, None),
        (EdgeConfig(intra_op_threads=3), False, 3),
        (EdgeConfig(intra_op_threads=3), True, 3),
        pytest.param(EdgeConfig(), True, TRIED[0], marks=TWO_CORES),
        (EdgeConfig(backend="numpy"), False, None),
        (EdgeConfig(providers=("CUDAExecutionProvider",)), False, None),
    ],
)
def test_what_was_said_is_not_measured(config: EdgeConfig, known: bool, threads: int | None) -> None:
    narrow, opener = Working(1), Opener(lambda _: 1)
    wide = open_wide(config, narrow, opener, known=known)
    assert list(opener.opened) == ([] if threads is None else [threads])
    assert wide is (None if threads is None else opener.opened[threads])
    assert narrow.inferred == 0


@pytest.mark.parametrize(
    ("alone", "pictures", "wide", "narrow"), [(True, 1, 1, 0), (False, 1, 0, 1), (True, 2, 0, 1), (False, 2, 0, 1)]
)
def test_a_picture_that_is_alone_is_run_wide_and_no_other(alone: bool, pictures: int, wide: int, narrow: int) -> None:
    rung = Rung("small", GatedBackend(SURE), SPEC, 1.0, Score.TOP1, GatedBackend(SURE))
    body = encoded()
    look = Look(rung, body, probe(body), 3, 1_000_000, MonotonicClock(), alone=lambda: alone)
    assert all(isinstance(found, EdgeResult) for found in rung.look_together([look] * pictures))
    assert isinstance(rung.wide, GatedBackend)
    assert isinstance(rung.backend, GatedBackend)
    assert (rung.wide.inferred, rung.backend.inferred) == (wide, narrow)


def test_a_node_runs_wide_until_pictures_compete_and_closes_both_models() -> None:
    wide = Working(1)

    async def scenario() -> tuple[list[int], int]:
        async with bench(None, SURE, wide=wide) as it:
            counted = []
            await it.ask(target=Quality.FAST)
            counted += [wide.inferred, it.backend.inferred]
            await asyncio.gather(*(it.ask(target=Quality.FAST) for _ in range(8)))
            counted += [wide.inferred, it.backend.inferred]
            await it.ask(target=Quality.FAST)
            return [*counted, wide.inferred], it.backend.inferred

    (alone, none, after_many, together, again), at_last = asyncio.run(scenario())
    assert (alone, none) == (1, 0)
    assert together > 0
    assert (again, at_last) == (after_many + 1, together)
    assert wide.closed == 1
