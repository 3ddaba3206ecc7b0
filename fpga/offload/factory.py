"""Opens an offload backend for an edge node: measures both sides idle, plans the shares from that, and runs."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from fpga.backends import Options, build_of
from fpga.backends.device import BoardBackend
from fpga.backends.reference import ReferenceBackend
from fpga.compiler.folding import interval
from fpga.offload.calibration import measure, measure_link, measure_work
from fpga.offload.cost_model import ZERO, Machine, Way, Workload
from fpga.offload.fpga_profiles import FRAMING_BYTES
from fpga.offload.plan_search import search
from fpga.offload.runtime import OffloadBackend, offload_of
from hawkvision.clock import Clock
from hawkvision.errors import BackendError, ConfigError
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.ir import Graph

log = logging.getLogger("hawkvision.fpga")

DEFAULT_DEADLINE_S: Final = 0.05
PLACES: Final = 16
"""Pictures on their way to the FPGA at once: four windows of a device (`fpga.device.emulator.DEFAULT_WINDOW`)."""
ATTEMPTS: Final = 3
"""A silent device is given up after 1.75 s rather than 16: there is a CPU to compute what it was sent."""
MEASURE_S: Final = 0.3
LOADS: Final = (0.2, 0.8)
"""Of what the device can do, the rates at which both sides' CPU-seconds are measured."""
WORK_S: Final = 0.5
WORK_PICTURES: Final = 200
"""… for half a second each, or as long as so many pictures take."""
FIRST_RATE_HZ: Final = 1.0
"""The schedule is for all rates; a plan must begin with one."""
UNLIMITED_BYTES_PER_S: Final = 1e12
"""The transfer is part of the delay that is measured."""


def open_offload(
    model: Path | bytes,
    options: Options,
    deadline_s: float,
    cores: int,
    clock: Clock,
    given_up: Future[None] | None = None,
) -> OffloadBackend:
    """The device at `options.device` and the compiled kernel on `cores`, as one backend.

    Cycles and clock are the build's if `options` name one, else what the device says of itself. `given_up` ends the
    waiting for a device.

    Raises:
        CompileError: if the model carries no graph, or the build is another's.
        ConfigError: if no device is named, or nobody knows how fast it is.
        BackendError: if it does not answer, or answers otherwise than the kernel.
    """
    if options.device is None:
        raise ConfigError("fpga-offload: missing the device's address, udp://HOST:PORT or serial:/dev/NAME")
    graph = graph_of(model)
    build = build_of(graph, options)
    cpu = ReferenceBackend(graph, build, cache=options.cache)
    fpga = BoardBackend(graph, options.device, build, ATTEMPTS, given_up=given_up)
    try:
        cycles = fpga.device.cycles if build.folding is None else interval(graph, build.folding)
        clock_hz = build.clock_hz or float(fpga.device.clock_hz)
        if not (cycles and clock_hz):
            raise ConfigError("fpga-offload: the device does not say how fast it is; expected fpga_report")
        way = _way(graph, cycles, clock_hz)
        device_s = cycles / clock_hz
        service = measure(cpu, "fpga-ref", MEASURE_S).one("measured now").service
        host, work = (measure_work(s, [load / device_s for load in LOADS], WORK_S, WORK_PICTURES) for s in (fpga, cpu))
        link = measure_link(fpga, device_s, UNLIMITED_BYTES_PER_S, host, MEASURE_S)
        machine = Machine(cores, ZERO, link, places=PLACES)
        workload = Workload(graph.name, FIRST_RATE_HZ, deadline_s, service, (way,), work)
        plan = offload_of(search([workload], machine), machine)
    except (BackendError, ConfigError):
        fpga.close()
        cpu.close()
        raise
    log.info(
        "fpga-offload: a picture takes %.3f ms of a core here, or %.3f ms of one and %.3f ms of the device there; "
        "of few pictures %.0f %% go to the device",
        work.at(FIRST_RATE_HZ) * 1e3,
        host.at(FIRST_RATE_HZ) * 1e3,
        plan.service_s * 1e3,
        100 * plan.schedule.share(0.0),
    )
    return OffloadBackend(fpga, cpu, plan, clock)


def _way(graph: Graph, cycles: int, clock_hz: float) -> Way:
    size = graph.input.elements + FRAMING_BYTES
    return Way(graph.name, cycles, cycles, clock_hz, bytes_in=size, bytes_out=4 * graph.classes + FRAMING_BYTES)
