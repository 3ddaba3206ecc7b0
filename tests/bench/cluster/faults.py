"""Faults of a real Ray of several nodes at 40 % of capacity: does a request fail that was not in flight on what was
killed?

    python -m tests.bench.cluster.faults [--only replica,node] [--after 20] [--out FILE]      (root, redis-server)

Two nodes with three replicas each of a stage that takes 100 ms; the head has none. The capacity is ten requests per
second and replica. The load generator sends Poisson arrivals through a load balancer in front of the nodes with
replicas, and repeats nothing that has begun to be answered. The head is left out, as KubeRay leaves it out with
`excludeHeadPodFromServeSvc`: its proxy takes requests before it knows the replicas. A failed request counts as in
flight if it was sent before the kill and ended after it. `not ready` is the time for which `/readyz`, asked twenty
times a second, did not say 200 within one second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from hawkvision.core.errors import HawkVisionError, NotReady
from loadgen.clients.base import ClientReply, RequestTimes
from loadgen.clients.connections import ConnectionPool
from loadgen.clients.http import exchange
from tests.bench.cluster.load import Load, open_loop, until_ready
from tests.bench.cluster.local.balancer import balancer
from tests.bench.cluster.local.nodes import HEAD
from tests.bench.cluster.local.redis import redis
from tests.bench.cluster.local.tier import PORT, STAGE, ClusterTier, cluster_tier

BATCH_MS: Final = 100.0
READY_S: Final = 120.0
WORKERS: Final = (2, 3)
REPLICAS: Final = 3
RATE: Final = 0.4 * len(WORKERS) * REPLICAS * 1e3 / BATCH_MS
"""Requests per second: 40 % of the capacity."""
INGRESS: Final = {"ingress_min_replicas": len(WORKERS), "ingress_max_replicas": len(WORKERS)}
BEFORE_S: Final = 4.0
WEDGED_S: Final = 180.0
"""The longest wait for Serve to replace a replica that does nothing."""
AWAY_S: Final = 8.0
"""How long the head is away."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens; it runs on a thread."""

    name: str
    act: Callable[[ClusterTier], None]
    repair: Callable[[ClusterTier], None] = lambda _: None
    """After the measurement, for the next one."""


@dataclass(slots=True)
class Readiness:
    """When `/readyz` was asked and whether it said 200, on the monotonic clock."""

    asked: list[tuple[float, bool]] = field(default_factory=list)

    def red_s(self, since: float) -> float:
        """Seconds of the time after a moment for which it did not say 200."""
        later = [each for each in self.asked if each[0] >= since]
        return sum(after - at for (at, ready), (after, _) in itertools.pairwise(later) if not ready)

    def first_red_s(self, since: float) -> float | None:
        """Seconds from a moment until it first did not say 200; None if it always did."""
        return next((at - since for at, ready in self.asked if at >= since and not ready), None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row."""

    fault: str
    rate: float
    requests: int
    in_flight_failed: int
    failed: int
    """Beyond those in flight."""
    errors: dict[str, int]
    last_failure_s: float
    """From the fault until the last failure; 0 if there was none."""
    worst_ms: float
    not_ready_after_s: float | None
    not_ready_s: float


def signal_process(deployment: str, number: signal.Signals) -> Callable[[ClusterTier], None]:
    """Send one replica of a deployment a signal."""

    def act(tier: ClusterTier) -> None:
        os.kill(next(pid for node in tier.nodes.numbers for pid in tier.replicas(node, deployment)), number)

    return act


def wedge_replica(tier: ClusterTier) -> None:
    """Suspend one replica of the stage, and wait until Serve has ended it."""
    victim = next(pid for node in tier.nodes.numbers for pid in tier.replicas(node, STAGE))
    os.kill(victim, signal.SIGSTOP)
    ends = time.monotonic() + WEDGED_S
    while time.monotonic() < ends and Path(f"/proc/{victim}").exists():
        time.sleep(0.5)


def busiest_node(tier: ClusterTier) -> int:
    """The worker with an ingress replica and the most replicas."""
    return max(
        (node for node in tier.nodes.numbers if node != HEAD),
        key=lambda node: (bool(tier.replicas(node, "ingress")), len(tier.replicas(node, STAGE))),
    )


def kill_node(tier: ClusterTier) -> None:
    """Kill all processes of a worker."""
    tier.nodes.kill(busiest_node(tier))


def restart_missing(tier: ClusterTier) -> None:
    """Start the workers again that are gone."""
    for node in WORKERS:
        if node not in tier.nodes.numbers:
            tier.nodes.restart(node)


def deploy(tier: ClusterTier, **settings: object) -> None:
    """Deploy the replicas of all workers; the tier outlives its head if Redis keeps the head's state."""
    survives = "false" if tier.nodes.store is None else "true"
    replicas = len(WORKERS) * REPLICAS
    fixed: dict[str, object] = {"num_cpus": 1, "min_replicas": replicas, "max_replicas": replicas}
    one_by_one = {"max_batch_size": 1, "max_ongoing_requests": 2, "max_queued_requests": 1000}
    tier.deploy(**fixed, **one_by_one, survives_head=survives, **INGRESS, **settings)


def update(tier: ClusterTier) -> None:
    """Deploy again with another setting, which each replica must get."""
    deploy(tier, max_batch_size=7)


def restart_head(tier: ClusterTier) -> None:
    """Kill the head's processes, and start it again after a while."""
    tier.nodes.kill(HEAD)
    time.sleep(AWAY_S)
    tier.nodes.restart(HEAD)


def replace_head(tier: ClusterTier) -> None:
    """Without a store: restart the head, start what went with it, and deploy again, as KubeRay does."""
    restart_head(tier)
    for node in WORKERS:
        tier.nodes.kill(node)
        tier.nodes.restart(node)
    deploy(tier)


WITH_STORE: Final = (
    Fault("none", lambda _: None),
    Fault("replica kill -9", signal_process(STAGE, signal.SIGKILL)),
    Fault("replica wedged", wedge_replica),
    Fault("ingress kill -9", signal_process("ingress", signal.SIGKILL)),
    Fault("node kill -9", kill_node, restart_missing),
    Fault("rolling update", update),
    Fault(f"head away {AWAY_S:g} s, with Redis", restart_head),
)
WITHOUT_STORE: Final = (Fault(f"head away {AWAY_S:g} s, without Redis", replace_head),)


def main() -> int:
    """Run from the command line; the exit status is 1 after a printed error."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cluster.faults", description=__doc__)
    parser.add_argument("--only", default="", help="words of which the name of a fault has one, separated by commas")
    parser.add_argument("--after", type=float, default=20.0, help="seconds of load after a fault")
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all nodes are stopped
    try:
        rows = asyncio.run(run(given, Console(width=200)))
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1))
    return 0


async def run(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure; the rows."""
    words = [word for word in given.only.split(",") if word]
    outcomes: list[Outcome] = []
    for with_store, faults in ((True, WITH_STORE), (False, WITHOUT_STORE)):
        chosen = [fault for fault in faults if not words or any(word in fault.name for word in words)]
        if not chosen:
            continue
        with cluster_tier(BATCH_MS) as tier, ExitStack() as stack:
            if with_store:
                tier.nodes.store = stack.enter_context(redis(tier.nodes.folder))
            tier.nodes.add(HEAD, 0)
            for node in WORKERS:
                tier.nodes.add(node, REPLICAS + 1)
            addresses = [tier.nodes.net.address(node) for node in WORKERS]
            url = stack.enter_context(balancer(tier.nodes.folder, addresses, PORT))
            deploy(tier)
            for fault in chosen:
                await until_ready(url, READY_S)
                outcomes.append(await measured(fault, tier, url, given.after, RATE))
                console.print(shown(outcomes[-1:]))
                await asyncio.to_thread(fault.repair, tier)
    console.print(shown(outcomes))
    return {"faults": [asdict(each) for each in outcomes]}


async def measured(fault: Fault, tier: ClusterTier, url: str, after_s: float, rate: float) -> Outcome:
    """One fault under load; the load lasts until so many seconds after the fault is over."""
    since = over = 0.0

    async def act(started: float) -> None:
        nonlocal since, over
        await asyncio.sleep(started + BEFORE_S - time.monotonic())
        since = time.monotonic()
        await asyncio.to_thread(fault.act, tier)
        over = time.monotonic()
        await asyncio.sleep(after_s)

    async with watched(url) as readiness:
        load = await open_loop(url, tier.key, rate, act=act)
        with suppress(NotReady):
            await until_ready(url, READY_S)
    return outcome_of(fault.name, rate, load, readiness, since)


def outcome_of(name: str, rate: float, load: Load, readiness: Readiness, since: float) -> Outcome:
    """The row of a fault at a moment of the monotonic clock."""
    at = since - load.started
    in_flight = [each for each in load.failed if each.sent_s <= at <= each.done_s]
    return Outcome(
        fault=name,
        rate=rate,
        requests=len(load.outcomes),
        in_flight_failed=len(in_flight),
        failed=len(load.failed) - len(in_flight),
        errors=load.errors,
        last_failure_s=max((each.done_s - at for each in load.failed), default=0.0),
        worst_ms=load.latency_ms(100),
        not_ready_after_s=readiness.first_red_s(since),
        not_ready_s=readiness.red_s(since),
    )


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[Readiness]:
    """Ask for readiness while the block lasts."""
    found, pool = Readiness(), ConnectionPool(url, limit=1, timeout_s=1.0)
    head = pool.head("GET", "/readyz", "Connection: close\r\n")

    async def ask() -> None:
        while True:
            at = time.monotonic()
            reply = await exchange(pool, head, b"", RequestTimes())
            found.asked.append((at, not isinstance(reply, ClientReply) and reply.status == 200))
            await asyncio.sleep(max(0.0, at + 0.05 - time.monotonic()))

    asking = asyncio.create_task(ask())
    try:
        yield found
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await pool.close()


def shown(rows: list[Outcome]) -> Any:
    """A row per fault."""
    made = Table("fault", box=None, pad_edge=False, header_style="bold")
    for title in ("requests/s", "requests", "failed in flight", "failed beyond", "errors", "last failure",
                  "slowest, ms", "not ready after", "not ready for"):  # fmt: skip
        made.add_column(title, justify="right")
    for row in rows:
        made.add_row(
            row.fault, f"{row.rate:.0f}", str(row.requests), str(row.in_flight_failed), str(row.failed),
            ", ".join(f"{count} {code}" for code, count in row.errors.items()) or "0", f"{row.last_failure_s:.1f} s",
            f"{row.worst_ms:.0f}",
            "-" if row.not_ready_after_s is None else f"{row.not_ready_after_s:.1f} s", f"{row.not_ready_s:.1f} s",
        )  # fmt: skip
    return made


if __name__ == "__main__":
    sys.exit(main())
