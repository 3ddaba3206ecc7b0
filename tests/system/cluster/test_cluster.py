"""The datacenter tier on a real Ray of three nodes, each with a network of its own, as `dc deploy` brings it there."""

from __future__ import annotations

import asyncio

import pytest

from loadgen.network.namespaces import available
from tests.bench.cluster.load import closed_loop, until_ready
from tests.bench.cluster.local.nodes import HEAD
from tests.bench.cluster.local.tier import PORT, STAGE, cluster_tier

SURVIVOR, VICTIM = 2, 3


@pytest.mark.slow
@pytest.mark.skipif(available() is not None, reason=f"no TUN link here: {available()}")
def test_a_node_dies_and_no_request_after_that_fails() -> None:
    with cluster_tier(0.0) as tier:
        tier.nodes.add(HEAD, 0)
        for node in (SURVIVOR, VICTIM):
            tier.nodes.add(node, 2)
        ingress = {"ingress_min_replicas": 2, "ingress_max_replicas": 2}
        tier.deploy(num_cpus=1, min_replicas=2, max_replicas=2, max_replicas_per_node=1, **ingress)
        assert all(tier.replicas(node, deployment) for node in (SURVIVOR, VICTIM) for deployment in (STAGE, "ingress"))
        url = f"http://{tier.nodes.net.address(SURVIVOR)}:{PORT}"
        asyncio.run(until_ready(url, within_s=60.0))
        tier.nodes.kill(VICTIM)
        load = asyncio.run(closed_loop(url, tier.key, callers=2, duration_s=3.0))
    assert [each.error for each in load.failed] == []
    assert load.outcomes
