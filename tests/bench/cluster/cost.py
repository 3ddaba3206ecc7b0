"""Processor time per request of ingress, proxy and replicas, and the rate at which one ingress is busy all the time.

One node, and a stage that takes no time. The first rounds are an open loop far below saturation; the last ones are a
closed loop with more and more callers. All parts, the load balancer and the load generator share this machine's cores,
so the rate that is reached is the machine's; one ingress on a core of its own would be saturated at 1000 / its
processor time per request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console

from tests.bench.cluster.load import Load, closed_loop, open_loop, until_ready
from tests.bench.cluster.local.balancer import balancer
from tests.bench.cluster.local.nodes import HEAD
from tests.bench.cluster.local.processes import PARTS, ProcessorTime, processor_time
from tests.bench.cluster.local.tier import PORT, ClusterTier, cluster_tier
from tests.bench.cluster.report import table
from tests.bench.cluster.scaling import READY_S, WARM_UP_S

SUMMARY: Final = "processor time per request, and the rate of one ingress"
NODE: Final = HEAD + 1


@dataclass(frozen=True, slots=True)
class Cost:
    """One round."""

    load: str
    rate: float
    p50_ms: float
    p99_ms: float
    failed: int
    cpu_ms: dict[str, float]
    """Processor time per request, by part."""
    ingresses: int
    ingress_busy: float
    """Share of one core that an ingress replica used, in the mean."""
    machine_busy: float
    """Share of all cores of this machine that the parts used together."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second of the open loop")
    parser.add_argument("--callers", default="1,2,4,8,16,32", help="numbers of callers of the closed loops")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of a round")
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the stage")


async def run(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure; the rows."""
    costs: list[Cost] = []
    with cluster_tier(0.0) as tier:
        tier.nodes.add(HEAD, 0)
        tier.nodes.add(NODE, given.replicas + 1)
        addresses = [tier.nodes.net.address(node) for node in (HEAD, NODE)]
        with balancer(tier.nodes.folder, addresses, PORT) as url:
            tier.deploy(num_cpus=1, min_replicas=given.replicas, max_replicas=given.replicas)
            await until_ready(url, READY_S)
            await closed_loop(url, tier.key, 4, WARM_UP_S)
            for _ in range(given.rounds):
                before = processor_time(tier)
                load = await open_loop(url, tier.key, given.rate, lambda _: asyncio.sleep(given.seconds))
                costs.append(cost_of(f"{given.rate:g} requests/s", tier, load, before))
            for callers in map(int, given.callers.split(",")):
                for _ in range(given.rounds):
                    before = processor_time(tier)
                    load = await closed_loop(url, tier.key, callers, given.seconds)
                    costs.append(cost_of(f"{callers} callers", tier, load, before))
    console.print(shown(costs))
    return {"costs": [asdict(each) for each in costs]}


def cost_of(name: str, tier: ClusterTier, load: Load, before: ProcessorTime) -> Cost:
    """What a load cost since `before`."""
    spent = processor_time(tier).since(before)
    ingresses = len(tier.replicas(NODE, "ingress")) + len(tier.replicas(HEAD, "ingress"))
    answered = max(len(load.outcomes) - len(load.failed), 1)
    return Cost(
        load=name,
        rate=load.rate(),
        p50_ms=load.latency_ms(50),
        p99_ms=load.latency_ms(99),
        failed=len(load.failed),
        cpu_ms={part: 1e3 * spent[part] / answered for part in PARTS},
        ingresses=ingresses,
        ingress_busy=spent["ingress"] / load.duration_s / max(ingresses, 1),
        machine_busy=sum(spent.values()) / load.duration_s / (os.cpu_count() or 1),
    )


def shown(costs: list[Cost]) -> Any:
    """A row per load, worst and best of its rounds."""
    parts = (f"{part}, ms" for part in PARTS)
    made = table("load", "requests/s, worst", "best", "P50, ms", "P99, worst", "failed", *parts, "ingress busy",
                 "machine busy", "one ingress saturates at")  # fmt: skip
    for name in dict.fromkeys(each.load for each in costs):
        rounds = [each for each in costs if each.load == name]
        rates = [each.rate for each in rounds]
        ingress = [each.cpu_ms["ingress"] for each in rounds]
        made.add_row(
            name, f"{min(rates):.0f}", f"{max(rates):.0f}", f"{max(each.p50_ms for each in rounds):.1f}",
            f"{max(each.p99_ms for each in rounds):.0f}", str(sum(each.failed for each in rounds)),
            *(_span([each.cpu_ms[part] for each in rounds]) for part in PARTS),
            _span([each.ingress_busy for each in rounds]), _span([each.machine_busy for each in rounds]),
            f"{1e3 / max(ingress):.0f}-{1e3 / min(ingress):.0f}/s",
        )  # fmt: skip
    return made


def _span(values: list[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"
