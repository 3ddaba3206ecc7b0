"""How the congestion controllers compare on simulated links that tuned none of them.

    python -m tests.bench.transport.congestion [--links 24] [--seconds 12] [--seed 1]

Links are drawn from the seed: 1 to 20 Mbit/s, 5 to 80 ms one way, a queue of 20 to 200 ms, loss of 0 to 20 % alone or
in runs, some with a CUBIC flow. Each controller gets the same links. Two loads: a camera that asks for 30 % of the
link, of which the time until an image is through counts, and one that asks for twice the link, of which the goodput
counts. Time is simulated, so one seed gives the same table on every machine.
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
    beside_cubic: bool

    def build(self) -> Link:
        """The link, with its own random numbers."""
        rng = random.Random(self.seed)
        loss: Callable[[], bool] = Independent(self.loss, rng)
        if self.burst > 1.0 and self.loss > 0.0:
            loss = Gilbert(self.loss, self.burst, rng)
        queue = max(3_000, int(self.rate * self.queue_s))
        back = Independent(self.loss, random.Random(self.seed + 1))
        return Link(Simulation(), self.rate, self.delay_s, queue, loss, back, rng=random.Random(self.seed + 2))


@dataclass(frozen=True)
class Measured:
    """What one controller got of one link: times of images in ms, shares of the link."""

    p50_ms: float
    p99_ms: float
    goodput: float
    queue_ms: float
    cubic: float | None


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
            beside_cubic=rng.random() < 0.25,
        )


def measure(spec: Drawn, controller: type[CongestionController], seconds: float) -> Measured:
    """Both loads, one after the other, each on a link of its own."""
    link = spec.build()
    if spec.beside_cubic:
        Cubic(link)
    light = Camera(link, IMAGE, IMAGE / (LIGHT * link.rate), congestion=controller)
    link.sim.run(WARM_S + seconds)
    times = sorted(taken * 1e3 for number, taken in light.arrived.items() if light.started[number] > WARM_S)
    link = spec.build()
    other = Cubic(link) if spec.beside_cubic else None
    heavy = Camera(link, IMAGE, IMAGE / (HEAVY * link.rate), congestion=controller)
    link.sim.run(WARM_S)
    got, others, queues = heavy.delivered, other.delivered if other else 0, list[float]()
    for tick in range(round(seconds / 0.1)):
        link.sim.run(WARM_S + 0.1 * (tick + 1))
        queues.append(link.queue_s * 1e3)
    whole = seconds * link.rate
    return Measured(
        times[len(times) // 2],
        times[min(len(times) - 1, int(0.99 * len(times)))],
        (heavy.delivered - got) / whole,
        statistics.fmean(queues),
        None if other is None else (other.delivered - others) / whole,
    )


def main() -> None:
    """Print one row per controller: medians over links, and the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, default=24, help="links to draw")
    parser.add_argument("--seconds", type=float, default=12.0, help="simulated seconds per load, after warming up")
    parser.add_argument("--seed", type=int, default=1, help="of the links")
    given = parser.parse_args()
    links = list(drawn(given.links, given.seed))
    print("| controller | P50 | P99: median, worst link | P99 within twice the link's own time ", end="")
    print("| goodput: median, worst | queue | beside CUBIC: ours / CUBIC's |")
    print("|---|---|---|---|---|---|---|")
    for name, controller in CONTROLLERS.items():
        found = [measure(link, controller, given.seconds) for link in links]
        own = [1e3 * (link.delay_s + IMAGE / link.rate) for link in links]
        p99s = [each.p99_ms for each in found]
        quick = sum(p99 <= 2.0 * alone for p99, alone in zip(p99s, own, strict=True))
        alone = [each for each in found if each.cubic is None]
        shared = [(each.goodput, each.cubic) for each in found if each.cubic is not None]
        beside = f"{statistics.median(a for a, _ in shared):.2f} / {statistics.median(b for _, b in shared):.2f}"
        print(
            f"| {name} | {statistics.median(each.p50_ms for each in found):.0f} ms "
            f"| {statistics.median(p99s):.0f} ms, {max(p99s):.0f} ms | {quick} of {len(links)} "
            f"| {statistics.median(each.goodput for each in alone):.2f}, {min(each.goodput for each in alone):.2f} "
            f"| {statistics.median(each.queue_ms for each in alone):.0f} ms | {beside if shared else '-'} |"
        )


if __name__ == "__main__":
    main()
