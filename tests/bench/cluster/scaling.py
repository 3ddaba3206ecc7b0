"""Requests per second with 1, 2 and 4 nodes: does the tier grow with the cluster?

Each node has eight replicas of a stage that takes 100 ms per image and no processor time. A longer time
(`--batch-ms`) shows the growth where the machine's own cores would end it first. Callers wait for their
answers, twice as many as there are replicas. The share of linear is the rate by that of the first size, per node.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console

from tests.bench.cluster.load import closed_loop, until_ready
from tests.bench.cluster.local.balancer import balancer
from tests.bench.cluster.local.nodes import HEAD
from tests.bench.cluster.local.processes import PARTS, processor_time
from tests.bench.cluster.local.tier import PORT, ClusterTier, cluster_tier
from tests.bench.cluster.report import table

SUMMARY: Final = "requests per second with 1, 2 and 4 nodes"
BATCH_MS: Final = 100.0
WARM_UP_S: Final = 2.0
"""Not counted of each round: until all callers wait at replicas."""
READY_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement at one size."""

    nodes: int
    rate: float
    share: float
    """Of linear, by the mean rate of the first size."""
    p50_ms: float
    p99_ms: float
    failed: int
    cpu_ms: dict[str, float]
    """Processor time per request, by part."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--nodes", default="1,2,4", help="numbers of nodes with replicas, rising")
    parser.add_argument("--replicas", type=int, default=8, help="replicas per node")
    parser.add_argument("--batch-ms", type=float, default=BATCH_MS, help="the time that an image takes a replica")
    parser.add_argument("--rounds", type=int, default=3, help="measurements at each size")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of a measurement")
    parser.add_argument(
        "--front-cores", type=int, default=2, help="cores of the head, where ingress replicas have room"
    )


async def run(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure; the rows."""
    sizes = [int(word) for word in given.nodes.split(",")]
    rounds: list[Round] = []
    with cluster_tier(given.batch_ms) as tier:
        tier.nodes.add(HEAD, given.front_cores)
        addresses = [tier.nodes.net.address(node) for node in range(HEAD, HEAD + 1 + max(sizes))]
        with balancer(tier.nodes.folder, addresses, PORT) as url:
            for size in sizes:
                for node in range(HEAD + 1, HEAD + 1 + size):
                    if node not in tier.nodes.numbers:
                        tier.nodes.add(node, given.replicas)
                deploy_replicas(tier, size * given.replicas)
                await until_ready(url, READY_S)
                for _ in range(given.rounds):
                    rounds.append(await _round(tier, url, size, rounds, given))
                console.print(shown(rounds))
    return {"rounds": [asdict(each) for each in rounds]}


def deploy_replicas(tier: ClusterTier, replicas: int, **settings: object) -> None:
    """Deploy so many replicas of one core each, which take one image at a time and let one more wait."""
    fixed: dict[str, object] = {"num_cpus": 1, "min_replicas": replicas, "max_replicas": replicas}
    one_by_one = {"max_batch_size": 1, "max_ongoing_requests": 2, "max_queued_requests": 1000}
    tier.deploy(**fixed, **one_by_one, **settings)


async def _round(tier: ClusterTier, url: str, size: int, earlier: list[Round], given: argparse.Namespace) -> Round:
    before = processor_time(tier)
    load = await closed_loop(url, tier.key, 2 * size * given.replicas, given.seconds)
    spent = processor_time(tier).since(before)
    rate = load.rate(WARM_UP_S)
    alike = [each.rate for each in earlier if each.nodes == earlier[0].nodes]
    first = sum(alike) / len(alike) if alike and size != earlier[0].nodes else rate
    base = first * size / (earlier[0].nodes if earlier else size)
    answered = len(load.outcomes) - len(load.failed)
    return Round(
        nodes=size,
        rate=rate,
        share=rate / base,
        p50_ms=load.latency_ms(50, WARM_UP_S),
        p99_ms=load.latency_ms(99, WARM_UP_S),
        failed=len(load.failed),
        cpu_ms={part: 1e3 * spent[part] / max(answered, 1) for part in PARTS},
    )


def shown(rounds: list[Round]) -> Any:
    """A row per size, worst and best of its rounds."""
    made = table("nodes", "requests/s, worst", "best", "share of linear, worst", "best", "P50, ms", "P99, worst",
                 "failed", *(f"{part}, CPU ms" for part in PARTS))  # fmt: skip
    for size in dict.fromkeys(each.nodes for each in rounds):
        of_size = [each for each in rounds if each.nodes == size]
        rates, shares = [each.rate for each in of_size], [each.share for each in of_size]
        costs = [[each.cpu_ms[part] for each in of_size] for part in PARTS]
        made.add_row(
            str(size), f"{min(rates):.1f}", f"{max(rates):.1f}", f"{min(shares):.2f}", f"{max(shares):.2f}",
            f"{max(each.p50_ms for each in of_size):.0f}", f"{max(each.p99_ms for each in of_size):.0f}",
            str(sum(each.failed for each in of_size)),
            *(f"{min(cost):.2f}-{max(cost):.2f}" for cost in costs),
        )  # fmt: skip
    return made
