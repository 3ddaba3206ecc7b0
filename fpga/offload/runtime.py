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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fpga.backends.base import FpgaBackend, FpgaCollector, FpgaCounts
from fpga.offload.controller import OffloadCounts, ShareController
from fpga.offload.model import ByRate, OffloadModel
from hawkvision.core.clock import Clock
from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backends.interface import Backend, Outputs, check_batch, check_open, joined

T = TypeVar("T")

log = logging.getLogger("hawkvision.fpga")


class OffloadBackend:
    """A backend that owns two others and shares images between them.

    Args:
        fpga: computes a share of the images.
        cpu: computes the others, and those that the FPGA cannot.
        model: what is known of both.
        clock: the node's.
        schedule: the share by arrival rate; None takes the model's.
        seed: of the draw which side computes an image.

    Raises:
        BackendError: if the two differ in input shape or outputs.
    """

    def __init__(
        self,
        fpga: Backend,
        cpu: Backend,
        model: OffloadModel,
        clock: Clock,
        schedule: ByRate | None = None,
        seed: int = 0,
    ) -> None:
        shapes = (fpga.input_shape, fpga.outputs), (cpu.input_shape, cpu.outputs)
        if shapes[0] != shapes[1]:
            raise BackendError(f"offload: the FPGA takes and gives {shapes[0]}, the CPU {shapes[1]}; expected twins")
        self._fpga, self._cpu, self._model, self._clock = fpga, cpu, model, clock
        self._controller = ShareController(schedule or model.schedule(), model.busy_s)
        self._draws = random.Random(seed)  # noqa: S311 - which side computes an image is no secret
        self._lock = threading.Lock()
        self._cores = threading.Semaphore(model.cores)
        # One thread per place waits for the FPGA's part of a batch, and one probes.
        self._threads = ThreadPoolExecutor(model.places + 1, thread_name_prefix="hawkvision-offload")
        self._probing = self._closed = False
        self._outstanding = 0
        self._answered_at = -1.0
        self._counts = OffloadCounts()
        self._step_begun = OffloadCounts()

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
        return FpgaCounts(self._counts.fpga, {}, {}, None, None)

    def collectors(self) -> Iterable[Collector]:
        """See `hawkvision.core.metrics.Instrumented`."""
        return (FpgaCollector(self.counts), OffloadCollector(self))

    def offloaded(self) -> OffloadCounts:
        """The sums until now."""
        with self._lock:
            return replace(self._counts)

    @property
    def share(self) -> float:
        """Current share of images meant for the FPGA."""
        return self._controller.share

    @property
    def slowness(self) -> float:
        """Measured ÷ modelled time from one image to the next."""
        return self._controller.slowness

    @property
    def fpga_up(self) -> bool:
        """Whether the FPGA is used."""
        return not self._controller.failed

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
            self._counts.arrivals += n
            if self._controller.due(now):
                self._controller.step(self._observe(), now)
            if self._controller.probe_due(now) and not self._probing:
                self._probing = True
                self._start(self._probe)
            drawn = np.array([self._draws.random() < self._controller.share for _ in range(n)], np.bool_)
            wanted, free = int(drawn.sum()), self._model.places - self._outstanding
            if wanted > free:
                drawn[np.flatnonzero(drawn)[free:]] = False
                self._counts.no_place += wanted - free
            self._outstanding += int(drawn.sum())
        return drawn

    def _start(self, work: Callable[..., T], *of: Pixels) -> Future[T]:
        try:
            return self._threads.submit(work, *of)
        except RuntimeError:  # closed meanwhile
            raise BackendError("the offload backend is closed") from None

    def _observe(self) -> OffloadCounts:
        """The sums since the last observation."""
        then, self._step_begun = self._step_begun, replace(self._counts)
        return OffloadCounts(*(now - before for now, before in zip(astuple(self._counts), astuple(then), strict=True)))

    def _on_fpga(self, batch: Pixels) -> Tensors:
        n, sent = len(batch), self._clock.now()
        failure: BackendError | None = None
        try:
            found = self._fpga.infer(batch)
        except BackendError as error:
            failure = error
        finally:
            with self._lock:
                self._outstanding -= n
        if failure is not None:
            self._failed(failure)
            return self._on_cpu(batch)
        answered = self._clock.now()
        with self._lock:
            self._counts.fpga += n
            self._counts.late += n if answered - sent > self._model.deadline_s else 0
            # The image had reached the device before the last reply left it, so the device was busy in between.
            if sent + self._model.travel_s <= self._answered_at:
                self._counts.spaced += n
                self._counts.spacing_s += answered - self._answered_at
            self._answered_at = max(self._answered_at, answered)
        return found

    def _failed(self, error: BackendError) -> None:
        with self._lock:
            self._counts.failures += 1
            first = not self._controller.failed
            self._controller.fail(self._clock.now())
        if first:
            log.warning("the FPGA failed, all images go to the CPU until it answers a probe: %s", error)

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
                self._controller.recover()
            else:
                self._counts.failures += 1
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
        yield GaugeMetricFamily("hawkvision_offload_share", "Share of images meant for the FPGA", backend.share)
        yield GaugeMetricFamily("hawkvision_offload_fpga_up", "1 while the FPGA is used", int(backend.fpga_up))
