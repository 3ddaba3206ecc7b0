"""The offload backend: each image goes to the FPGA while that has a place, else to the CPU, which gives the same bits.

    image ─┬─ FPGA, if it has a place ── error? ─→ CPU
           └─ CPU

The FPGA has as many places as it answers in within the deadline: one more after `GROW_AFTER` answers in time from each
while all were taken, half as many after a late one, as TCP finds its window (Jacobson, SIGCOMM 1988). Its errors are
counted and logged, and its images are computed on the CPU, so none is lost. A failed FPGA is probed in the background
and must give the CPU's logits.

Callers wait in their own threads; to keep the FPGA busy there must be as many as it has places, plus the cores.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fpga.backends.base import FpgaBackend, FpgaCollector, FpgaCounts
from fpga.backends.device import DeviceBackend
from fpga.backends.local import ReferenceBackend
from fpga.reports.build_report import DesignInfo
from hawkvision.core.clock import Clock
from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backends.interface import Backend, Outputs, check_batch, check_open, joined
from hawkvision.integer.ir import IntegerGraph

T = TypeVar("T")

log = logging.getLogger("hawkvision.fpga")

PLACES: Final = 16
"""Most images in flight to the FPGA: four windows of an emulated device."""
GROW_AFTER: Final = 100
"""One late answer in so many is what a 99th percentile allows."""
ATTEMPTS: Final = 3
"""A silent device is given up after 1.75 s instead of 16, because the CPU can compute its images."""
FIRST_PROBE_S: Final = 1.0
LAST_PROBE_S: Final = 30.0
"""The pause before each probe is twice that before the last one."""


@dataclass(slots=True)
class OffloadCounts:
    """Sums since the start."""

    fpga: int = 0
    """Images answered by the FPGA."""
    late: int = 0
    """Images that it answered after the deadline."""
    cpu: int = 0
    """Images answered by the CPU, for any reason."""
    no_place: int = 0
    """Images of the CPU because the FPGA was full."""
    failures: int = 0
    """Errors and wrong answers of the FPGA, those of probes included."""


class OffloadBackend:
    """A backend that owns two others and shares images between them.

    Args:
        fpga: computes the images that it has a place for.
        cpu: computes the others, and those that the FPGA cannot.
        cores: images that the CPU computes at once.
        deadline_s: the time within which the FPGA is to answer 99 of 100 images.
        clock: the node's.

    Raises:
        BackendError: if the two differ in input shape or outputs.
    """

    def __init__(self, fpga: Backend, cpu: Backend, cores: int, deadline_s: float, clock: Clock) -> None:
        shapes = (fpga.input_shape, fpga.outputs), (cpu.input_shape, cpu.outputs)
        if shapes[0] != shapes[1]:
            raise BackendError(f"offload: the FPGA takes and gives {shapes[0]}, the CPU {shapes[1]}; expected twins")
        self._fpga, self._cpu, self._deadline_s, self._clock = fpga, cpu, deadline_s, clock
        self._lock = threading.Lock()
        self._cores = threading.Semaphore(cores)
        # One thread per place waits for the FPGA's part of a batch, and one probes.
        self._threads = ThreadPoolExecutor(PLACES + 1, thread_name_prefix="hawkvision-offload")
        self._closed = False
        self.places = 1
        """Images that the FPGA may have at once."""
        self._outstanding = self._in_time = 0
        self.fpga_up = True
        """Whether the FPGA is used."""
        self._probing = False
        self._probe_at = self._probe_after_s = 0.0
        self._counts = OffloadCounts()

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
        taken = self._take_places(len(batch))
        if taken == 0:
            return self._on_cpu(batch)
        if taken == len(batch):
            return self._on_fpga(batch)
        waiting = self._start(self._on_fpga, batch[:taken])
        try:
            by_cpu = self._on_cpu(batch[taken:])
        finally:
            by_fpga = waiting.result()
        return joined([by_fpga, by_cpu])

    def counts(self) -> FpgaCounts:
        """The totals of the FPGA."""
        if isinstance(self._fpga, FpgaBackend):
            return self._fpga.counts()
        return FpgaCounts(self._counts.fpga, {}, {}, None, None)

    def collectors(self) -> Iterable[Collector]:
        """See `hawkvision.core.metrics.Instrumented`."""
        return (FpgaCollector(self.counts), OffloadCollector(self))

    def offloaded(self) -> OffloadCounts:
        """The sums until now."""
        with self._lock:
            return replace(self._counts)

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True
        self._fpga.close()  # before the threads, because one may wait for a silent device
        self._threads.shutdown(wait=True)
        self._cpu.close()

    def _take_places(self, n: int) -> int:
        """How many of `n` new images the FPGA gets; their places are taken."""
        with self._lock:
            if not self.fpga_up:
                if not self._probing and self._clock.now() >= self._probe_at:
                    self._probing = True
                    self._start(self._probe)
                return 0
            taken = min(n, max(0, self.places - self._outstanding))
            self._counts.no_place += n - taken
            self._outstanding += taken
        return taken

    def _start(self, work: Callable[..., T], *of: Pixels) -> Future[T]:
        try:
            return self._threads.submit(work, *of)
        except RuntimeError:  # closed meanwhile
            raise BackendError("the offload backend is closed") from None

    def _on_fpga(self, batch: Pixels) -> Tensors:
        n, sent = len(batch), self._clock.now()
        try:
            found = self._fpga.infer(batch)
        except BackendError as error:
            with self._lock:
                self._outstanding -= n
            self._failed(error)
            return self._on_cpu(batch)
        late = self._clock.now() - sent > self._deadline_s
        with self._lock:
            full = self._outstanding >= self.places
            self._outstanding -= n
            self._counts.fpga += n
            if late:
                self._counts.late += n
                self.places, self._in_time = max(1, self.places // 2), 0
            elif full:
                self._in_time += n
                if self._in_time >= GROW_AFTER * self.places:
                    self.places, self._in_time = min(PLACES, self.places + 1), 0
        return found

    def _failed(self, error: BackendError) -> None:
        with self._lock:
            self._counts.failures += 1
            first, self.fpga_up = self.fpga_up, False
            if first:
                self._probe_later(FIRST_PROBE_S)
        if first:
            log.warning("the FPGA failed, all images go to the CPU until it answers a probe: %s", error)

    def _probe_later(self, after_s: float) -> None:
        self._probe_after_s = min(LAST_PROBE_S, after_s)
        self._probe_at = self._clock.now() + self._probe_after_s

    def _on_cpu(self, batch: Pixels) -> Tensors:
        with self._cores:
            found = self._cpu.infer(batch)
        with self._lock:
            self._counts.cpu += len(batch)
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
                self.fpga_up, self.places, self._in_time = True, 1, 0
            else:
                self._counts.failures += 1
                self._probe_later(2.0 * self._probe_after_s)
        if right:
            log.warning("the FPGA answers again, and as the CPU does")
        else:
            log.info("probing the failed FPGA: %s", said)


class OffloadCollector(Collector):
    """Reads a backend's counts when Prometheus asks."""

    def __init__(self, backend: OffloadBackend) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        backend, counts = self._backend, self._backend.offloaded()
        images = CounterMetricFamily("hawkvision_offload_images", "Images, by the side that answered", labels=("side",))
        images.add_metric(("fpga",), counts.fpga)
        images.add_metric(("cpu",), counts.cpu)
        yield images
        yield CounterMetricFamily("hawkvision_offload_no_place", "Sent to the CPU for a full FPGA", counts.no_place)
        yield CounterMetricFamily("hawkvision_offload_late", "Answered by the FPGA after the deadline", counts.late)
        yield CounterMetricFamily("hawkvision_offload_failures", "Errors of the FPGA, with probes", counts.failures)
        yield GaugeMetricFamily("hawkvision_offload_places", "Images the FPGA may have at once", backend.places)
        yield GaugeMetricFamily("hawkvision_offload_fpga_up", "1 while the FPGA is used", int(backend.fpga_up))


def open_offload(
    graph: IntegerGraph,
    address: str,
    design: DesignInfo,
    deadline_s: float,
    cores: int,
    clock: Clock,
    given_up: Future[None] | None = None,
) -> OffloadBackend:
    """The device at `address` and the compiled kernel on `cores` as one backend.

    Args:
        graph: the network.
        address: of the device.
        design: its cycles and clock, for metrics.
        deadline_s: see `OffloadBackend`.
        cores: see `OffloadBackend`.
        clock: the node's.
        given_up: ends the wait for the device when it is done.

    Raises:
        BackendError: if the device does not answer, or differs from the kernel.
    """
    with contextlib.ExitStack() as opened:
        cpu = opened.enter_context(contextlib.closing(ReferenceBackend(graph, design)))
        fpga = opened.enter_context(
            contextlib.closing(DeviceBackend(graph, address, design, ATTEMPTS, given_up=given_up))
        )
        backend = OffloadBackend(fpga, cpu, cores, deadline_s, clock)
        opened.pop_all()
    return backend
