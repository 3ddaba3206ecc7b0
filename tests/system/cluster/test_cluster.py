"""The datacenter tier on a real Ray of three nodes, each with a network of its own, as `dc deploy` brings it there."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from functools import partial

import pytest

from hawkvision.datacenter.ingress.replica import INGRESS
from loadgen.network.namespaces import available
from tests.bench.cluster.load import closed_loop, until_ready
from tests.bench.cluster.local.nodes import HEAD
from tests.bench.cluster.local.tier import PORT, STAGE, ClusterTier, cluster_tier
from tests.waiting import wait_until

SURVIVOR, VICTIM = WORKERS = (2, 3)
DRAIN_QUICKLY = {"RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}
"""Instead of 30 s, where nothing is inside."""


@pytest.mark.slow
@pytest.mark.skipif(available() is not None, reason=f"no TUN link here: {available()}")
def test_a_node_dies_and_is_drained_and_no_request_after_that_fails() -> None:
    with cluster_tier(0.0, DRAIN_QUICKLY) as tier:
        tier.nodes.add(HEAD, 0)
        for node in WORKERS:
            tier.nodes.add(node, 2)
        tier.deploy()  # by default any node may be lost
        until_whole(tier)
        url = f"http://{tier.nodes.net.address(SURVIVOR)}:{PORT}"
        asyncio.run(until_ready(url, within_s=60.0))
        tier.nodes.kill(VICTIM)
        loads = [asyncio.run(closed_loop(url, tier.key, callers=2, duration_s=3.0))]
        page = scraped(url, tier.key)
        tier.nodes.restart(VICTIM)
        tier.nodes.kill(VICTIM)
        tier.nodes.restart(VICTIM)  # with two dead nodes of its address in Ray's list
        until_whole(tier)
        drain = ["dc", "drain", "--address", tier.nodes.address, "--node", tier.nodes.net.address(VICTIM)]
        drained = tier.nodes.run(HEAD, sys.executable, "-m", "hawkvision.cli", *drain)
        assert drained.returncode == 0, drained.stderr
        assert not any(tier.replicas(VICTIM, deployment) for deployment in (STAGE, INGRESS))
        tier.nodes.kill(VICTIM)
        loads.append(asyncio.run(closed_loop(url, tier.key, callers=2, duration_s=1.0)))
        assert f'live_replicas{{group="{STAGE}"}} 1.0' in scraped(url, tier.key)
    assert [each.error for load in loads for each in load.failed] == []
    assert all(load.outcomes for load in loads)
    assert f'min_replicas{{group="{STAGE}"}} 2.0' in page


def until_whole(tier: ClusterTier) -> None:
    """Wait until each worker has one replica of each deployment."""
    for node in WORKERS:
        for deployment in (STAGE, INGRESS):
            wait_until(partial(is_there, tier, node, deployment), within_s=120.0)


def is_there(tier: ClusterTier, node: int, deployment: str) -> bool:
    return len(tier.replicas(node, deployment)) == 1


def scraped(url: str, key: str) -> str:
    asked = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=10.0) as reply:
        page: str = reply.read().decode()
    return page
