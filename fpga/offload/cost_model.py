"""What a placement costs and how long its images take: one model of the CPU, one of the FPGA, one of what joins them.

    image ─┬─ share ──→ link → FPGA queue → stages → link ─┬─→ answer
             │               │ no place                 (cut)│
             └─ 1 − share ──→┴→ CPU queue → cores ←──────────┘→ answer

*CPU*: service times measured in this process (`fpga.offload.calibration`), a queue in front of the cores (M/G/c). What
the host does for an image that it sends to the FPGA is work of the same cores. CPU-seconds are measured at a few
rates, for a core that rests between two images takes longer for each than one that they keep awake.

*FPGA*: cycles from the compiler (`fpga.compiler.folding`) ÷ clock: constant service in a queue of bounded length
(M/D/1/K); what finds no place goes to the CPU. A link slower than the device takes its place as what images wait for:
of constant service times in a row, only the longest makes a queue (Friedman, Operations Research 1965).

*Power*: static draw, joules per image, watts per busy core. All three are estimates with a low, mid and high value.

Images come at random (Poisson). What one side passes to the other is not quite so; the model takes it as if.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fpga.compiler.devices import FpgaDevice, Resources
from fpga.offload.queueing import (
    NO_WAITING,
    LatencyDistribution,
    ServiceTime,
    WaitingTime,
    mixed,
    one_server,
    quantile,
    several_servers,
)

NOTHING: Final = Resources(luts=0, ffs=0, multipliers=0, block_rams=0)


@dataclass(frozen=True, slots=True)
class EstimateRange:
    """A number that was not measured: low, mid, high."""

    low: float
    mid: float
    high: float

    def __add__(self, other: EstimateRange) -> EstimateRange:
        return EstimateRange(self.low + other.low, self.mid + other.mid, self.high + other.high)

    def __mul__(self, factor: float) -> EstimateRange:
        return EstimateRange(self.low * factor, self.mid * factor, self.high * factor)


ZERO: Final = EstimateRange(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class CpuWork:
    """CPU-seconds that an image takes of this machine, by how many of them come in a second.

    Straight lines between what was measured; the ends hold beyond them, so nothing is extrapolated.
    """

    rates_hz: tuple[float, ...]
    """Ascending."""
    seconds: tuple[float, ...]

    @classmethod
    def always(cls, seconds: float) -> CpuWork:
        """The same at every rate."""
        return cls((0.0,), (seconds,))

    def at(self, rate_hz: float) -> float:
        """Of each image, when so many come."""
        return float(np.interp(rate_hz, self.rates_hz, self.seconds))


@dataclass(frozen=True, slots=True)
class LinkModel:
    """What lies between host and FPGA."""

    bytes_per_s: float
    latency_s: float
    """One way, beside the transfer itself."""
    host: CpuWork
    """Of the host, for an image that is sent: packing, sending, receiving, checking."""


@dataclass(frozen=True)
class FpgaProfile:
    """A network, or its first stages, as an FPGA design that can be loaded."""

    name: str
    interval_cycles: int
    """From one image to the next."""
    latency_cycles: int
    """Of an image that finds the device idle; at least the interval's share that it is busy for."""
    clock_hz: float
    bytes_in: int
    bytes_out: int
    resources: Resources = NOTHING
    joules: EstimateRange = ZERO
    """Per image, beside what is drawn without any."""
    clock_w: EstimateRange = ZERO
    """Of the clock network of the loaded design, beside the device's static draw."""
    source: str = ""
    """Where the figures come from."""
    cut: str | None = None
    """The last stage on the FPGA, if the CPU does the others; None for the whole network."""
    rest: ServiceTime | None = None
    """What the CPU then does."""

    @property
    def runnable(self) -> bool:
        """Whether `fpga.offload.runtime` can do it. It gives whole images to either side: cuts are a cost model."""
        return self.cut is None


@dataclass(frozen=True)
class Workload:
    """Images of one task, asked of one rung."""

    name: str
    rate_hz: float
    deadline_s: float
    """99 of 100 images are to be answered by then."""
    cpu: ServiceTime
    """Of one image on one core, by the twin that gives the same bits."""
    ways: tuple[FpgaProfile, ...] = ()
    work: CpuWork | None = None
    """What that takes with all that is around it; None: the service times and no more."""


@dataclass(frozen=True)
class Machine:
    """What there is to compute with."""

    cores: int
    core_w: EstimateRange
    """Of a core while it is busy."""
    link: LinkModel
    device: FpgaDevice | None = None
    places: int = 16
    """Images that may be on their way through one FPGA design at once."""
    board_w: EstimateRange = ZERO
    """Regulators, memory, PHY: whatever comes with the chip."""

    @property
    def idle_fpga_w(self) -> EstimateRange:
        """What a device with any design loaded draws."""
        return self.board_w if self.device is None else EstimateRange(*self.device.static_w) + self.board_w


@dataclass(frozen=True)
class PlacementChoice:
    """Where one workload's images go."""

    way: FpgaProfile | None
    share: float
    """Of the images, those that are sent to the FPGA."""

    def __str__(self) -> str:
        if self.way is None:
            return "CPU"
        cut = "" if self.way.cut is None else f" up to {self.way.cut}"
        return f"{self.share:.1%} FPGA {self.way.name}{cut}"


@dataclass(frozen=True)
class PlacementCost:
    """What a choice costs, whatever else runs; costs of several add up."""

    cpu_load: float
    """CPU-seconds per second."""
    fpga_w: EstimateRange
    resources: Resources
    link_load: float
    on_fpga: bool

    def __add__(self, other: PlacementCost) -> PlacementCost:
        return PlacementCost(
            self.cpu_load + other.cpu_load,
            self.fpga_w + other.fpga_w,
            self.resources + other.resources,
            self.link_load + other.link_load,
            self.on_fpga or other.on_fpga,
        )


FREE: Final = PlacementCost(0.0, ZERO, NOTHING, 0.0, False)


@dataclass(frozen=True)
class WorkloadForecast:
    """What comes of one workload."""

    p50_s: float
    p99_s: float
    fpga_share: float
    """Of the images, those that the FPGA answers: what was sent there and found a place."""
    fpga_load: float
    """Share of the time that the FPGA, or the link to it, is busy."""
    fpga_mean_s: float
    """Mean latency of the images that the FPGA answers; 0 if there are none."""


@dataclass(frozen=True)
class PlacementForecast:
    """What comes of a placement."""

    workloads: tuple[WorkloadForecast, ...]
    cpu_load: float
    """CPU-seconds per second, of `Machine.cores`."""
    watts: EstimateRange


def service_s(way: FpgaProfile, link: LinkModel) -> float:
    """Time from one image to the next at the slowest of link in, device and link out."""
    return max(way.interval_cycles / way.clock_hz, max(way.bytes_in, way.bytes_out) / link.bytes_per_s)


def idle_latency_s(way: FpgaProfile, link: LinkModel) -> float:
    """From giving an image to the link until its logits are back, if nothing else is there."""
    moved = (way.bytes_in + way.bytes_out) / link.bytes_per_s
    device_s = max(way.latency_cycles, way.interval_cycles) / way.clock_hz
    return moved + 2 * link.latency_s + device_s + link.host.at(0.0)


def fpga_queue(workload: Workload, choice: PlacementChoice, machine: Machine) -> WaitingTime:
    """The queue in front of a choice's FPGA design."""
    if choice.way is None:
        return NO_WAITING
    service = ServiceTime.constant(service_s(choice.way, machine.link))
    return one_server(workload.rate_hz * choice.share, service, machine.places)


def cost(workload: Workload, choice: PlacementChoice, machine: Machine) -> PlacementCost:
    """What a choice takes of the machine. A core is taken to be as awake as this workload's images keep it."""
    rate, way = workload.rate_hz, choice.way
    each_s = workload.cpu.mean_s if workload.work is None else workload.work.at(rate)
    if way is None:
        return PlacementCost(rate * each_s, ZERO, NOTHING, 0.0, False)
    sent = _sent_hz(workload, choice, machine)
    sent_s = machine.link.host.at(rate) + (0.0 if way.rest is None else way.rest.mean_s)
    link_load = sent * max(way.bytes_in, way.bytes_out) / machine.link.bytes_per_s
    cpu_load = (rate - sent) * each_s + sent * sent_s
    return PlacementCost(cpu_load, way.clock_w + way.joules * sent, way.resources, link_load, True)


def watts(total: PlacementCost, machine: Machine) -> EstimateRange:
    """The power of a placement: of the FPGA, if it has one, and of busy cores."""
    idle = machine.idle_fpga_w if total.on_fpga else ZERO
    return idle + total.fpga_w + machine.core_w * total.cpu_load


def forecast(workloads: Sequence[Workload], choices: Sequence[PlacementChoice], machine: Machine) -> PlacementForecast:
    """What comes of a placement; latencies are infinite where a queue would grow without bound."""
    streams = [
        stream for w, choice in zip(workloads, choices, strict=True) for stream in _cpu_streams(w, choice, machine)
    ]
    total = FREE
    for workload, choice in zip(workloads, choices, strict=True):
        total = total + cost(workload, choice, machine)
    rate = math.fsum(rate for rate, _ in streams)
    cpu_queue = several_servers(rate, mixed(streams), machine.cores) if rate else NO_WAITING
    found = tuple(_predict(w, choice, machine, cpu_queue) for w, choice in zip(workloads, choices, strict=True))
    return PlacementForecast(found, total.cpu_load, watts(total, machine))


def _cpu_streams(workload: Workload, choice: PlacementChoice, machine: Machine) -> list[tuple[float, ServiceTime]]:
    """Rates, and service times, of what the cores are given."""
    sent = _sent_hz(workload, choice, machine)
    streams = []
    if workload.rate_hz > sent:
        streams.append((workload.rate_hz - sent, workload.cpu))
    if sent and choice.way is not None:
        if host_s := machine.link.host.at(workload.rate_hz):
            streams.append((sent, ServiceTime.constant(host_s)))
        if choice.way.rest is not None:
            streams.append((sent, choice.way.rest))
    return streams


def _sent_hz(workload: Workload, choice: PlacementChoice, machine: Machine) -> float:
    """Images per second that the FPGA is given, and has a place for."""
    return workload.rate_hz * choice.share * fpga_queue(workload, choice, machine).taken if choice.way else 0.0


def _predict(workload: Workload, choice: PlacementChoice, machine: Machine, cpu_queue: WaitingTime) -> WorkloadForecast:
    queue = fpga_queue(workload, choice, machine)
    on_fpga = choice.share * queue.taken if choice.way is not None else 0.0
    parts: list[tuple[float, LatencyDistribution]] = []
    fpga_mean_s = fpga_load = 0.0
    if choice.way is not None and on_fpga:
        busy_s = service_s(choice.way, machine.link)
        delay_s = max(0.0, idle_latency_s(choice.way, machine.link) - busy_s)
        if choice.way.rest is not None:
            # Two waits in a row are not independent; their means add up, which is all that a cost model needs.
            delay_s += cpu_queue.mean_s + choice.way.rest.mean_s
        latency = LatencyDistribution(delay_s, queue, ServiceTime.constant(busy_s))
        parts.append((on_fpga, latency))
        fpga_mean_s, fpga_load = latency.mean_s, workload.rate_hz * on_fpga * busy_s
    if on_fpga < 1:
        parts.append((1 - on_fpga, LatencyDistribution(0.0, cpu_queue, workload.cpu)))
    if any(math.isinf(latency.delay_s) for _, latency in parts):
        return WorkloadForecast(math.inf, math.inf, on_fpga, fpga_load, math.inf)
    return WorkloadForecast(quantile(parts, 0.5), quantile(parts, 0.99), on_fpga, fpga_load, fpga_mean_s)


def fits(used: Resources, device: FpgaDevice) -> bool:
    """Whether a device holds that much."""
    return (
        used.luts <= device.luts
        and used.ffs <= device.ffs
        and used.multipliers <= device.multipliers
        and used.block_rams <= device.block_rams
    )


def shortage(used: Resources, device: FpgaDevice) -> str | None:
    """Why a device cannot hold that much, or None."""
    wants: Mapping[str, tuple[int, int]] = {
        "LUTs": (used.luts, device.luts),
        "flip-flops": (used.ffs, device.ffs),
        "multipliers": (used.multipliers, device.multipliers),
        "block RAMs": (used.block_rams, device.block_rams),
    }
    short = [f"{want} {name} of {has}" for name, (want, has) in wants.items() if want > has]
    return f"{device.name} has too few: {', '.join(short)}" if short else None
