"""Predicts what a placement costs and how long its images take: models of the CPU, the FPGA and the link.

    image ─┬─ share ──→ link → FPGA queue → stages → link ─┬─→ answer
           │               │ no place                 (cut)│
           └─ 1 − share ──→┴→ CPU queue → cores ←──────────┘→ answer

*CPU*: measured service times (`fpga.offload.calibration`) and one queue for all cores (M/G/c). Sending images to the
FPGA is work of the same cores. CPU seconds are measured at several rates, because a core that rests between images
takes longer for each.

*FPGA*: the compiler's cycles ÷ clock, a constant service time in a bounded queue (M/D/1/K); images without a place go
to the CPU. A link slower than the device replaces it as the bottleneck: of constant service times in a row, only the
longest forms a queue (Friedman, Operations Research 1965).

*Power*: static power, joules per image, watts per busy core; all are estimates with a low, mid and high value.

Arrivals are random (Poisson), and those that one side passes to the other are treated as random too.
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
    """A number that was not measured: its low, mid and high value."""

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
    """CPU seconds per image, by arrival rate: linear between measurements, constant beyond them."""

    rates_hz: tuple[float, ...]
    """In ascending order."""
    seconds: tuple[float, ...]

    @classmethod
    def always(cls, seconds: float) -> CpuWork:
        """The same CPU seconds at every rate."""
        return cls((0.0,), (seconds,))

    def at(self, rate_hz: float) -> float:
        """CPU seconds per image at a rate."""
        return float(np.interp(rate_hz, self.rates_hz, self.seconds))


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The link between host and FPGA."""

    bytes_per_s: float
    latency_s: float
    """One-way delay beside the transfer."""
    host: CpuWork
    """The host's work per image that it sends: packing, sending, receiving, checking."""


@dataclass(frozen=True)
class FpgaProfile:
    """A network, or its first stages, as a design that the FPGA can load."""

    name: str
    interval_cycles: int
    """Cycles from one image to the next."""
    latency_cycles: int
    """Cycles of an image on an idle device."""
    clock_hz: float
    bytes_in: int
    bytes_out: int
    resources: Resources = NOTHING
    joules: EstimateRange = ZERO
    """Energy per image, beside static power."""
    clock_w: EstimateRange = ZERO
    """Power of the loaded design's clock network, beside the device's static power."""
    source: str = ""
    """The source of these figures."""
    cut: str | None = None
    """The last stage on the FPGA, if the CPU computes the others; None for the whole network."""
    rest: ServiceTime | None = None
    """The CPU's service time for those others."""

    @property
    def runnable(self) -> bool:
        """Whether the runtime supports it: it gives whole images to either side, so cuts are only modelled."""
        return self.cut is None


@dataclass(frozen=True)
class Workload:
    """Images of one task for one variant."""

    name: str
    rate_hz: float
    deadline_s: float
    """Deadline for 99 of 100 images."""
    cpu: ServiceTime
    """Service time of one image on one core."""
    profiles: tuple[FpgaProfile, ...] = ()
    work: CpuWork | None = None
    """CPU seconds of an image with everything around it; None: the service time alone."""


@dataclass(frozen=True)
class Machine:
    """The machine that computes."""

    cores: int
    core_w: EstimateRange
    """Power of a busy core."""
    link: LinkModel
    device: FpgaDevice | None = None
    places: int = 16
    """Most images in flight through one FPGA design."""
    board_w: EstimateRange = ZERO
    """Power of the board beside the chip."""

    @property
    def idle_fpga_w(self) -> EstimateRange:
        """Power of an idle device with a design loaded."""
        return self.board_w if self.device is None else EstimateRange(*self.device.static_w) + self.board_w


@dataclass(frozen=True)
class PlacementChoice:
    """The sides to which one workload's images go."""

    profile: FpgaProfile | None
    share: float
    """Share of images sent to the FPGA."""

    def __str__(self) -> str:
        if self.profile is None:
            return "CPU"
        cut = "" if self.profile.cut is None else f" up to {self.profile.cut}"
        return f"{self.share:.1%} FPGA {self.profile.name}{cut}"


@dataclass(frozen=True)
class PlacementCost:
    """The cost of a choice alone; costs of several choices add up."""

    cpu_load: float
    """CPU seconds per second."""
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
    """The prediction for one workload."""

    p50_s: float
    p99_s: float
    fpga_share: float
    """Share of images that the FPGA answers: sent there and not turned away."""
    fpga_load: float
    """Share of time in which the FPGA, or its link, is busy."""
    fpga_mean_s: float
    """Mean latency of images that the FPGA answers; 0 if there are none."""


@dataclass(frozen=True)
class PlacementForecast:
    """The prediction for a placement."""

    workloads: tuple[WorkloadForecast, ...]
    cpu_load: float
    """CPU seconds per second, of `Machine.cores`."""
    watts: EstimateRange


def service_s(profile: FpgaProfile, link: LinkModel) -> float:
    """Time from one image to the next at the slowest of link in, device and link out."""
    return max(profile.interval_cycles / profile.clock_hz, max(profile.bytes_in, profile.bytes_out) / link.bytes_per_s)


def idle_latency_s(profile: FpgaProfile, link: LinkModel) -> float:
    """Seconds from an image given to the idle link to its logits."""
    moved = (profile.bytes_in + profile.bytes_out) / link.bytes_per_s
    device_s = max(profile.latency_cycles, profile.interval_cycles) / profile.clock_hz
    return moved + 2 * link.latency_s + device_s + link.host.at(0.0)


def fpga_queue(workload: Workload, choice: PlacementChoice, machine: Machine) -> WaitingTime:
    """The queue in front of a choice's FPGA design."""
    if choice.profile is None:
        return NO_WAITING
    service = ServiceTime.constant(service_s(choice.profile, machine.link))
    return one_server(workload.rate_hz * choice.share, service, machine.places)


def cost(workload: Workload, choice: PlacementChoice, machine: Machine) -> PlacementCost:
    """The machine's resources that a choice takes. Cores count as awake only as long as this workload keeps them so."""
    rate, profile = workload.rate_hz, choice.profile
    each_s = workload.cpu.mean_s if workload.work is None else workload.work.at(rate)
    if profile is None:
        return PlacementCost(rate * each_s, ZERO, NOTHING, 0.0, False)
    sent = _sent_hz(workload, choice, machine)
    sent_s = machine.link.host.at(rate) + (0.0 if profile.rest is None else profile.rest.mean_s)
    link_load = sent * max(profile.bytes_in, profile.bytes_out) / machine.link.bytes_per_s
    cpu_load = (rate - sent) * each_s + sent * sent_s
    return PlacementCost(cpu_load, profile.clock_w + profile.joules * sent, profile.resources, link_load, True)


def watts(total: PlacementCost, machine: Machine) -> EstimateRange:
    """Power of a placement: the FPGA, if used, and busy cores."""
    idle = machine.idle_fpga_w if total.on_fpga else ZERO
    return idle + total.fpga_w + machine.core_w * total.cpu_load


def forecast(workloads: Sequence[Workload], choices: Sequence[PlacementChoice], machine: Machine) -> PlacementForecast:
    """Predict a placement; latencies are infinite where a queue grows without bound."""
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
    """Rates and service times of the work that the cores get."""
    sent = _sent_hz(workload, choice, machine)
    streams = []
    if workload.rate_hz > sent:
        streams.append((workload.rate_hz - sent, workload.cpu))
    if sent and choice.profile is not None:
        if host_s := machine.link.host.at(workload.rate_hz):
            streams.append((sent, ServiceTime.constant(host_s)))
        if choice.profile.rest is not None:
            streams.append((sent, choice.profile.rest))
    return streams


def _sent_hz(workload: Workload, choice: PlacementChoice, machine: Machine) -> float:
    """Images per second that the FPGA gets and has a place for."""
    return workload.rate_hz * choice.share * fpga_queue(workload, choice, machine).taken if choice.profile else 0.0


def _predict(workload: Workload, choice: PlacementChoice, machine: Machine, cpu_queue: WaitingTime) -> WorkloadForecast:
    queue = fpga_queue(workload, choice, machine)
    on_fpga = choice.share * queue.taken if choice.profile is not None else 0.0
    parts: list[tuple[float, LatencyDistribution]] = []
    fpga_mean_s = fpga_load = 0.0
    if choice.profile is not None and on_fpga:
        busy_s = service_s(choice.profile, machine.link)
        delay_s = max(0.0, idle_latency_s(choice.profile, machine.link) - busy_s)
        if choice.profile.rest is not None:
            # Two waits in a row are not independent, but their means add up, which suffices for costs.
            delay_s += cpu_queue.mean_s + choice.profile.rest.mean_s
        latency = LatencyDistribution(delay_s, queue, ServiceTime.constant(busy_s))
        parts.append((on_fpga, latency))
        fpga_mean_s, fpga_load = latency.mean_s, workload.rate_hz * on_fpga * busy_s
    if on_fpga < 1:
        parts.append((1 - on_fpga, LatencyDistribution(0.0, cpu_queue, workload.cpu)))
    if any(math.isinf(latency.delay_s) for _, latency in parts):
        return WorkloadForecast(math.inf, math.inf, on_fpga, fpga_load, math.inf)
    return WorkloadForecast(quantile(parts, 0.5), quantile(parts, 0.99), on_fpga, fpga_load, fpga_mean_s)


def fits(used: Resources, device: FpgaDevice) -> bool:
    """Whether a device holds these resources."""
    return (
        used.luts <= device.luts
        and used.ffs <= device.ffs
        and used.multipliers <= device.multipliers
        and used.block_rams <= device.block_rams
    )


def shortage(used: Resources, device: FpgaDevice) -> str | None:
    """Why a device does not hold these resources, or None."""
    wants: Mapping[str, tuple[int, int]] = {
        "LUTs": (used.luts, device.luts),
        "flip-flops": (used.ffs, device.ffs),
        "multipliers": (used.multipliers, device.multipliers),
        "block RAMs": (used.block_rams, device.block_rams),
    }
    short = [f"{want} {name} of {has}" for name, (want, has) in wants.items() if want > has]
    return f"{device.name} has too few: {', '.join(short)}" if short else None
