"""The effect of faults on callers, gauges and logs: one fault at a time, under load, on real processes.

    python -m tests.bench.robustness.faults [--only replica,link] [--rate 20] [--before 4] [--after 25] [--out
    faults.json]

A datacenter tier, an edge node and a link between them on loopback. Four kinds of requests in turn: `fast`; `balanced`
and `best` with a deadline of 300 ms; `best` without one. An answer is *wrong* if it does not say `degraded` and is
neither what the healthy system says to the same request nor what its best stage says. The exit status is 1 if there was
one.

The columns: requests; errors, by code; degraded answers; wrong ones; the longest wait with and without a deadline; how
long after the fault the edge's gauge `datacenter_up` fell, the tier's `/readyz` was not 200 and either logged a
warning; how long after its end requests for the best answer got it again for good.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from hawkvision.core.types import Answer
from tests.bench.robustness.fault_world import (
    BackgroundLoad,
    SentRequest,
    Watch,
    World,
    errors_of,
    logged,
    processes,
    recovered,
    stopped,
)

HOLD_S: Final = 10.0
RESTART_AFTER_S: Final = 5.0
BLACK_HOLE_S: Final = 5.0


async def killed(world: World, kind: str) -> None:
    """Kill the first process of a kind."""
    found = processes(world.tier, kind)
    assert found, f"no process of the kind {kind} below the tier"
    os.kill(found[0], signal.SIGKILL)


async def tier_killed_and_restarted(world: World) -> None:
    """The tier dies, and comes back at the same address."""
    port = world.tier.port
    await world.tier.kill()
    await asyncio.sleep(RESTART_AFTER_S)
    await world.tier.start(port=port)


async def part_killed(world: World, kind: str) -> None:
    """A part of the tier dies; if the tier ends for it, a supervisor's part is played here."""
    port = world.tier.port
    await killed(world, kind)
    assert world.tier.process is not None
    try:
        await asyncio.wait_for(world.tier.process.wait(), HOLD_S)
    except TimeoutError:
        return
    await world.tier.kill()
    await world.tier.start(port=port)


async def stands_still(world: World, kind: str) -> None:
    """Processes of a kind get no time for ten seconds."""
    with stopped(processes(world.tier, kind)):
        await asyncio.sleep(HOLD_S)


async def link_reset(world: World) -> None:
    """Every connection to the tier is reset."""
    world.link.reset()


async def black_hole(world: World) -> None:
    """Nothing gets through for five seconds."""
    world.link.silence(True)
    await asyncio.sleep(BLACK_HOLE_S)
    world.link.silence(False)


async def half_open(world: World) -> None:
    """What is sent is taken and lost; nothing comes back; after ten seconds the connections are reset."""
    world.link.half_open(True)
    await asyncio.sleep(HOLD_S)
    world.link.half_open(False)
    world.link.reset()


FAULTS: Final[dict[str, Callable[[World], Awaitable[None]]]] = {
    "none": lambda _: asyncio.sleep(0),
    "datacenter kill -9": tier_killed_and_restarted,
    "ingress kill -9": lambda world: part_killed(world, "ingress"),
    "replica kill -9": lambda world: part_killed(world, "replica"),
    "raylet kill -9": lambda world: part_killed(world, "raylet"),
    "gcs kill -9": lambda world: part_killed(world, "gcs"),
    "launcher SIGSTOP 10 s": lambda world: stands_still(world, "launcher"),
    "ingress SIGSTOP 10 s": lambda world: stands_still(world, "ingress"),
    "replica SIGSTOP 10 s": lambda world: stands_still(world, "replica"),
    "raylet SIGSTOP 10 s": lambda world: stands_still(world, "raylet"),
    "gcs SIGSTOP 10 s": lambda world: stands_still(world, "gcs"),
    "link reset": link_reset,
    "link black hole 5 s": black_hole,
    "link half open 10 s": half_open,
}


async def measured(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One fault under load, in a world of its own."""
    with tempfile.TemporaryDirectory(prefix="hv-faults-") as scratch:
        async with World.open(Path(scratch)) as world:
            load, watch = BackgroundLoad(world, given.rate), Watch(world)
            async with watch.running(), load.running():
                await asyncio.sleep(given.before)
                since = time.monotonic()
                await FAULTS[name](world)
                over = time.monotonic()
                await asyncio.sleep(given.after)
            logs = [at for at in (logged(server, since) for server in (world.edge, world.tier)) if at is not None]
            degraded = sum(isinstance(each.outcome, Answer) and each.outcome.degraded for each in load.asked)
            return {
                "fault": name,
                "requests": len(load.asked),
                "errors": dict(errors_of(load.asked)),
                "degraded": degraded,
                "wrong": sum(map(world.is_wrong, load.asked)),
                "worst, 300 ms": _worst(load.asked, deadline=True),
                "worst, none": _worst(load.asked, deadline=False),
                "gauge": watch.gauge_said(since),
                "readyz": watch.readiness_said(since),
                "log": min(logs, default=None),
                "recovery": recovered(load, over),
            }


def _worst(asked: list[SentRequest], *, deadline: bool) -> float:
    return max((each.took_s for each in asked if (each.asking.deadline_ms is not None) == deadline), default=0.0)


async def edge_killed(given: argparse.Namespace) -> dict[str, Any]:
    """Kill the edge again and again under load; it is started at once where it was."""
    with tempfile.TemporaryDirectory(prefix="hv-faults-") as scratch:
        async with World.open(Path(scratch)) as world:
            load, down, in_flight, slowest = BackgroundLoad(world, given.rate), [], 0, 0.0
            async with load.running():
                for _ in range(given.deaths):
                    await asyncio.sleep(1.0)
                    in_flight += load.under_way
                    began = time.monotonic()
                    await world.edge.kill()
                    await world.edge.start(port=world.edge.port)
                    down.append((began, time.monotonic()))
                    slowest = max(slowest, down[-1][1] - began)
                await asyncio.sleep(2.0)
            failed = [each for each in load.asked if not isinstance(each.outcome, Answer)]
            under_way = [e for e in failed if any(e.due < a < e.due + e.took_s + 0.05 for a, _ in down)]
            refused = [e for e in failed if e not in under_way and any(a <= e.due <= b for a, b in down)]
            return {
                "deaths": given.deaths,
                "requests": len(load.asked),
                "under way at a death": in_flight,
                "failed of those": len(under_way),
                "refused while down": len(refused),
                "other errors": len(failed) - len(under_way) - len(refused),
                "wrong": sum(map(world.is_wrong, load.asked)),
                "slowest until ready": slowest,
            }


def shown(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in rows[0]:
        table.add_column(title, justify="left" if title in ("fault", "errors") else "right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    return table


def _cell(value: object) -> str:
    match value:
        case dict():
            return ", ".join(f"{n} {code}" for code, n in value.items()) or "0"
        case float():
            return f"{value:.2f} s"
        case None:
            return "-"
        case _:
            return str(value)


async def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.robustness.faults")
    parser.add_argument("--only", default="", help="parts of the names of faults to run, separated by commas")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--before", type=float, default=4.0, help="seconds of load before a fault")
    parser.add_argument("--after", type=float, default=25.0, help="seconds of load after it")
    parser.add_argument("--deaths", type=int, default=30, help="times that the edge is killed")
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    given = parser.parse_args()
    words = [word for word in given.only.split(",") if word]
    console, rows, wrong = Console(width=170), [], 0
    for name in FAULTS:
        if not words or any(word in name for word in words):
            rows.append(await measured(name, given))
            wrong += rows[-1]["wrong"]
            console.print(shown(rows[-1:]))
    console.print(shown(rows))
    if not words or "edge" in words:
        deaths = await edge_killed(given)
        wrong += deaths["wrong"]
        console.print(shown([deaths]))
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
