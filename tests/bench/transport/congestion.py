"""Compares the congestion controllers on simulated links that tuned none of them.

    python -m tests.bench.transport.congestion [--links 24] [--seconds 12] [--seed 1]

Links are drawn from the seed: 1 to 20 Mbit/s, 5 to 80 ms one way, a queue of 20 to 200 ms, loss of 0 to 20 % alone or
in runs. Each controller gets the same links. Three loads: a camera at 30 % of the link, measured by the time per image;
one at twice the link, measured by its goodput; and the same beside a CUBIC flow, without random loss. Time is
simulated, so one seed gives the same table on every machine.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from hawkvision.transport.congestion.controller import CongestionController
from hawkvision.transport.congestion.registry import CONTROLLERS
from tests.sim.bottleneck import Camera, Cubic, Gilbert, Independent, Link, Simulation

IMAGE: Final = 20_000
WARM_S: Final = 3.0
"""Not counted: every controller looks for the link's speed first."""
LIGHT, HEAVY = 0.3, 2.0
"""What is asked for, in links."""


@dataclass(frozen=True)
class Drawn:
    """One link of the comparison."""

    seed: int
    rate: float
    delay_s: float
    queue_s: float
    loss: float
    burst: float

    def build(self, *, lossless: bool = False) -> Link:
        """The link, with its own random numbers."""
        rng, ratio = random.Random(self.seed), 0.0 if lossless else self.loss
        loss: Callable[[], bool] = Independent(ratio, rng)
        if self.burst > 1.0 and ratio > 0.0:
            loss = Gilbert(ratio, self.burst, rng)
        queue = max(3_000, int(self.rate * self.queue_s))
        back = Independent(ratio, random.Random(self.seed + 1))
        return Link(Simulation(), self.rate, self.delay_s, queue, loss, back, rng=random.Random(self.seed + 2))


@dataclass(frozen=True)
class Measured:
    """What one controller got of one link: times of images in ms, shares of the link."""

    p50_ms: float
    p99_ms: float
    goodput: float
    queue_ms: float
    beside_cubic: tuple[float, float]
    """Its share and CUBIC's, without random loss."""


def drawn(count: int, seed: int) -> Iterator[Drawn]:
    """Links at random, the same for every controller."""
    rng = random.Random(seed)
    for number in range(count):
        yield Drawn(
            seed=1_000 * seed + number,
            rate=math.exp(rng.uniform(math.log(1e6), math.log(20e6))) / 8,
            delay_s=rng.uniform(0.005, 0.08),
            queue_s=rng.uniform(0.02, 0.2),
            loss=rng.choice((0.0, 0.01, 0.05, 0.2)),
            burst=rng.choice((1.0, 3.0)),
        )


def measure(spec: Drawn, controller: type[CongestionController], seconds: float) -> Measured:
    """Each load on a link of its own."""
    light = camera(spec.build(), LIGHT, controller)
    light.sim.run(WARM_S + seconds)
    times = sorted(taken * 1e3 for number, taken in light.arrived.items() if light.started[number] > WARM_S)
    heavy = camera(spec.build(), HEAVY, controller)
    heavy.sim.run(WARM_S)
    before, queues = heavy.delivered, list[float]()
    for tick in range(round(seconds / 0.1)):
        heavy.sim.run(WARM_S + 0.1 * (tick + 1))
        queues.append(heavy.link.queue_s * 1e3)
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    goodput = (heavy.delivered - before) / (seconds * spec.rate)
    return Measured(times[len(times) // 2], p99, goodput, statistics.fmean(queues), shares(spec, controller, seconds))


def camera(link: Link, load: float, controller: type[CongestionController]) -> Camera:
    """A camera that asks for so many links."""
    return Camera(link, IMAGE, IMAGE / (load * link.rate), congestion=controller)


def shares(spec: Drawn, controller: type[CongestionController], seconds: float) -> tuple[float, float]:
    """What it and a CUBIC flow get of the link side by side, without random loss."""
    link = spec.build(lossless=True)
    other, heavy = Cubic(link), camera(link, HEAVY, controller)
    link.sim.run(WARM_S)
    before = heavy.delivered, other.delivered
    link.sim.run(WARM_S + seconds)
    whole = seconds * link.rate
    return (heavy.delivered - before[0]) / whole, (other.delivered - before[1]) / whole


def main() -> None:
    """Print one row per controller: medians over links, and the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, default=24, help="links to draw")
    parser.add_argument("--seconds", type=float, default=12.0, help="simulated seconds per load, after warming up")
    parser.add_argument("--seed", type=int, default=1, help="of the links")
    given = parser.parse_args()
    links = list(drawn(given.links, given.seed))
    print("| controller | P50 | P99: median, worst link | P99 within twice the link's own time ", end="")
    print("| goodput: median, worst | queue | beside CUBIC: ours / CUBIC's, median and least |")
    print("|---|---|---|---|---|---|---|")
    for name, controller in CONTROLLERS.items():
        found = [measure(link, controller, given.seconds) for link in links]
        own = [1e3 * (link.delay_s + IMAGE / link.rate) for link in links]
        p99s = [each.p99_ms for each in found]
        quick = sum(p99 <= 2.0 * alone for p99, alone in zip(p99s, own, strict=True))
        ours, cubic = zip(*(each.beside_cubic for each in found), strict=True)
        goodputs = [each.goodput for each in found]
        print(
            f"| {name} | {statistics.median(each.p50_ms for each in found):.0f} ms "
            f"| {statistics.median(p99s):.0f} ms, {max(p99s):.0f} ms | {quick} of {len(links)} "
            f"| {statistics.median(goodputs):.2f}, {min(goodputs):.2f} "
            f"| {statistics.median(each.queue_ms for each in found):.0f} ms "
            f"| {statistics.median(ours):.2f} / {statistics.median(cubic):.2f}, {min(ours):.2f} / {min(cubic):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
