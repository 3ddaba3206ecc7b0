"""The backend of two twins: every image is answered, with the same bits, whichever side computes it or fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import numpy as np
import pytest

from fpga.offload.calibration import LEAST_IMAGES, TURNS, WARM_UP_RUNS, measure_travel, measure_work
from fpga.offload.model import ByRate
from fpga.offload.runtime import OffloadBackend
from hawkvision.core.clock import Clock, ManualClock
from hawkvision.core.errors import BackendError
from hawkvision.core.types import LOGITS, Pixels, Tensors
from hawkvision.inference.backends.interface import Backend, Outputs, check_batch, check_open
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph
from tests.fpga.offload.offload_world import MODEL
from tests.hawkvision.inference.backend_conformance import BackendConformance, assert_same, random_images
from tests.hawkvision.integer.graphs import random_graph

GRAPH = random_graph(side=8, planes=3)


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


def offload(share: float, fpga: Backend, cpu: Backend, clock: Clock, places: int = 8) -> OffloadBackend:
    """A backend with one share at every rate."""
    return OffloadBackend(fpga, cpu, replace(MODEL, places=places), clock, ByRate.always(share))


class Running:
    """An offload backend, its sides and its clock; a share is reached after a few simulated seconds."""

    def __init__(self, share: float, places: int = 8, fails_each: int = 0) -> None:
        self.fpga, self.cpu, self.clock = Twin(fails_each=fails_each), Twin(), ManualClock()
        self.both = offload(share, self.fpga, self.cpu, self.clock, places)
        self.images = random_images(self.both, 1)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.clock.advance(0.25)
            self.both.infer(self.images)

    def until(self, condition: Callable[[], bool]) -> None:
        """Pass time until something is so that another thread brings about."""
        for _ in range(2_000):
            self.pass_time(1)
            if condition():
                return
        raise AssertionError("it never was")


class TestOffloadConforms(BackendConformance):
    atol = 0.0

    @pytest.fixture(params=[0.0, 0.5, 1.0])
    def make_backend(self, request: pytest.FixtureRequest) -> Callable[[], Backend]:
        return lambda: offload(request.param, Twin(), Twin(), ManualClock())


def test_batch_is_split_by_share_and_put_together_in_order() -> None:
    run = Running(0.5, places=200)
    run.pass_time(20)
    before = run.both.offloaded()
    batch = random_images(run.both, 200)
    np.testing.assert_array_equal(run.both.infer(batch)[LOGITS], Twin().infer(batch)[LOGITS])
    after = run.both.offloaded()
    assert 60 < after.fpga - before.fpga < 140
    assert after.fpga - before.fpga + after.cpu - before.cpu == 200


def test_images_without_a_place_are_computed_by_the_cpu() -> None:
    run = Running(1.0, places=3)
    run.pass_time(10)
    before = run.both.offloaded()
    run.both.infer(random_images(run.both, 10))
    after = run.both.offloaded()
    assert (after.fpga - before.fpga, after.cpu - before.cpu, after.no_place - before.no_place) == (3, 7, 7)


def test_failed_fpga_gets_nothing_until_a_probe_agrees(caplog: pytest.LogCaptureFixture) -> None:
    run = Running(1.0)
    run.pass_time(10)
    run.fpga.dead = True
    with caplog.at_level(logging.WARNING, "hawkvision.fpga"):
        run.both.infer(run.images)
    assert "the FPGA failed, all images go to the CPU" in caplog.text
    before = run.both.offloaded()
    run.pass_time(0.75)
    assert not run.both.fpga_up
    assert run.both.offloaded().cpu - before.cpu == 3
    run.fpga.dead = False
    run.until(lambda: run.both.fpga_up)
    run.pass_time(10)
    assert run.both.offloaded().fpga > before.fpga
    assert run.both.share == 1.0


def test_fpga_that_answers_a_probe_wrongly_stays_out() -> None:
    run = Running(1.0)
    run.pass_time(10)
    run.fpga.dead = True
    run.both.infer(run.images)
    run.fpga.dead, run.fpga.wrong_by = False, 1.0
    answered = run.both.offloaded().fpga
    run.until(lambda: run.both.offloaded().failures >= 3)
    assert not run.both.fpga_up
    assert run.both.offloaded().fpga == answered


@pytest.mark.parametrize("fails_each", [1, 2, 11])
def test_many_threads_and_a_failing_fpga_lose_nothing(fails_each: int) -> None:
    run = Running(0.7, places=4, fails_each=fails_each)
    run.pass_time(20)
    before = run.both.offloaded()
    batches = [random_images(run.both, 1 + seed % 4, seed) for seed in range(100)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(run.both.infer, batches))
    for batch, tensors in zip(batches, found, strict=True):
        assert_same(tensors, Twin().infer(batch))
    after = run.both.offloaded()
    assert after.fpga + after.cpu - before.fpga - before.cpu == sum(map(len, batches))
    assert after.failures > 0


def test_no_more_images_are_on_their_way_than_there_are_places() -> None:
    run = Running(1.0, places=2)
    run.pass_time(10)
    run.fpga.hold = threading.Event()
    calls = run.fpga.calls
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(run.both.infer, run.images) for _ in range(6)]
        for _, future in zip(range(4), as_completed(waiting, timeout=60.0), strict=False):
            assert future.result() is not None
        assert run.fpga.calls - calls == 2
        run.fpga.hold.set()
    assert all(future.result() is not None for future in waiting)


def test_sides_that_are_no_twins_are_refused() -> None:
    other = Twin(random_graph(side=8, planes=3, classes=7))
    with pytest.raises(BackendError, match="expected twins"):
        offload(1.0, Twin(), other, ManualClock())


def test_closing_does_not_wait_for_a_probe_of_a_device_that_says_nothing() -> None:
    run = Running(1.0)
    run.pass_time(10)
    run.fpga.dead = True
    run.both.infer(run.images)
    run.fpga.hold = run.fpga.closing
    run.pass_time(2)
    began = time.monotonic()
    run.both.close()
    assert time.monotonic() - began < 30, "half of what the device holds it for"
    assert run.fpga.closed
    assert run.cpu.closed


def compute(cpu_s: float) -> None:
    """Take a core for so long."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


class Busy(Twin):
    """Takes a core for as long as its `work` says of each call, and then waits without one."""

    def __init__(self, work: Callable[[int], float], wait_s: float = 0.0) -> None:
        super().__init__()
        self.work, self.wait_s = work, wait_s
        self.at_once = self.most_at_once = 0

    def infer(self, batch: Pixels) -> Tensors:
        with self._lock:
            self.calls += 1
            work_s = self.work(self.calls - WARM_UP_RUNS)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        compute(work_s)
        threading.Event().wait(self.wait_s)
        with self._lock:
            self.at_once -= 1
        return {LOGITS: np.zeros((len(batch), self._graph.classes), np.float32)}


def test_work_is_the_cpu_time_of_images_that_come_at_random_several_at_once() -> None:
    busy = Busy(lambda _: 4e-3, wait_s=300e-3)
    found = measure_work(busy, (100.0, 20.0), 0.5)
    assert found.rates_hz == tuple(sorted(found.rates_hz))
    # A clock of a stalled machine counts what others took as well; waits would be 300 ms.
    assert all(4e-3 < each < 150e-3 for each in found.values)
    assert busy.most_at_once > 1


def test_a_machine_that_slows_down_meanwhile_slows_the_work_at_all_rates_alike() -> None:
    images = 2 * TURNS
    for _ in range(5):  # what a machine that stands still adds falls on either; one after the other would never do
        slowing = Busy(lambda call: 5e-3 if call > images else 0.0)
        once, again = measure_work(slowing, (1e3, 1e3), 1.0, most=images).values
        assert slowing.calls == WARM_UP_RUNS + 2 * images
        if 0.2 < once / again < 5.0:
            return
    pytest.fail("one rate after the other, which leaves all of it to the second")


def test_a_machine_that_stands_still_once_does_not_make_a_slow_link() -> None:
    still_s = 1.0
    standing = Busy(lambda call: still_s if call == 2 else 0.0)
    found_s = measure_travel(standing, 0.0, 0.0, seconds=still_s)
    assert found_s < 0.1 * still_s / LEAST_IMAGES, "far less than that image's share of a mean"
