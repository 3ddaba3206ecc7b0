"""Does anything grow, fail or lie over twenty minutes of mixed traffic?

    python -m tests.bench.robustness.soak [--minutes 20] [--rate 15] [--every 60]

A datacenter tier and an edge node on loopback, the link between them reset now and then. Four kinds of requests over
HTTP in turn (`fault_world.ASKINGS`); beside them one caller by datagrams, large and broken images, requests that are
refused, and connections that say nothing. Printed every minute: requests, errors, degraded and wrong answers, P50 and
P99 of the minute, and memory, file descriptors and threads of both tiers. Exit status 1 if an answer was wrong or a
request that was in order failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import Answer
from tests.bench.robustness.fault_world import BackgroundLoad, SentRequest, World, descendants, errors_of
from tests.images import encoded

RESET_EVERY_S: Final = 45.0
BESIDE_EVERY_S: Final = 0.5
COLUMNS: Final = (
    "minute", "requests", "errors", "degraded", "wrong", "P50 ms", "P99 ms", "edge MB", "edge fds", "edge threads",
    "tier MB", "tier fds",
)  # fmt: skip


def resident_mb(pids: Sequence[int]) -> float:
    """Proportional resident memory of processes; shared pages count once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, StopIteration):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += int(next(line for line in rollup if line.startswith("Pss:")).split()[1])
    return total / 1024


def open_files(pids: Sequence[int]) -> int:
    """Their file descriptors."""
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            count += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return count


async def strangers(world: World, stop: asyncio.Event) -> None:
    """What else comes to a node: refusals, large images, broken ones, silent connections."""
    rng = random.Random(3)
    large, sound = encoded(".png", 3000, 4000), encoded()
    async with AsyncClient(world.edge.url, timeout_s=60.0) as client:
        while not stop.is_set():
            with contextlib.suppress(HawkVisionError, OSError):
                match rng.randrange(5):
                    case 0:
                        await client.classify(large, quality="fast")
                    case 1:
                        await client.classify(sound[: len(sound) // 2])
                    case 2:
                        await client.classify(rng.randbytes(2000))
                    case 3:
                        await client.classify(sound, min_accuracy=0.999)
                    case _:
                        _, writer = await asyncio.open_connection("127.0.0.1", world.edge.port)
                        writer.write(b"POST /v1/classify HTTP/1.1\r\nHost: x\r\n")
                        writer.transport.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), BESIDE_EVERY_S)


async def datagrams(world: World, stop: asyncio.Event, outcomes: list[Answer | HawkVisionError]) -> None:
    """One caller by datagrams."""
    async with AsyncClient(world.edge.url, transport="datagram", timeout_s=30.0, late_s=30.0) as client:
        for number in range(1 << 62):
            if stop.is_set():
                return
            try:
                image = world.images[number % len(world.images)]
                outcomes.append(await client.classify(image, quality="balanced", deadline_ms=500.0))
            except HawkVisionError as error:
                outcomes.append(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), BESIDE_EVERY_S)


async def resets(world: World, stop: asyncio.Event) -> None:
    """The link to the tier is reset now and then."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), RESET_EVERY_S)
        world.link.reset()


def row(minute: int, asked: Sequence[SentRequest], world: World) -> list[str]:
    """One line of the table."""
    took = sorted(each.took_s * 1e3 for each in asked) or [0.0]
    edge = [world.edge.pid, *descendants(world.edge.pid)]
    tier = [world.tier.pid, *descendants(world.tier.pid)]
    threads = sum(1 for _ in Path(f"/proc/{world.edge.pid}/task").iterdir())
    return [
        str(minute),
        str(len(asked)),
        ", ".join(f"{n} {code}" for code, n in errors_of(asked).items()) or "0",
        str(sum(isinstance(each.outcome, Answer) and each.outcome.degraded for each in asked)),
        str(sum(map(world.is_wrong, asked))),
        f"{took[len(took) // 2]:.1f}",
        f"{took[min(len(took) - 1, len(took) * 99 // 100)]:.0f}",
        f"{resident_mb(edge):.0f}",
        str(open_files(edge)),
        str(threads),
        f"{resident_mb(tier):.0f}",
        str(open_files(tier)),
    ]


async def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.robustness.soak")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=15.0, help="requests per second over HTTP")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between lines")
    given = parser.parse_args()
    console = Console(width=150)
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    by_datagrams: list[Answer | HawkVisionError] = []
    failed = wrong = 0
    with tempfile.TemporaryDirectory(prefix="hv-soak-") as scratch:
        async with World.open(Path(scratch), ("--datagram-port", "0")) as world:
            load, stop = BackgroundLoad(world, given.rate), asyncio.Event()
            beside = [
                asyncio.create_task(strangers(world, stop)),
                asyncio.create_task(datagrams(world, stop, by_datagrams)),
                asyncio.create_task(resets(world, stop)),
            ]
            began, taken = time.monotonic(), 0
            async with load.running():
                while time.monotonic() - began < given.minutes * 60.0:
                    await asyncio.sleep(given.every)
                    asked, taken = load.asked[taken:], len(load.asked)
                    table.add_row(*row(round((time.monotonic() - began) / 60.0), asked, world))
                    failed += sum(errors_of(asked).values())
                    wrong += sum(map(world.is_wrong, asked))
                stop.set()
            await asyncio.gather(*beside)
    console.print(table)
    lost = [each for each in by_datagrams if isinstance(each, HawkVisionError)]
    console.print(f"{len(load.asked)} over HTTP: {failed} failed, {wrong} wrong")
    console.print(f"{len(by_datagrams)} by datagrams: {len(lost)} failed {sorted({e.code for e in lost})}")
    return int(bool(failed or wrong or lost))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
