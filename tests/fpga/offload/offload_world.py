"""A simulated host with an FPGA, for tests of the planner and the controller: seeded arrivals, no clock, no threads."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fpga.offload.controller import OffloadCounts, ShareController
from fpga.offload.model import ByRate, OffloadModel
from fpga.offload.queueing import ServiceTime

Floats = NDArray[np.float64]

MS = 1e-3
MODEL = OffloadModel(
    cpu=ServiceTime.spread(2 * MS, 0.2),
    work=ByRate.always(2 * MS),
    host=ByRate.always(0.2 * MS),
    busy_s=2 * MS,
    travel_s=1 * MS,
    deadline_s=20 * MS,
    cores=2,
    places=32,
)
"""An FPGA of 500 images a second beside two cores of 500 each."""


def poisson(rng: np.random.Generator, *spells: tuple[float, float]) -> list[float]:
    """Arrival times of spells (seconds, rate)."""
    times: list[float] = []
    begin = 0.0
    for seconds, rate_hz in spells:
        n = rng.poisson(seconds * rate_hz)
        times += sorted((begin + rng.uniform(0, seconds, n)).tolist())
        begin += seconds
    return times


def queue_waits(
    rate_hz: float, service: ServiceTime, servers: int, places: int | None, n: int = 200_000, seed: int = 1
) -> tuple[Floats, float]:
    """Waits of Poisson arrivals at a first-come-first-served queue, and the share of them that found a place."""
    rng = np.random.default_rng(seed)
    arrivals = rng.exponential(1 / rate_hz, n).cumsum().tolist()
    services = rng.choice(np.array(service.atoms), n).tolist()
    free, ends, waits = [0.0] * servers, deque[float](), []
    for arrival, needed in zip(arrivals, services, strict=True):
        while ends and ends[0] <= arrival:
            ends.popleft()
        if places is not None and len(ends) >= places:
            continue
        start = max(heapq.heappop(free), arrival)
        heapq.heappush(free, start + needed)
        if places is not None:
            ends.append(start + needed)
        waits.append(start - arrival)
    return np.array(waits), len(waits) / n


@dataclass
class Record:
    """What came of a simulation, image by image, and of the controller's steps."""

    arrived: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    on_fpga: list[bool] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    """(time, share)."""

    def between(self, begin: float, end: float) -> tuple[Floats, NDArray[np.bool_]]:
        """Latencies, and which images the FPGA answered, of those that arrived then."""
        chosen = [begin <= t < end for t in self.arrived]
        return np.array(self.latency)[chosen], np.array(self.on_fpga)[chosen]

    def shares(self, begin: float, end: float) -> Floats:
        """The shares decided then."""
        return np.array([share for t, share in self.steps if begin <= t < end])


class World:
    """One FPGA behind a bounded queue, `model.cores` cores behind another, and the controller."""

    def __init__(self, model: OffloadModel, schedule: ByRate, seed: int = 0) -> None:
        self.model = model
        self.controller = ShareController(schedule, model.busy_s)
        self.draws = random.Random(seed)
        self.record = Record()
        self._cores = [0.0] * model.cores
        self._waiting: deque[tuple[float, float]] = deque()
        """(arrival, end) of what is on the FPGA."""
        self._free_at = self._answered_at = -1.0
        self._seen = OffloadCounts()

    def run(self, arrivals: Sequence[float], slowness: float = 1.0, dead: bool = False) -> None:
        """More images, on a device so many times slower than modelled, or one that only gives errors."""
        for now in arrivals:
            self._finish(now)
            self._seen.arrivals += 1
            if self.controller.due(now):
                seen, self._seen = self._seen, OffloadCounts()
                self.record.steps.append((now, self.controller.step(seen, now)))
            if self.controller.probe_due(now) and not dead:
                self.controller.recover()
            to_fpga = self.draws.random() < self.controller.share and len(self._waiting) < self.model.places
            if to_fpga and dead:
                self.controller.fail(now)
            end = self._on_fpga(now, slowness) if to_fpga and not dead else self._on_cpu(now)
            self.record.arrived.append(now)
            self.record.latency.append(end - now)
            self.record.on_fpga.append(to_fpga and not dead)

    def _on_fpga(self, now: float, slowness: float) -> float:
        self._free_at = max(self._free_at, now) + self.model.busy_s * slowness
        end = self._free_at + self.model.travel_s
        self._waiting.append((now, end))
        return end

    def _on_cpu(self, now: float) -> float:
        end = max(heapq.heappop(self._cores), now) + self.draws.choice(self.model.cpu.atoms)
        heapq.heappush(self._cores, end)
        return end

    def _finish(self, now: float) -> None:
        while self._waiting and self._waiting[0][1] <= now:
            sent, end = self._waiting.popleft()
            self._seen.fpga += 1
            self._seen.late += end - sent > self.model.deadline_s
            if sent + self.model.travel_s <= self._answered_at:
                self._seen.spaced += 1
                self._seen.spacing_s += end - self._answered_at
            self._answered_at = end
