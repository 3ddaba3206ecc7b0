"""Replicas and nodes under load and after it: does the tier ask for a machine when it needs one, and give it back?

Ray's own autoscaler runs on the head; its cloud is this machine, where each node that it asks for is really started.
The tier begins with few replicas on one node. Load arrives for which they are too few, stays, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console

from tests.bench.cluster.load import open_loop, until_ready
from tests.bench.cluster.local.balancer import balancer
from tests.bench.cluster.local.nodes import HEAD
from tests.bench.cluster.local.provider import NodeFactory, node_factory, settings
from tests.bench.cluster.local.tier import PORT, STAGE, ClusterTier, cluster_tier
from tests.bench.cluster.report import table
from tests.bench.cluster.scaling import BATCH_MS, READY_S
from tests.waiting import until

SUMMARY: Final = "replicas and nodes under load and after it"
CPUS: Final = 8
"""Of a node."""
MOST_NODES: Final = 2
FEWEST: Final = 2
"""Replicas without load."""
IDLE_S: Final = 10.0
"""After which the autoscaler gives a node back that runs nothing."""
LEAVE_S: Final = 120.0
"""The longest wait for the return of replicas and nodes."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What there was at one time."""

    at_s: float
    replicas: int
    ingresses: int
    nodes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the load")
    parser.add_argument("--rate", type=float, default=90.0, help="requests per second; a replica answers ten")


async def run(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure; the rows."""
    most = CPUS * MOST_NODES - MOST_NODES
    with cluster_tier(BATCH_MS) as tier:
        tier.nodes.environment |= {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "120"}
        tier.nodes.autoscaler = settings(tier.nodes.folder, CPUS, MOST_NODES, IDLE_S)
        async with node_factory(tier.nodes, CPUS) as factory:
            await asyncio.to_thread(tier.nodes.add, HEAD, 0)
            addresses = [tier.nodes.net.address(node) for node in range(HEAD, HEAD + 1 + MOST_NODES)]
            with balancer(tier.nodes.folder, addresses, PORT) as url:
                await asyncio.to_thread(
                    tier.deploy, num_cpus=1, min_replicas=FEWEST, max_replicas=most, target_ongoing_requests=1,
                    max_batch_size=1, max_ongoing_requests=2, max_queued_requests=1000,
                )  # fmt: skip
                await until_ready(url, READY_S)
                async with observed(tier, factory) as moments:
                    load = await open_loop(url, tier.key, given.rate, lambda _: asyncio.sleep(given.seconds))
                    await until(lambda: is_back(moments[-1]), LEAVE_S)
    timeline = [Moment(each.at_s - load.started, *_counts(each)) for each in moments]
    console.print(shown(timeline))
    console.print(
        f"load from 0 to {load.duration_s:.0f} s: {len(load.outcomes)} requests, {len(load.failed)} failed "
        f"{load.errors or ''}; nodes asked for and given back: "
        + ", ".join(f"{count:+d} at {at - load.started:.0f} s" for at, count in factory.requests)
    )
    return {
        "timeline": [asdict(each) for each in timeline],
        "load_s": load.duration_s,
        "requests": len(load.outcomes),
        "errors": load.errors,
    }


def is_back(moment: Moment) -> bool:
    """Whether replicas and nodes are as few as at the beginning."""
    return moment.replicas == FEWEST and moment.nodes == 1


def _counts(moment: Moment) -> tuple[int, int, int]:
    return moment.replicas, moment.ingresses, moment.nodes


@asynccontextmanager
async def observed(tier: ClusterTier, factory: NodeFactory) -> AsyncIterator[list[Moment]]:
    """What there is, twice a second, by the processes of the nodes."""
    moments: list[Moment] = []

    def now() -> Moment:
        found = {
            deployment: sum(len(tier.replicas(node, deployment)) for node in tier.nodes.numbers)
            for deployment in (STAGE, "ingress")
        }
        return Moment(time.monotonic(), found[STAGE], found["ingress"], factory.workers)

    async def look() -> None:
        while True:
            moments.append(await asyncio.to_thread(now))
            await asyncio.sleep(0.5)

    moments.append(now())
    looking = asyncio.create_task(look())
    try:
        yield moments
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def shown(timeline: list[Moment]) -> Any:
    """A row whenever something changed."""
    made = table("second", "replicas", "ingress replicas", "nodes")
    for number, moment in enumerate(timeline):
        if number == 0 or _counts(moment) != _counts(timeline[number - 1]):
            made.add_row(f"{moment.at_s:.1f}", *map(str, _counts(moment)))
    return made
