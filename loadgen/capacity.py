"""`python -m loadgen find-capacity`: the highest rate at which a server keeps its P99 and its accuracy.

Every probe is an open loop of Poisson arrivals. The rate doubles until a probe fails, then the bracket between what
held and what failed is halved, geometrically, until it is narrow enough. A probe that fails is repeated once, for one
hiccup of a shared machine is not the server's limit; only a rate that fails twice counts as failed.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.console import Console

from hawkvision.artifacts import write_atomic
from hawkvision.errors import ConfigError
from loadgen import noise, setup
from loadgen.arrivals import MAX_RATE, Constant, Poisson
from loadgen.processes import Crew
from loadgen.record import Origin, Outcome, TargetClass
from loadgen.setup import Setup

SUMMARY: Final = "Find the highest rate at which a server keeps a P99 and an accuracy."
LEAST_RATE: Final = 0.1
"""Below it a probe would take hours."""
WARM_UP_S: Final = 1.0
"""Of every probe; not counted."""
GENERATOR_SHARE: Final = 0.7
"""Of the generator's own highest rate, beyond which it would measure itself."""


class Probe(msgspec.Struct, frozen=True):
    """One rate, tried once."""

    rate: float
    n: int
    p99_ms: float | None
    """None: more than one request in a hundred was not answered at all."""
    accuracy: float | None
    """Right answers over all requests; None without labels."""
    late_ms: float
    """P99 of how late the generator itself was."""
    held: bool


class Capacity(msgspec.Struct, frozen=True):
    """What was found, as `--json` writes it."""

    url: str
    p99_ms: float
    min_accuracy: float | None
    targets: list[TargetClass]
    data: str
    low: float
    """The highest rate that held; 0 if none did."""
    high: float | None
    """The lowest rate that failed twice; None if none did."""
    generator_limit: float | None
    """The highest rate that this generator was allowed to offer."""
    probes: list[Probe]
    origin: Origin


@dataclass(slots=True)
class Search:
    """Which rate to try next: doubling, then bisection. Knows no servers."""

    first: float
    precision: float
    """The bracket is narrow enough when its ends differ by this share."""
    most: float
    """No rate above it is tried."""
    probes_left: int
    low: float = 0.0
    high: float = math.inf
    doubted: float | None = None
    """A rate that failed once."""

    def next(self) -> float | None:
        """The next rate to try, or None when the search is over."""
        if self.probes_left <= 0:
            return None
        if self.doubted is not None:
            return self.doubted
        if self.high == math.inf:
            if self.low >= self.most:
                return None
            return min(self.most, 2.0 * self.low if self.low else self.first)
        if self.low == 0.0:
            return self.high / 2.0 if self.high / 2.0 >= LEAST_RATE else None
        if self.high <= self.low * (1.0 + self.precision):
            return None
        return math.sqrt(self.low * self.high)

    def tell(self, rate: float, held: bool) -> None:
        """What came of the rate that was tried."""
        self.probes_left -= 1
        if held:
            self.low, self.doubted = max(self.low, rate), None
        elif self.doubted is None:
            self.doubted = rate
        else:
            self.high, self.doubted = min(self.high, rate), None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m loadgen find-capacity`."""
    setup.add_arguments(parser)
    parser.add_argument("--p99-ms", type=float, required=True, help="that is to be kept, from when requests are due")
    parser.add_argument("--min-accuracy", type=float, help="share of all requests that must be answered right")
    parser.add_argument("--from-rate", type=float, default=8.0, help="first rate tried (default: %(default)s)")
    parser.add_argument("--precision", type=float, default=0.05, help="width of the bracket (default: %(default)s)")
    parser.add_argument("--probe-requests", type=int, default=300, help="counted, at least (default: %(default)s)")
    parser.add_argument(
        "--probe-s", type=float, default=5.0, help="counted, at least: queues take time to grow (default: %(default)s)"
    )
    parser.add_argument("--max-probes", type=int, default=24, help="repeats included (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found here as well")
    parser.add_argument("--no-noise", action="store_true", help="do not measure the generator first")


async def run(given: argparse.Namespace) -> int:
    """Search and print; 0 if any rate held, 1 if none did.

    Raises:
        HawkVisionError: for options that do not fit, or a server that cannot be connected to.
    """
    _check(given)
    setup_ = setup.read_setup(given)
    if given.min_accuracy is not None and setup_.dataset.labels is None:
        raise ConfigError("--min-accuracy: expected labelled pictures; --data has none")
    started = setup.origin(setup_.seed)
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=160, highlight=False)
    probes: list[Probe] = []
    async with Crew(setup_.processes) as crew:
        await crew.load(setup_.dataset)
        limit: float | None = None
        if not given.no_noise:
            floor = await noise.measure(crew, setup_.job(Constant(noise.LEAST_RATE), given.probe_s), given.from_rate)
            limit = GENERATOR_SHARE * floor.max_rate
            console.print(f"the generator alone: P99 {floor.p99_ms:.2f} ms, at most {floor.max_rate:.0f} requests/s")
        search = Search(given.from_rate, given.precision, limit or MAX_RATE, given.max_probes)
        while (rate := search.next()) is not None:
            probe = await try_rate(crew, setup_, rate, len(probes), given)
            probes.append(probe)
            console.print(_said(probe))
            search.tell(rate, probe.held)
    high = search.high if search.high < math.inf else None
    found = Capacity(
        given.url, given.p99_ms, given.min_accuracy, setup_.classes, setup_.dataset.name,
        search.low, high, limit, probes, started,
    )  # fmt: skip
    console.print(conclusion(found))
    if given.json is not None:
        write_atomic(given.json, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0 if found.low > 0.0 else 1


async def try_rate(crew: Crew, setup_: Setup, rate: float, number: int, given: argparse.Namespace) -> Probe:
    """One probe; every probe draws a schedule of its own."""
    duration_s = WARM_UP_S + max(given.probe_s, given.probe_requests / rate)
    job = replace(setup_, seed=setup_.seed + number).job(Poisson(rate), duration_s)
    outcomes = [each for each in await crew.run(job) if each.due_s >= WARM_UP_S]
    return judge(rate, outcomes, given.p99_ms, given.min_accuracy)


def judge(rate: float, outcomes: list[Outcome], p99_ms: float, min_accuracy: float | None) -> Probe:
    """Whether the outcomes kept both. What was not answered took for ever, and was not right."""
    n = len(outcomes)
    latency = np.array([each.latency_s * 1e3 if each.answered else math.inf for each in outcomes])
    p99 = float(np.quantile(latency, 0.99, method="higher")) if n else math.inf
    accuracy = None
    if any(each.right is not None for each in outcomes):
        accuracy = sum(each.right is True for each in outcomes) / n
    late = float(np.quantile([(each.sent_s - each.due_s) * 1e3 for each in outcomes], 0.99)) if n else 0.0
    right_enough = min_accuracy is None or (accuracy is not None and accuracy >= min_accuracy)
    return Probe(rate, n, p99 if p99 < math.inf else None, accuracy, late, p99 <= p99_ms and right_enough)


def conclusion(found: Capacity) -> str:
    """The answer in a sentence, with its bracket."""
    wanted = f"P99 ≤ {found.p99_ms:g} ms"
    if found.min_accuracy is not None:
        wanted += f" and accuracy ≥ {found.min_accuracy:g}"
    if found.low == 0.0:
        return f"no rate kept {wanted}; the lowest tried was {min(each.rate for each in found.probes):.3g} requests/s"
    answer = f"capacity: {found.low:.4g} requests/s at {wanted}"
    if found.high is not None:
        return f"{answer} ({found.low:.4g} held, {found.high:.4g} failed twice; {len(found.probes)} probes)"
    if found.generator_limit is not None and found.low >= found.generator_limit:
        return f"{answer}, and perhaps more: this generator offers no higher rate; try --processes"
    return f"{answer}, and perhaps more: the search ended after {len(found.probes)} probes"


def _check(given: argparse.Namespace) -> None:
    setup.positive("--p99-ms", given.p99_ms)
    setup.positive("--precision", given.precision)
    setup.positive("--probe-s", given.probe_s)
    if not LEAST_RATE <= given.from_rate <= MAX_RATE:
        raise ConfigError(f"--from-rate: expected {LEAST_RATE:g} to {MAX_RATE:g}, got {given.from_rate!r}")
    if given.min_accuracy is not None and not 0.0 < given.min_accuracy <= 1.0:
        raise ConfigError(f"--min-accuracy: expected a fraction above 0, at most 1, got {given.min_accuracy!r}")
    if given.probe_requests < 100:
        raise ConfigError(f"--probe-requests: expected at least 100, for a P99; got {given.probe_requests}")
    if given.max_probes < 1:
        raise ConfigError(f"--max-probes: expected at least 1, got {given.max_probes}")


def _said(probe: Probe) -> str:
    p99 = "P99 none" if probe.p99_ms is None else f"P99 {probe.p99_ms:.1f} ms"
    accuracy = "" if probe.accuracy is None else f", right {probe.accuracy:.1%}"
    late = f", generator late {probe.late_ms:.1f} ms" if probe.late_ms > 1.0 else ""
    return f"{probe.rate:8.4g} requests/s: {p99}{accuracy}, n={probe.n}{late}: {'held' if probe.held else 'failed'}"
