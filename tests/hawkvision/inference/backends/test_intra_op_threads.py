"""Threads that help with an inference are found, and kept off the processor of the thread that they help."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hawkvision.core.types import LOGITS
from hawkvision.inference.adaptive_parallelism import usable_cores
from hawkvision.inference.backends.intra_op_threads import HelperThreads, can_step_aside, helpers_started
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.system.onnx_runtime import ort
from tests.hawkvision.inference.backend_conformance import random_images
from tests.hawkvision.inference.graphs import tiny_classifier
from tests.processors import confined_to

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="there is one core only")


NOBODY = 2**31 - 1
"""No thread's id: larger than the kernel gives out."""


class Sleepers:
    """Threads that wait until they are told to end."""

    def __init__(self, number: int) -> None:
        self._end, self._up = threading.Event(), threading.Barrier(number + 1)
        self.threads = [threading.Thread(target=self._wait, daemon=True) for _ in range(number)]
        for thread in self.threads:
            thread.start()
        self._up.wait()

    @property
    def ids(self) -> list[int]:
        return [thread.native_id or 0 for thread in self.threads]

    def end(self) -> None:
        self._end.set()
        for thread in self.threads:
            thread.join()

    def _wait(self) -> None:
        self._up.wait()
        self._end.wait()


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    two = Sleepers(2)
    yield two
    two.end()


def tasks() -> set[int]:
    """All threads of this process."""
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}


def own_name() -> str:
    return Path("/proc/thread-self/comm").read_text()


def opened(threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(tiny_classifier(), options, providers=["CPUExecutionProvider"])


def test_threads_of_onnx_runtime_are_found_and_the_starting_one_keeps_its_name() -> None:
    name, cores, before = own_name(), os.sched_getaffinity(0), tasks()
    assert can_step_aside(2)
    with helpers_started(2) as helpers:
        session = opened(2)
    assert len(helpers.threads) == 1
    assert set(helpers.threads) == tasks() - before
    assert (own_name(), os.sched_getaffinity(0)) == (name, cores)
    del session


def test_threads_that_others_start_meanwhile_are_none() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(own_name).result()  # so that it is there before
        with helpers_started(2) as helpers:
            others = pool.submit(Sleepers, 2).result()
            session = opened(2)
        others.end()
    assert len(helpers.threads) == 1
    assert not set(helpers.threads) & set(others.ids)
    del session


def test_helpers_that_are_not_all_found_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hawkvision.inference"), helpers_started(2) as helpers:
        session = opened(1)
    assert helpers.threads == ()
    assert "0 threads that help with inference were found, not 1" in caplog.text
    del session


def test_one_thread_has_no_helpers_and_more_threads_than_cores_are_left_alone() -> None:
    for threads in (1, len(os.sched_getaffinity(0)) + 1):
        assert not can_step_aside(threads)
        with helpers_started(threads) as helpers:
            session = opened(threads)
        assert helpers.threads == ()
        del session


def test_helpers_may_run_everywhere_but_where_their_caller_does(sleepers: Sleepers) -> None:
    everywhere, helpers = os.sched_getaffinity(0), HelperThreads(sleepers.ids)
    for here in sorted(everywhere) * 2:
        with confined_to(here):
            helpers.step_aside()
        assert [os.sched_getaffinity(helper) for helper in sleepers.ids] == [everywhere - {here}] * 2


def test_helper_that_cannot_be_moved_is_said_once_and_all_may_run_everywhere_again(
    sleepers: Sleepers, caplog: pytest.LogCaptureFixture
) -> None:
    everywhere = sorted(os.sched_getaffinity(0))
    helpers = HelperThreads((*sleepers.ids, NOBODY))
    with caplog.at_level(logging.WARNING, "hawkvision.inference"), confined_to(everywhere[0]):
        helpers.step_aside()
        helpers.step_aside()
    assert [os.sched_getaffinity(helper) for helper in sleepers.ids] == [set(everywhere)] * 2
    assert len(caplog.records) == 1
    assert "can no longer be kept off their caller's core" in caplog.text


def test_inference_keeps_its_helpers_off_the_core_of_whoever_asks() -> None:
    everywhere, before = os.sched_getaffinity(0), tasks()
    backend = OnnxRuntimeBackend(tiny_classifier(), threads=2)
    (helper,) = tasks() - before
    image = random_images(backend, 1)
    for here in sorted(everywhere) * 2:
        with confined_to(here):
            backend.infer(image)
        assert os.sched_getaffinity(helper) == everywhere - {here}


def test_callers_at_once_get_their_own_answers_from_one_session() -> None:
    wide, narrow = (OnnxRuntimeBackend(tiny_classifier(), threads=threads) for threads in (2, 1))
    images = random_images(narrow, 64)
    wanted = narrow.infer(images)[LOGITS]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: wide.infer(images[number : number + 1])[LOGITS], range(len(images))))
    np.testing.assert_array_equal(np.concatenate(found), wanted)
