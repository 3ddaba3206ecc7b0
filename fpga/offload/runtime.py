"""The offload backend: each image goes to the FPGA, or to the CPU, which gives the same bits.

    image → drawn by share ─┬─ FPGA, if it has a place ── error? ─→ CPU
                            └─ CPU

Images are drawn independently, so that arrivals stay random on both sides, as the model assumes. Errors of the FPGA are
counted and logged, and its images are computed on the CPU, so none is lost. A failed FPGA is probed in the background
and must give the CPU's logits.

Callers wait in their own threads; to keep the FPGA busy there must be as many as it has places, plus the cores.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client.registry import Collector

from fpga.backends.base import FpgaBackend
from fpga.backends.metrics import FpgaCollector, FpgaCounts
from fpga.offload.controller import Observation, ShareController
from fpga.offload.cost_model import Machine, idle_latency_s, service_s
from fpga.offload.metrics import OffloadCollector, OffloadCounts
from fpga.offload.plan_search import OffloadPlan, ShareSchedule, schedule
from hawkvision.core.clock import Clock
from hawkvision.core.errors import BackendError, ConfigError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backends.interface import Backend, Outputs, check_batch, check_open, joined

T = TypeVar("T")

log = logging.getLogger("hawkvision.fpga")

RATES: Final = (0.25, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
"""Arrival rates of the schedule, as multiples of the FPGA's rate."""
HEADROOM: Final = 0.8
"""Share of the deadline that is planned for: near the FPGA's rate, a small error of the rate doubles the wait."""


@dataclass(frozen=True)
class OffloadSettings:
    """A plan for one workload, as the runtime needs it."""

    schedule: ShareSchedule
    service_s: float
    """Modelled seconds from one image to the next on the FPGA."""
    travel_s: float
    """Modelled seconds on the FPGA's side beside that, without a queue."""
    deadline_s: float
    places: int
    cores: int


def offload_of(plan: OffloadPlan, machine: Machine) -> OffloadSettings:
    """The runtime's settings from a plan for one workload, for all arrival rates.

    Raises:
        ConfigError: if the plan has several workloads, or no FPGA design of a whole network.
    """
    if len(plan.workloads) != 1:
        raise ConfigError(f"offload: expected a plan for one workload, got {len(plan.workloads)}")
    workload = plan.workloads[0]
    profile = plan.choices[0].profile or next((profile for profile in workload.profiles if profile.runnable), None)
    if profile is None or not profile.runnable:
        raise ConfigError(f"offload: {workload.name}: expected an FPGA design of the whole network, there is none")
    busy_s = service_s(profile, machine.link)
    travel_s = max(0.0, idle_latency_s(profile, machine.link) - busy_s)
    only = replace(workload, deadline_s=workload.deadline_s * HEADROOM, profiles=(profile,))
    shares = schedule(only, machine, plan.objective, [multiple / busy_s for multiple in RATES])
    return OffloadSettings(shares, busy_s, travel_s, workload.deadline_s, machine.places, machine.cores)


class OffloadBackend:
    """A backend that owns two others and shares images between them.

    Raises:
        BackendError: if the two differ in input shape or outputs.
    """

    def __init__(self, fpga: Backend, cpu: Backend, plan: OffloadSettings, clock: Clock, seed: int = 0) -> None:
        shapes = (fpga.input_shape, fpga.outputs), (cpu.input_shape, cpu.outputs)
        if shapes[0] != shapes[1]:
            raise BackendError(f"offload: the FPGA takes and gives {shapes[0]}, the CPU {shapes[1]}; expected twins")
        self._fpga, self._cpu, self._plan, self._clock = fpga, cpu, plan, clock
        self._controller = ShareController(plan.schedule, plan.service_s)
        self._draws = random.Random(seed)  # noqa: S311 - which side computes an image is no secret
        self._lock = threading.Lock()
        self._cores = threading.Semaphore(plan.cores)
        # One thread per place waits for the FPGA's part of a batch, and one probes.
        self._threads = ThreadPoolExecutor(plan.places + 1, thread_name_prefix="hawkvision-offload")
        self._probing = self._closed = False
        self._outstanding = 0
        self._answered_at = -1.0
        self._tally = _RunningCounts()
        self._step_begun = _RunningCounts()

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """See `Backend.input_shape`."""
        return self._cpu.input_shape

    @property
    def outputs(self) -> Outputs:
        """See `Backend.outputs`."""
        return self._cpu.outputs

    def infer(self, batch: Pixels) -> Tensors:
        """See `Backend.infer`."""
        check_open("offload", self._closed)
        check_batch(batch, self.input_shape)
        drawn = self._draw(len(batch))
        if not drawn.any():
            return self._on_cpu(batch)
        if drawn.all():
            return self._on_fpga(batch)
        waiting = self._start(self._on_fpga, batch[drawn])
        try:
            by_cpu = self._on_cpu(batch[~drawn])
        finally:
            by_fpga = waiting.result()
        places = np.argsort(np.concatenate((np.flatnonzero(drawn), np.flatnonzero(~drawn))))
        return {name: found[places] for name, found in joined([by_fpga, by_cpu]).items()}

    def counts(self) -> FpgaCounts:
        """The totals of the FPGA."""
        if isinstance(self._fpga, FpgaBackend):
            return self._fpga.counts()
        return FpgaCounts(self._tally.fpga, {}, {}, None, None)

    def collectors(self) -> Iterable[Collector]:
        """See `hawkvision.core.metrics.Instrumented`."""
        return (FpgaCollector(self.counts), OffloadCollector(self.offloaded))

    def offloaded(self) -> OffloadCounts:
        """Counts of both sides, and the current decision."""
        with self._lock:
            now, controller = self._tally, self._controller
            return OffloadCounts(
                fpga=now.fpga,
                cpu=now.cpu,
                no_place=now.no_place,
                failed=now.failed,
                failures=now.failures,
                late=now.late,
                fpga_cpu_s=now.fpga_cpu_s,
                cpu_cpu_s=now.cpu_cpu_s,
                share=controller.share,
                rate_hz=controller.rate_hz,
                slowness=controller.slowness,
                fpga_up=not controller.failed,
            )

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True
        self._fpga.close()  # before the threads, because one may wait for a silent device
        self._threads.shutdown(wait=True)
        self._cpu.close()

    def _draw(self, n: int) -> NDArray[np.bool_]:
        """Draw which of `n` new images the FPGA gets, and reserve their places."""
        now = self._clock.now()
        with self._lock:
            self._tally.arrivals += n
            if self._controller.due(now):
                self._controller.step(self._observe(), now)
            if self._controller.probe_due(now) and not self._probing:
                self._probing = True
                self._start(self._probe)
            drawn = np.array([self._draws.random() < self._controller.share for _ in range(n)], np.bool_)
            wanted, free = int(drawn.sum()), self._plan.places - self._outstanding
            if wanted > free:
                drawn[np.flatnonzero(drawn)[free:]] = False
                self._tally.no_place += wanted - free
            self._outstanding += int(drawn.sum())
        return drawn

    def _start(self, work: Callable[..., T], *of: Pixels) -> Future[T]:
        try:
            return self._threads.submit(work, *of)
        except RuntimeError:  # closed meanwhile
            raise BackendError("the offload backend is closed") from None

    def _observe(self) -> Observation:
        now, then = self._tally, self._step_begun
        self._step_begun = now.copy()
        return Observation(
            arrivals=now.arrivals - then.arrivals,
            fpga_done=now.fpga - then.fpga,
            fpga_late=now.late - then.late,
            spaced=now.spaced - then.spaced,
            spacing_s=now.spacing_s - then.spacing_s,
        )

    def _on_fpga(self, batch: Pixels) -> Tensors:
        n, sent, cpu_before = len(batch), self._clock.now(), time.thread_time()
        failure: BackendError | None = None
        try:
            found = self._fpga.infer(batch)
        except BackendError as error:
            failure = error
        finally:
            with self._lock:
                self._outstanding -= n
                self._tally.fpga_cpu_s += time.thread_time() - cpu_before
        if failure is not None:
            self._failed(n, failure)
            return self._on_cpu(batch)
        answered = self._clock.now()
        with self._lock:
            self._tally.fpga += n
            self._tally.late += n if answered - sent > self._plan.deadline_s else 0
            # The image had reached the device before the last reply left it, so the device was busy in between.
            if sent + self._plan.travel_s <= self._answered_at:
                self._tally.spaced += n
                self._tally.spacing_s += answered - self._answered_at
            self._answered_at = max(self._answered_at, answered)
        return found

    def _failed(self, images: int, error: BackendError) -> None:
        with self._lock:
            self._tally.failures += 1
            self._tally.failed += images
            first = not self._controller.failed
            self._controller.fail(self._clock.now())
        if first:
            log.warning("the FPGA failed, all images go to the CPU until it answers a probe: %s", error)

    def _on_cpu(self, batch: Pixels) -> Tensors:
        with self._cores:
            before = time.thread_time()
            found = self._cpu.infer(batch)
            used_s = time.thread_time() - before
        with self._lock:
            self._tally.cpu += len(batch)
            self._tally.cpu_cpu_s += used_s
        return found

    def _probe(self) -> None:
        """Compare a failed FPGA's answer with the CPU's."""
        image = np.full((1, *self.input_shape), 128, np.uint8)
        try:
            found, expected = self._fpga.infer(image), self._cpu.infer(image)
            right = all(np.array_equal(found[name], tensor) for name, tensor in expected.items())
            said = "it gave other numbers than the CPU"
        except BackendError as error:
            right, said = False, str(error)
        with self._lock:
            self._probing = False
            if right:
                self._controller.recover()
            else:
                self._tally.failures += 1
        if right:
            log.warning("the FPGA answers again, and as the CPU does")
        else:
            log.info("probing the failed FPGA: %s", said)


@dataclass(slots=True)
class _RunningCounts:
    """Running sums for `OffloadCounts` and `Observation`."""

    arrivals: int = 0
    fpga: int = 0
    cpu: int = 0
    no_place: int = 0
    failed: int = 0
    failures: int = 0
    late: int = 0
    spaced: int = 0
    spacing_s: float = 0.0
    fpga_cpu_s: float = 0.0
    cpu_cpu_s: float = 0.0

    def copy(self) -> _RunningCounts:
        """A copy."""
        return replace(self)
