"""The walk of an operator over a cluster of two workers, with the defaults of `dc deploy`: what do callers notice?

    python -m tests.bench.cluster.walk [--rate 20] [--after 5]      (root)

Two workers of two cores and a head without; a stage that takes no time. Either worker is killed with -9 and started
again; drained, ended and started again; the application is updated, and once more beside a second application; then it
is removed, and the other one must still answer. The load, the balancer and the columns are those of
`tests.bench.cluster.faults`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final
from urllib.request import urlopen

from rich.console import Console

from hawkvision.core.errors import HawkVisionError, NotReady
from tests.bench.cluster.faults import READY_S, WORKERS, Fault, measured, shown
from tests.bench.cluster.load import until_ready
from tests.bench.cluster.local.balancer import balancer
from tests.bench.cluster.local.nodes import HEAD
from tests.bench.cluster.local.tier import PORT, STAGE, ClusterTier, cluster_tier

DRAIN_S: Final = 45.0
VARIABLES: Final = {
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
}
"""Serve's own proxies, as on machines without Kubernetes, and no idle wait when a node leaves."""
OTHER: Final = """
import ray
from ray import serve
from starlette.responses import Response

@serve.deployment(ray_actor_options={"num_cpus": 0.0})
class Other:
    def __call__(self, request):
        return Response("another application")

ray.init(address="auto", log_to_driver=False)
serve.run(Other.bind(), name="other", route_prefix="/other")
"""


def wait_until_whole(tier: ClusterTier) -> None:
    """Wait until each worker has a replica of the stage and an ingress.

    Raises:
        NotReady: if one lacks it after `READY_S`.
    """
    ends = time.monotonic() + READY_S
    while not all(len(tier.replicas(node, each)) == 1 for node in WORKERS for each in (STAGE, "ingress")):
        if time.monotonic() > ends:
            raise NotReady(f"the cluster is not whole after {READY_S:g} s")
        time.sleep(0.2)


def run_on_head(tier: ClusterTier, *words: str) -> None:
    """Run a command of the operator.

    Raises:
        NotReady: if it fails; with what it says.
    """
    done = tier.nodes.run(HEAD, sys.executable, *words)
    if done.returncode != 0:
        raise NotReady(f"{' '.join(words)}: {done.stderr.strip()[-3000:]}")


def kill(node: int, tier: ClusterTier) -> None:
    """End all processes of a worker with -9."""
    tier.nodes.kill(node)


def drain(node: int, tier: ClusterTier) -> None:
    """`dc drain` of a worker, which is then ended."""
    command = ("-m", "hawkvision.cli", "dc", "drain", "--address", tier.nodes.address)
    run_on_head(tier, *command, "--node", tier.nodes.net.address(node), "--limit-s", f"{DRAIN_S:g}")
    tier.nodes.kill(node)


def start_again(node: int, tier: ClusterTier) -> None:
    """Start a worker that is gone, and wait for all replicas."""
    tier.nodes.restart(node)
    wait_until_whole(tier)


def update(most: int, tier: ClusterTier) -> None:
    """Deploy with another batch size, and wait for all replicas."""
    tier.deploy(max_batch_size=most)
    wait_until_whole(tier)


def steps(other: str) -> Iterator[Fault]:
    """The walk; `other` is the program that deploys a second application."""
    for name, act in (("killed", kill), ("drained and ended", drain)):
        for node in WORKERS:
            yield Fault(f"node {node} {name}", partial(act, node))
            yield Fault(f"node {node} started again", partial(start_again, node))
    yield Fault("updated", partial(update, 7))
    yield Fault("second application", lambda tier: run_on_head(tier, other))
    yield Fault("updated beside it", partial(update, 6))


async def run(rate: float, after_s: float, console: Console) -> None:
    """Walk and print."""
    with cluster_tier(0.0, VARIABLES) as tier, ExitStack() as stack:
        tier.nodes.add(HEAD, 0)
        for node in WORKERS:
            tier.nodes.add(node, 2)
        tier.deploy()
        addresses = [tier.nodes.net.address(node) for node in WORKERS]
        url = stack.enter_context(balancer(tier.nodes.folder, addresses, PORT))
        await until_ready(url, READY_S)
        await asyncio.to_thread(wait_until_whole, tier)
        other = tier.nodes.folder / "other.py"
        other.write_text(OTHER)
        outcomes = []
        # One event loop for all steps: a worker ends with the thread that started it.
        for step in steps(str(other)):
            outcomes.append(await measured(step, tier, url, after_s, rate))
            console.print(shown(outcomes[-1:]))
        console.print(shown(outcomes))
        await asyncio.to_thread(
            run_on_head, tier, "-m", "hawkvision.cli", "dc", "remove", "--address", tier.nodes.address
        )
        with await asyncio.to_thread(urlopen, f"{url}/other", timeout=READY_S) as reply:
            console.print(f"removed; /other says: {reply.read().decode()}")


def main() -> int:
    """Run from the command line; the exit status is 1 after a printed error."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cluster.walk", description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--after", type=float, default=5.0, help="seconds of load after each step")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all nodes are stopped
    try:
        asyncio.run(run(given.rate, given.after, Console(width=200)))
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
