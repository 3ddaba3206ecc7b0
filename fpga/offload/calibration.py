"""Measures what an image takes of both sides on this machine, and opens an offload backend with that.

Service times are measured with one image after another. CPU seconds are measured with images at random times and at
several rates, as in a server, because they depend on whether cores rest between images.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from fpga.backends.device import DeviceBackend
from fpga.backends.local import ReferenceBackend
from fpga.offload.model import ByRate, OffloadModel
from fpga.offload.queueing import ServiceTime
from fpga.offload.runtime import OffloadBackend
from fpga.reports.build_report import DesignInfo
from hawkvision.core.clock import Clock
from hawkvision.core.errors import ConfigError
from hawkvision.inference.backends.interface import Backend
from hawkvision.integer.ir import IntegerGraph

log = logging.getLogger("hawkvision.fpga")

PLACES: Final = 16
"""Images in flight to the FPGA: four windows of an emulated device."""
ATTEMPTS: Final = 3
"""A silent device is given up after 1.75 s instead of 16, because the CPU can compute its images."""
MEASURE_S: Final = 0.3
LOADS: Final = (0.2, 0.8)
"""Shares of the device's rate at which both sides' CPU time is measured."""
WORK_S: Final = 0.5
WORK_IMAGES: Final = 200
"""Each of these loads is measured for half a second, or for this many images."""
LEAST_RUNS: Final = 50
WARM_UP_RUNS: Final = 10
MAX_RUNS: Final = 20_000
IN_FLIGHT: Final = 40
"""Most images in flight while CPU seconds are measured; more than a device's places."""
LEAST_IMAGES: Final = 10
"""Images at each rate, at least."""
TURNS: Final = 4
"""Turns of each rate while CPU seconds are measured, because a shared core's speed drifts within a minute."""


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
        design: its cycles and clock; where they are unknown, the device's own figures are used.
        deadline_s: the time within which 99 of 100 images are to be answered.
        cores: processor cores that compute images.
        clock: the node's.
        given_up: ends the wait for the device when it is done.

    Raises:
        ConfigError: if the device's speed is unknown.
        BackendError: if the device does not answer, or differs from the kernel.
    """
    with contextlib.ExitStack() as opened:
        cpu = opened.enter_context(contextlib.closing(ReferenceBackend(graph, design)))
        fpga = opened.enter_context(
            contextlib.closing(DeviceBackend(graph, address, design, ATTEMPTS, given_up=given_up))
        )
        cycles, clock_hz = design.interval(graph) or fpga.device.cycles, design.clock_hz or fpga.device.clock_hz
        if not (cycles and clock_hz):
            raise ConfigError("fpga-offload: the device does not say how fast it is; expected fpga_report")
        model = measure_both(fpga, cpu, cycles / clock_hz, deadline_s, cores)
        backend = OffloadBackend(fpga, cpu, model, clock)
        opened.pop_all()
    return backend


def measure_both(fpga: Backend, cpu: Backend, device_s: float, deadline_s: float, cores: int) -> OffloadModel:
    """What is known of an idle device, which takes `device_s` for an image, and of this machine's cores."""
    rates_hz = [load / device_s for load in LOADS]
    host, work = (measure_work(side, rates_hz, WORK_S, WORK_IMAGES) for side in (fpga, cpu))
    model = OffloadModel(
        cpu=measure_service(cpu, MEASURE_S),
        work=work,
        host=host,
        busy_s=device_s,
        travel_s=measure_travel(fpga, device_s, host.at(0.0), MEASURE_S),
        deadline_s=deadline_s,
        cores=cores,
        places=PLACES,
    )
    log.info(
        "fpga-offload: an image takes %.3f ms of a core here, or %.3f ms of a core and %.3f ms of the device there",
        work.at(0.0) * 1e3,
        host.at(0.0) * 1e3,
        device_s * 1e3,
    )
    return model


def measure_service(backend: Backend, seconds: float, least: int = LEAST_RUNS) -> ServiceTime:
    """The time that a backend takes for one image, from noise, for about `seconds` and one call at a time.

    Raises:
        BackendError: as `backend.infer`.
    """
    noise = np.random.default_rng(0).integers(0, 256, (16, *backend.input_shape), dtype=np.uint8)
    for i in range(WARM_UP_RUNS):
        backend.infer(noise[i : i + 1])
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or (time.perf_counter() < end and len(taken) < MAX_RUNS):
        started = time.perf_counter()
        backend.infer(noise[len(taken) % 16 :][:1])
        taken.append(time.perf_counter() - started)
    return ServiceTime.measured(taken)


def measure_travel(fpga: Backend, device_s: float, host_s: float, seconds: float) -> float:
    """The time to an idle FPGA and back, beside the device's own: at least the host's CPU time.

    The median is taken, so that one pause of this machine does not count.
    """
    median_s = float(np.median(measure_service(fpga, seconds, LEAST_IMAGES).atoms))
    return max(host_s, median_s - device_s)


def measure_work(
    backend: Backend, rates_hz: Sequence[float], seconds: float, most: int = MAX_RUNS, seed: int = 0
) -> ByRate:
    """CPU seconds of this process per image at several rates, each for about `seconds` or `most` images.

    Images arrive at random (Poisson), and each has its own thread, as in a server. All CPU time of the process counts,
    except the calling thread's, so nothing else should run. A rate that this machine cannot reach is reported as the
    rate that it reached.

    Raises:
        BackendError: as `backend.infer`.
    """
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (16, *backend.input_shape), dtype=np.uint8)
    spans_s, works_s, images = (np.zeros(len(rates_hz)) for _ in range(3))
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for _ in range(WARM_UP_RUNS):
            pool.submit(backend.infer, noise[:1]).result()
        for place, rate_hz in [*enumerate(rates_hz)] * TURNS:
            n = math.ceil(min(max(LEAST_IMAGES, rate_hz * seconds), most) / TURNS)
            due = rng.exponential(1 / rate_hz, n).cumsum()
            begun, process_s, own_s = time.perf_counter(), time.process_time(), time.thread_time()
            waiting = []
            for i, arrival in enumerate(due.tolist()):
                time.sleep(max(0.0, begun + arrival - time.perf_counter()))
                waiting.append(pool.submit(backend.infer, noise[i % 16 : i % 16 + 1]))
            for answer in waiting:
                answer.result()
            works_s[place] += time.process_time() - process_s - (time.thread_time() - own_s)
            spans_s[place] += time.perf_counter() - begun
            images[place] += n
    found = sorted(zip((images / spans_s).tolist(), (works_s / images).tolist(), strict=True))
    return ByRate(tuple(rate for rate, _ in found), tuple(each_s for _, each_s in found))
