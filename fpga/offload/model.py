"""Predicts latency and CPU time when a share of the images goes to the FPGA, and chooses the share.

    image ─┬─ share ──→ link → FPGA queue → stages → link ─→ answer
           │               │ no place
           └─ 1 − share ──→┴→ CPU queue → cores ───────────→ answer

*CPU*: measured service times (`fpga.offload.calibration`) and one queue for all cores (M/G/c). Sending images to the
FPGA is work of the same cores. CPU seconds are measured at several rates, because a core that rests between images
takes longer for each.

*FPGA*: a constant service time in a bounded queue (M/D/1/K); images without a place go to the CPU. A link slower than
the device replaces it as the bottleneck: of constant service times in a row, only the longest forms a queue (Friedman,
Operations Research 1965).

Arrivals are random (Poisson), and those that one side passes to the other are treated as random too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fpga.offload.queueing import (
    NO_WAITING,
    ServiceTime,
    WaitingTime,
    mixed,
    one_server,
    quantile,
    several_servers,
)

SHARES: Final = tuple(i / 40 for i in range(41))
"""The shares to choose from."""
RATES: Final = (0.25, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
"""Arrival rates of a schedule, as multiples of the FPGA's rate."""
HEADROOM: Final = 0.8
"""Share of the deadline that a schedule plans for: near the FPGA's rate, a small error of the rate doubles the wait."""


@dataclass(frozen=True, slots=True)
class ByRate:
    """A figure by arrival rate: linear between its points, constant beyond them."""

    rates_hz: tuple[float, ...]
    """In ascending order."""
    values: tuple[float, ...]

    def at(self, rate_hz: float) -> float:
        """The figure at a rate."""
        return float(np.interp(rate_hz, self.rates_hz, self.values))

    @classmethod
    def always(cls, value: float) -> ByRate:
        """The same figure at every rate."""
        return cls((0.0,), (value,))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction for a rate and a share."""

    p50_s: float
    p99_s: float
    fpga_share: float
    """Share of images that the FPGA answers: sent there and not turned away."""
    fpga_load: float
    """Share of time in which the FPGA, or its link, is busy."""
    cpu_load: float
    """CPU seconds per second."""


@dataclass(frozen=True)
class OffloadModel:
    """Both sides, and what is asked of them."""

    cpu: ServiceTime
    """Service time of one image on one core."""
    work: ByRate
    """CPU seconds of an image computed on the CPU, with everything around it."""
    host: ByRate
    """CPU seconds of an image sent to the FPGA: packing, sending, receiving, checking."""
    busy_s: float
    """Time from one image to the next at the slowest of link in, device and link out."""
    travel_s: float
    """Time on the FPGA's side beside that, without a queue."""
    deadline_s: float
    """Deadline for 99 of 100 images."""
    cores: int
    places: int = 16
    """Most images in flight to the FPGA."""

    def forecast(self, rate_hz: float, share: float) -> Forecast:
        """Predict; latencies are infinite where a queue grows without bound."""
        fpga_queue, on_fpga = self._fpga(rate_hz, share)
        sent_hz = rate_hz * on_fpga
        host_s = self.host.at(rate_hz)
        streams = [(rate_hz - sent_hz, self.cpu), (sent_hz, ServiceTime.constant(host_s))]
        streams = [(hz, service) for hz, service in streams if hz > 0 and service.mean_s > 0]
        cpu_queue = NO_WAITING
        if streams:
            cpu_queue = several_servers(math.fsum(hz for hz, _ in streams), mixed(streams), self.cores)
        ways = [
            (on_fpga, self.travel_s, fpga_queue, ServiceTime.constant(self.busy_s)),
            (1 - on_fpga, 0.0, cpu_queue, self.cpu),
        ]
        return Forecast(
            p50_s=quantile(ways, 0.5),
            p99_s=quantile(ways, 0.99),
            fpga_share=on_fpga,
            fpga_load=sent_hz * self.busy_s,
            cpu_load=self._cpu_load(rate_hz, on_fpga),
        )

    def best_share(self, rate_hz: float) -> float:
        """The share that takes the least CPU time and keeps the deadline; if none does, the one that comes nearest."""
        loads = {share: self._cpu_load(rate_hz, self._fpga(rate_hz, share)[1]) for share in SHARES}
        late = {}
        for share in sorted((share for share in SHARES if loads[share] < self.cores), key=loads.__getitem__):
            late[share] = self.forecast(rate_hz, share).p99_s
            if late[share] <= self.deadline_s:
                return share
        for share in SHARES:
            late.setdefault(share, self.forecast(rate_hz, share).p99_s)
        return min(SHARES, key=lambda share: (late[share], loads[share]))

    def schedule(self) -> ByRate:
        """The best share at each arrival rate, with some headroom to the deadline."""
        strict = replace(self, deadline_s=self.deadline_s * HEADROOM)
        rates = tuple(multiple / self.busy_s for multiple in RATES)
        return ByRate(rates, tuple(strict.best_share(rate) for rate in rates))

    def _fpga(self, rate_hz: float, share: float) -> tuple[WaitingTime, float]:
        """The queue in front of the FPGA, and the share of images that get a place there."""
        queue = one_server(rate_hz * share, ServiceTime.constant(self.busy_s), self.places)
        return queue, share * queue.taken

    def _cpu_load(self, rate_hz: float, on_fpga: float) -> float:
        return rate_hz * ((1 - on_fpga) * self.work.at(rate_hz) + on_fpga * self.host.at(rate_hz))
