"""The datacenter tier on a real Ray of three nodes, each with a network of its own, as `dc deploy` brings it there."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadgen.network.namespaces import available
from tests.bench.cluster.load import Load, open_loop, until_ready
from tests.bench.cluster.local.nodes import HEAD
from tests.bench.cluster.local.tier import PORT, STAGE, ClusterTier, cluster_tier
from tests.waiting import until

WORKERS = (2, 3)
READY_S = 60.0


@pytest.mark.slow
@pytest.mark.skipif(available() is not None, reason=f"no TUN link here: {available()}")
def test_a_node_dies_and_the_tier_goes_on_without_it() -> None:
    with cluster_tier(0.0) as tier:
        tier.nodes.add(HEAD, 0)
        for node in WORKERS:
            tier.nodes.add(node, 2)
        tier.deploy(num_cpus=1, min_replicas=2, max_replicas=2)
        load, died_s = asyncio.run(load_while_a_node_dies(tier))
    assert [each for each in load.outcomes if each.answered and each.due_s > died_s]
    assert not [each.error for each in load.failed if not each.sent_s <= died_s <= each.done_s]


async def load_while_a_node_dies(tier: ClusterTier) -> tuple[Load, float]:
    """Ten requests a second to the proxy of the node that lives, until its tier is ready again; and when one died."""
    victim = next(node for node in WORKERS if tier.replicas(node, STAGE) and not tier.replicas(node, "ingress"))
    (survivor,) = set(WORKERS) - {victim}
    url = f"http://{tier.nodes.net.address(survivor)}:{PORT}"
    await until_ready(url, READY_S)
    died_s = 0.0

    async def act(started: float) -> None:
        nonlocal died_s
        await asyncio.to_thread(tier.nodes.kill, victim)
        died_s = time.monotonic() - started
        await until(lambda: sum(len(tier.replicas(node, STAGE)) for node in tier.nodes.numbers) == 2)
        await until_ready(url, READY_S)

    return await open_loop(url, tier.key, 10.0, act), died_s
