"""Opens an offload backend: measures both sides while they are idle, plans the shares, and starts."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from fpga.backends.device import DeviceBackend
from fpga.backends.reference import ReferenceBackend
from fpga.compiler.folding import interval
from fpga.offload.calibration import measure, measure_link, measure_work
from fpga.offload.cost_model import ZERO, FpgaProfile, Machine, Workload
from fpga.offload.fpga_profiles import transfer_bytes
from fpga.offload.plan_search import search
from fpga.offload.runtime import OffloadBackend, OffloadSettings, offload_of
from fpga.reports.design_info import DesignFiles, DesignInfo, read_design
from hawkvision.core.clock import Clock
from hawkvision.core.errors import ConfigError
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.ir import IntegerGraph

log = logging.getLogger("hawkvision.fpga")

DEFAULT_DEADLINE_S: Final = 0.05
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
FIRST_RATE_HZ: Final = 1.0
"""A plan needs one rate; the schedule made from it covers all rates."""
UNLIMITED_BYTES_PER_S: Final = 1e12
"""The measured delay of the link includes the transfer."""


def open_offload(
    model: Path | bytes,
    address: str | None,
    files: DesignFiles,
    deadline_s: float,
    cores: int,
    clock: Clock,
    cache: Path | None = None,
    given_up: Future[None] | None = None,
) -> OffloadBackend:
    """The device at `address` and the compiled kernel on `cores` as one backend.

    Args:
        model: a built variant that carries its integer graph.
        address: of the device.
        files: its cycles and clock; without them, the device's own figures are used.
        deadline_s: the time within which 99 of 100 images are to be answered.
        cores: processor cores that compute images.
        clock: the node's.
        cache: the cache folder for compiled code; None takes the default.
        given_up: ends the wait for the device when it is done.

    Raises:
        CompileError: if the model carries no graph, or a file is broken or about another graph.
        ConfigError: if the address is missing, or the device's speed is unknown.
        BackendError: if the device does not answer, or differs from the kernel.
    """
    if address is None:
        raise ConfigError("fpga-offload: missing the device's address, udp://HOST:PORT or serial:/dev/NAME")
    graph = graph_of(model)
    design = read_design(graph, files)
    with contextlib.ExitStack() as opened:
        cpu = opened.enter_context(contextlib.closing(ReferenceBackend(graph, design, cache=cache)))
        fpga = opened.enter_context(
            contextlib.closing(DeviceBackend(graph, address, design, ATTEMPTS, given_up=given_up))
        )
        settings = _plan(graph, design, fpga, cpu, deadline_s, cores)
        opened.pop_all()
    return OffloadBackend(fpga, cpu, settings, clock)


def _plan(
    graph: IntegerGraph, design: DesignInfo, fpga: DeviceBackend, cpu: ReferenceBackend, deadline_s: float, cores: int
) -> OffloadSettings:
    cycles = fpga.device.cycles if design.folding is None else interval(graph, design.folding)
    clock_hz = design.clock_hz or float(fpga.device.clock_hz)
    if not (cycles and clock_hz):
        raise ConfigError("fpga-offload: the device does not say how fast it is; expected fpga_report")
    bytes_in, bytes_out = transfer_bytes(graph)
    profile = FpgaProfile(graph.name, cycles, cycles, clock_hz, bytes_in, bytes_out)
    device_s = cycles / clock_hz
    service = measure(cpu, "fpga-ref", MEASURE_S).one("measured now").service
    host, work = (measure_work(side, [load / device_s for load in LOADS], WORK_S, WORK_IMAGES) for side in (fpga, cpu))
    link = measure_link(fpga, device_s, UNLIMITED_BYTES_PER_S, host, MEASURE_S)
    machine = Machine(cores, ZERO, link, places=PLACES)
    workload = Workload(graph.name, FIRST_RATE_HZ, deadline_s, service, (profile,), work)
    settings = offload_of(search([workload], machine), machine)
    log.info(
        "fpga-offload: an image takes %.3f ms of a core here, or %.3f ms of a core and %.3f ms of the device there; "
        "at a low rate %.0f %% of images go to the device",
        work.at(FIRST_RATE_HZ) * 1e3,
        host.at(FIRST_RATE_HZ) * 1e3,
        settings.service_s * 1e3,
        100 * settings.schedule.share(0.0),
    )
    return settings
