"""The backend of two twins: every image is answered, with the same bits, whichever side computes it or fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import pytest

from fpga.backends.offload import GROW_AFTER, PLACES, OffloadBackend
from hawkvision.core.errors import BackendError
from hawkvision.core.types import LOGITS, Pixels, Tensors
from hawkvision.inference.backends.interface import Backend, Outputs, check_batch, check_open
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph
from tests.clocks import ManualClock
from tests.hawkvision.inference.backend_conformance import BackendConformance, assert_same, random_images
from tests.hawkvision.integer.graphs import random_graph

GRAPH = random_graph(side=8, planes=3)
DEADLINE_S = 1.0


class Twin:
    """The reference as a backend; every `fails_each`-th call fails, and so do all while it is `dead`."""

    input_shape = (8, 8, 3)

    def __init__(self, graph: IntegerGraph = GRAPH, fails_each: int = 0) -> None:
        self._graph, self._fails_each = graph, fails_each
        self.outputs: Outputs = {LOGITS: (graph.classes,)}
        self.dead = self.closed = False
        self.calls = 0
        self.wrong_by = 0.0
        self.hold: threading.Event | None = None
        self.closing = threading.Event()
        self._lock = threading.Lock()

    def infer(self, batch: Pixels) -> Tensors:
        check_open("twin", self.closed)
        check_batch(batch, self.input_shape)
        with self._lock:
            self.calls += 1
            failing = self.dead or (self._fails_each and self.calls % self._fails_each == 0)
        if self.hold is not None:
            assert self.hold.wait(60)
        if failing:
            raise BackendError("the line broke")
        found = reference.logits(self._graph, batch) * np.float32(self._graph.logit_scale)
        return {LOGITS: np.asarray(found + np.float32(self.wrong_by), np.float32)}

    def close(self) -> None:
        self.closed = True
        self.closing.set()


class Running:
    """An offload backend, its sides and its clock."""

    def __init__(self, places: int = 1, fails_each: int = 0) -> None:
        self.fpga, self.cpu, self.clock = Twin(fails_each=fails_each), Twin(), ManualClock()
        self.both = OffloadBackend(self.fpga, self.cpu, 2, DEADLINE_S, self.clock)
        self.both.places = places
        self.images = random_images(self.both, 1)

    def until(self, condition: Callable[[], bool]) -> None:
        """Pass time until something is so that another thread brings about."""
        for _ in range(20_000):
            self.clock.advance(0.25)
            self.both.infer(self.images)
            if condition():
                return
        raise AssertionError("it never was")


class TestOffloadConforms(BackendConformance):
    atol = 0.0

    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: OffloadBackend(Twin(), Twin(), 1, DEADLINE_S, ManualClock())


def test_images_without_a_place_are_computed_by_the_cpu_and_put_together_in_order() -> None:
    run = Running(places=3)
    batch = random_images(run.both, 10)
    np.testing.assert_array_equal(run.both.infer(batch)[LOGITS], Twin().infer(batch)[LOGITS])
    counts = run.both.offloaded()
    assert (counts.fpga, counts.cpu, counts.no_place) == (3, 7, 7)


def test_a_device_gets_as_many_images_at_once_as_it_answers_in_time() -> None:
    run, longest_s = Running(), 0.0

    class Queue(Twin):
        """A device that takes a quarter of the deadline for each image that it has."""

        def infer(self, batch: Pixels) -> Tensors:
            nonlocal longest_s
            longest_s = len(batch) * DEADLINE_S / 4
            run.clock.advance(longest_s)
            return super().infer(batch)

    run.both._fpga = Queue()
    batch = random_images(run.both, 20)
    for _ in range(20 * GROW_AFTER):
        run.both.infer(batch)
    grown = run.both.offloaded()
    assert 2 <= run.both.places <= 5
    assert 0 < grown.late <= 0.01 * grown.fpga
    run.both._fpga = run.fpga
    for _ in range(20 * GROW_AFTER):
        run.both.infer(batch)
    assert run.both.places == PLACES


def test_places_that_nobody_needs_do_not_grow() -> None:
    run = Running(places=2)
    for _ in range(2 * GROW_AFTER):
        run.both.infer(run.images)
    assert (run.both.places, run.both.offloaded().fpga) == (2, 2 * GROW_AFTER)


def test_failed_fpga_gets_nothing_until_a_probe_agrees(caplog: pytest.LogCaptureFixture) -> None:
    run = Running()
    run.fpga.dead = True
    with caplog.at_level(logging.WARNING, "hawkvision.fpga"):
        run.both.infer(run.images)
    assert "the FPGA failed, all images go to the CPU" in caplog.text
    run.clock.advance(0.75)
    run.both.infer(run.images)
    assert (run.both.fpga_up, run.both.offloaded().cpu, run.fpga.calls) == (False, 2, 1)
    run.fpga.dead = False
    run.until(lambda: run.both.fpga_up)
    before = run.both.offloaded().fpga
    run.both.infer(run.images)
    assert run.both.offloaded().fpga == before + 1


def test_fpga_that_answers_a_probe_wrongly_stays_out() -> None:
    run = Running()
    run.fpga.dead = True
    run.both.infer(run.images)
    run.fpga.dead, run.fpga.wrong_by = False, 1.0
    run.until(lambda: run.both.offloaded().failures >= 3)
    assert not run.both.fpga_up
    assert run.both.offloaded().fpga == 0


@pytest.mark.parametrize("fails_each", [1, 2, 11])
def test_many_threads_and_a_failing_fpga_lose_nothing(fails_each: int) -> None:
    run = Running(places=4, fails_each=fails_each)
    batches = [random_images(run.both, 1 + seed % 4, seed) for seed in range(100)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(run.both.infer, batches))
    for batch, tensors in zip(batches, found, strict=True):
        assert_same(tensors, Twin().infer(batch))
    counts = run.both.offloaded()
    assert counts.fpga + counts.cpu == sum(map(len, batches))
    assert counts.failures > 0


def test_no_more_images_are_on_their_way_than_there_are_places() -> None:
    run = Running(places=2)
    run.fpga.hold = threading.Event()
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(run.both.infer, run.images) for _ in range(6)]
        for _, future in zip(range(4), as_completed(waiting, timeout=60.0), strict=False):
            assert future.result() is not None
        assert run.fpga.calls == 2
        run.fpga.hold.set()
    assert all(future.result() is not None for future in waiting)


def test_sides_that_are_no_twins_are_refused() -> None:
    other = Twin(random_graph(side=8, planes=3, classes=7))
    with pytest.raises(BackendError, match="expected twins"):
        OffloadBackend(Twin(), other, 1, 1.0, ManualClock())


def test_closing_does_not_wait_for_a_probe_of_a_device_that_says_nothing() -> None:
    run = Running()
    run.fpga.dead = True
    run.both.infer(run.images)
    run.fpga.hold = run.fpga.closing
    run.clock.advance(2.0)
    run.both.infer(run.images)
    began = time.monotonic()
    run.both.close()
    assert time.monotonic() - began < 30, "half of what the device holds it for"
    assert run.fpga.closed
    assert run.cpu.closed
