"""`python -m tests.bench.transport.both_tiers`: both tiers at once against either alone.

A node whose edge stage takes as long as is told (`slow_edge`: it waits without a processor), or is simulated RTL of an
FPGA, in front of a real tier over an emulated link. All modes get the same images at the same moments, by the same
node: `edge-first` is a node with `uplink_metered`, `both` one without, `datacenter` asks that one for `quality=best`.
Callers ask with `on_miss=wait`, so that no deadline cuts a latency, or with `degrade`.

Latencies are of the images that the edge alone does not accept: the same ones in each mode. Needs root.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from hawkvision.models.manifest import models_dir
from loadgen.clients.engine import ServerAddress
from loadgen.clients.processes import WorkerProcesses
from loadgen.commands.options import MAX_IN_FLIGHT, Setup
from loadgen.network.profiles import LinkProfile, load_profile
from loadgen.workload import target_mix
from loadgen.workload.arrivals import parse as parse_arrivals
from loadgen.workload.dataset import Dataset, read_dataset
from loadgen.workload.record import RequestOutcome
from tests.bench.policies.deployment import Deployment
from tests.bench.transport.slow_edge import EDGE_MS

SUMMARY: Final = "Compare both tiers at once with edge first and with the datacenter alone, on a slow edge."
MODES: Final = ("edge-first", "both", "datacenter")
LAN: Final = load_profile("lan")
SLOW: Final = "tests.bench.transport.slow_edge"
LEARN_S: Final = 3.0
"""Of requests before the first that counts: the node learns both distributions."""
CANCELLED: Final = re.compile(r"^hawkvision_escalations_cancelled_total\{.*\} (\S+)$", re.MULTILINE)


class Cell(msgspec.Struct, frozen=True):
    """One mode at one speed of the edge and one deadline, in one run."""

    run: int
    edge_ms: float
    deadline_ms: float | None
    mode: str
    n: int
    escalated: int
    """Images that the edge alone does not accept."""
    p50_ms: float
    p99_ms: float
    """Of these."""
    p50_all_ms: float
    right_in_time: float
    """Share of all requests; with no deadline, that were right."""
    bytes_per_image: float
    """Up the link, headers included."""
    cancelled: int
    """Escalations that a confident edge cancelled."""
    tier_cpu_ms: float
    """Processor time of the tier for each request."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    link: LinkProfile
    edges: Sequence[float]
    deadlines: Sequence[float | None]
    on_miss: str
    target: str
    rate: float
    duration_s: float
    arguments: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--data", required=True, help="labelled images")
    parser.add_argument("--task", default="imagenet")
    parser.add_argument("--variant", default="mobilenet_v2_int8", help="the edge stage")
    parser.add_argument("--fpga", action="store_true", help="simulated RTL in place of a stage that waits")
    parser.add_argument("--link", default="lte")
    parser.add_argument("--edge-ms", default="50,100,200")
    parser.add_argument("--deadlines-ms", default="150,300,none")
    parser.add_argument("--on-miss", choices=("wait", "degrade"), default="wait")
    parser.add_argument("--target", default="quality:balanced")
    parser.add_argument("--min-on-time", default="0.05", help="the setting min_on_time_probability, for the curve")
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--duration-s", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="a file; lines are added")


async def run(given: argparse.Namespace) -> int:
    """Measure; a line of JSON per cell."""
    dataset = read_dataset(given.data, given.task, models_dir(), split="auto", indices=None, limit=None)
    node = ("--task", given.task, "--variant", given.variant, *(("--backend", "fpga-sim") if given.fpga else ()))
    plan = Plan(
        load_profile(given.link),
        [0.0] if given.fpga else [float(each) for each in given.edge_ms.split(",")],
        [None if each == "none" else float(each) for each in given.deadlines_ms.split(",")],
        given.on_miss,
        given.target,
        given.rate,
        given.duration_s,
        (*node, "--min-on-time-probability", given.min_on_time, "--datacenter-transport", "tcp"),
    )
    with Deployment(given.out.with_suffix(".logs"), ("--tasks", given.task)) as deployment:
        async with WorkerProcesses(1, deployment.client_prefix) as workers:
            await workers.load(dataset)
            for number in range(given.runs):
                for edge_ms in plan.edges:
                    for cell in await _measure(plan, dataset, deployment, workers, edge_ms, number):
                        line = msgspec.json.encode(cell)
                        print(line.decode(), flush=True)
                        with given.out.open("ab") as out:
                            out.write(line + b"\n")
    return 0


async def _measure(
    plan: Plan, dataset: Dataset, deployment: Deployment, workers: WorkerProcesses, edge_ms: float, number: int
) -> list[Cell]:
    """All modes and deadlines with an edge of this speed; without a deadline first, to learn what the edge accepts."""
    os.environ[EDGE_MS] = str(edge_ms)
    deadlines = sorted(plan.deadlines, key=lambda each: -1.0 if each is None else each)
    cells: list[Cell] = []
    kept: list[bool] = []
    for metered in (True, False):
        name = f"{edge_ms:g}-{'metered' if metered else 'both'}-{number}"
        deployment.be_perfect()
        deployment.settle(LAN, plan.link)
        with deployment.edge(*plan.arguments, "--uplink-metered", str(metered).lower(), log=name, module=SLOW) as node:
            server = ServerAddress(node.url, api_key=deployment.key)
            modes = ("edge-first",) if metered else ("both", "datacenter") if edge_ms == plan.edges[0] else ("both",)

            async def ask(
                mode: str, deadline_ms: float | None, seconds: float, seed: int, server: ServerAddress = server
            ) -> list[RequestOutcome]:
                on_miss = None if deadline_ms is None else plan.on_miss
                classes = target_mix.parse(
                    "quality:best" if mode == "datacenter" else plan.target, deadline_ms, on_miss
                )
                setup_ = Setup(server, dataset, classes, 1, MAX_IN_FLIGHT, seed)
                return await workers.run(setup_.job(parse_arrivals(f"poisson:{plan.rate:g}"), seconds))

            for deadline_ms in deadlines:
                for mode in modes:
                    if mode == "both" and deadline_ms is None:
                        continue  # nothing can be late, so the edge is first
                    deployment.begin(LAN, plan.link, number)
                    await ask(mode, deadline_ms, LEARN_S, 1_000 + number)
                    before = _state(deployment, node.url)
                    found = await ask(mode, deadline_ms, plan.duration_s, number)
                    after = _state(deployment, node.url)
                    kept = kept or [each.tier == "edge" and not each.degraded for each in found]
                    changed = {key: after[key] - before[key] for key in after}
                    cells.append(_cell(number, edge_ms, deadline_ms, mode, found, kept, changed))
    return cells


def _cell(
    number: int,
    edge_ms: float,
    deadline_ms: float | None,
    mode: str,
    found: Sequence[RequestOutcome],
    kept: Sequence[bool],
    changed: Mapping[str, float],
) -> Cell:
    within_s = np.inf if deadline_ms is None else deadline_ms * 1e-3
    late = [each.latency_s * 1e3 for each, at_edge in zip(found, kept, strict=True) if not at_edge]
    right = [each.answered and bool(each.right) and each.latency_s <= within_s for each in found]
    return Cell(
        number,
        edge_ms,
        deadline_ms,
        mode,
        len(found),
        len(late),
        float(np.percentile(late, 50)),
        float(np.percentile(late, 99)),
        float(np.percentile([each.latency_s * 1e3 for each in found], 50)),
        float(np.mean(right)),
        changed["bytes"] / len(found),
        round(changed["cancelled"]),
        changed["cpu_s"] * 1e3 / len(found),
    )


def _state(deployment: Deployment, url: str) -> dict[str, float]:
    """What has been sent, cancelled and computed so far."""
    page = deployment.ask(f"{url}/metrics")
    cancelled = CANCELLED.search(page)
    return {
        "bytes": deployment.uplink_bytes(),
        "cancelled": float(cancelled[1]) if cancelled else 0.0,
        "cpu_s": _cpu_s(deployment.tier_pid),
    }


def _cpu_s(pid: int) -> float:
    """Processor time of a process and of all its descendants."""
    parents: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(stat.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    ticks = 0
    for each, (_, used) in parents.items():
        above = each
        while above not in (pid, 0, 1) and above in parents:
            above = parents[above][0]
        ticks += used if above == pid else 0
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    import sys

    from tests.bench.program import main

    sys.exit(main("tests.bench.transport.both_tiers", sys.modules[__name__]))
