"""`python -m tests.bench.servers.watchers`: whether ten who watch a node (`/v1/status?watch=true`) slow its answers.

One node on one core, its callers and watchers on another. In each round a closed loop of eight callers, and an open
loop at half the rate that the first closed loop reached, each with and without watchers, in turns. Latencies of the
open loop are from when a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.table import Table

from hawkvision.system.child_server import running
from tests.bench.servers.overhead.node import pinned
from tests.bench.servers.overload import Caller, images

WATCHERS: Final = 10
CALLERS: Final = 8
SHARE: Final = 0.5
"""Of the first closed loop's rate, for the open loop."""


class Window(NamedTuple):
    """What a load got."""

    per_s: float
    p50_ms: float
    p99_ms: float
    failed: int
    lines: int
    """That watchers read meanwhile."""


class Watchers:
    """Pages that are open."""

    def __init__(self) -> None:
        self.lines = 0

    @contextlib.asynccontextmanager
    async def open(self, url: str, number: int) -> AsyncIterator[None]:
        """So many watch, each with a line before the block begins."""
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        begun = asyncio.Semaphore(0)

        async def watch() -> None:
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
            writer.write(f"GET /v1/status?watch=true HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            try:
                if b" 200 " not in await reader.readuntil(b"\r\n\r\n"):
                    raise RuntimeError("the node refuses to be watched")
                while True:
                    if (await reader.readline()).startswith(b"{"):
                        self.lines += 1
                        begun.release()
            finally:
                writer.close()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(watch()) for _ in range(number)]
            for _ in tasks:
                await begun.acquire()
            yield
            for task in tasks:
                task.cancel()


async def load(caller: Caller, watchers: Watchers, seconds: float, rate: float | None) -> Window:
    """A window of the closed loop, or of the open loop at `rate`."""
    bodies, times, failed, before = images(), list[float](), 0, watchers.lines
    begun = time.monotonic()

    async def ask(number: int, due: float) -> None:
        nonlocal failed
        status, _ = await caller.ask(bodies[number % len(bodies)])
        times.append((time.monotonic() - due) * 1e3)
        failed += status != 200

    async def ask_again(first: int) -> None:
        number = first
        while (now := time.monotonic()) < begun + seconds:
            await ask(number, now)
            number += 1

    if rate is None:
        await asyncio.gather(*map(ask_again, range(CALLERS)))
    else:
        under_way = []
        for number in range(int(rate * seconds)):
            due = begun + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            under_way.append(asyncio.create_task(ask(number, due)))
        await asyncio.gather(*under_way)
    per_s = len(times) / (time.monotonic() - begun)
    p50_ms, p99_ms = np.percentile(times, [50, 99])
    return Window(per_s, float(p50_ms), float(p99_ms), failed, watchers.lines - before)


async def measure(url: str, path: str, rounds: int, seconds: float) -> dict[tuple[str, int], list[Window]]:
    """The windows of each load and number of watchers."""
    caller, watchers = Caller(url, path, kept=True), Watchers()
    warm = await load(caller, watchers, seconds, None)
    rate, found = SHARE * warm.per_s, dict[tuple[str, int], list[Window]]()
    for turn in range(2 * rounds):
        number = WATCHERS * ((turn + turn // 2) % 2)  # without, with; with, without; …
        async with watchers.open(url, number):
            for name, asked in (("closed loop", None), (f"open loop, {rate:.0f}/s", rate)):
                found.setdefault((name, number), []).append(await load(caller, watchers, seconds, asked))
    return found


def show(found: dict[tuple[str, int], list[Window]]) -> None:
    """Print each load with and without watchers, the worst to the best round."""
    table = Table("load", "watchers", "requests/s", "P50 ms", "P99 ms", "failed", "lines read")
    for (name, number), windows in sorted(found.items()):
        per_s, p50, p99, failed, lines = (sorted(each) for each in zip(*windows, strict=True))
        table.add_row(
            name, str(number), f"{per_s[0]:.1f} to {per_s[-1]:.1f}", f"{p50[-1]:.1f} to {p50[0]:.1f}",
            f"{p99[-1]:.1f} to {p99[0]:.1f}", f"{sum(failed):.0f}", f"{sum(lines):.0f}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    for (name, number), windows in sorted(found.items()):
        console.print(name, number, " ".join(f"{w.per_s:.1f}/s {w.p50_ms:.2f} {w.p99_ms:.2f};" for w in windows))


def main(arguments: list[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", default="/v1/classify?quality=fast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("node", nargs="*", help="more options of `hawkvision edge up`, behind --")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        with pinned(cores[0]):
            url = stack.enter_context(running("edge", "--port", "0", *options.node)).url
        stack.enter_context(pinned(cores[-1]))
        show(asyncio.run(measure(url, options.path, options.rounds, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
