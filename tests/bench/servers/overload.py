"""`python -m tests.bench.servers.overload`: what a server answers right and in time while more is asked than it can do.

Open loop at multiples of the capacity that a closed loop of eight callers finds before; each request has a deadline, on
the caller's clock from the moment that it was due. The server has one core and the generator the other. `/healthz` is
asked ten times a second over connections of its own. Images are noise of few colours; a right answer is the one that
the same server gave without a deadline. The worst and the best of all rounds are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import Final
from urllib.parse import urlsplit

import cv2
import numpy as np
from rich.console import Console
from rich.table import Table

from hawkvision.core.escalation_api import DEADLINE_HEADER
from hawkvision.system.child_server import running
from tests.bench.servers.overhead.node import pinned

LEVELS: Final = (0.4, 0.8, 1.0, 1.5, 2.0, 4.0)
CONNECTIONS: Final = 300
CLOSED_LOOP_S: Final = 4.0
TIMEOUT_S: Final = 30.0


class Caller:
    """Requests over kept connections, at most `CONNECTIONS`, or each over a new one."""

    def __init__(self, url: str, path: str, *, kept: bool) -> None:
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self._path, self._kept = path, kept
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._places = asyncio.Semaphore(CONNECTIONS)

    async def ask(self, body: bytes, lines: str = "", method: str = "POST") -> tuple[int, bytes]:
        """The status and the body of one reply; status 0 for a broken connection. `lines` are further headers."""
        head = (
            f"{method} {self._path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: image/jpeg\r\n"
            f"{lines}Content-Length: {len(body)}\r\n\r\n"
        )
        async with self._places:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    reader, writer = self._idle.pop() if self._idle else await self._connected()
                    writer.write(head.encode() + body)
                    found = await reader.readuntil(b"\r\n\r\n")
                    length = int(found.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
                    reply = await reader.readexactly(length)
            except (OSError, EOFError, TimeoutError):
                return 0, b""
            if self._kept:
                self._idle.append((reader, writer))
            else:
                writer.close()
        return int(found[9:12]), reply

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port)


def images(count: int = 5) -> list[bytes]:
    """Small JPEGs."""
    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 256, (count, 12, 16, 3), np.uint8)
    return [
        cv2.imencode(".jpg", cv2.resize(each, (256, 192), interpolation=cv2.INTER_CUBIC))[1].tobytes()
        for each in coarse
    ]


def answer_of(reply: bytes) -> object:
    """The class that a node or a tier answered; it must not be asked of an error."""
    decoded = json.loads(reply)
    return decoded["label"] if "label" in decoded else decoded["top_k"][0]["index"]


async def closed_loop(caller: Caller, bodies: list[bytes]) -> float:
    """Answers a second to eight callers."""
    done, end = 0, time.monotonic() + CLOSED_LOOP_S

    async def ask_again() -> None:
        nonlocal done
        while time.monotonic() < end:
            await caller.ask(bodies[done % len(bodies)])
            done += 1

    await asyncio.gather(*(ask_again() for _ in range(8)))
    return done / CLOSED_LOOP_S


async def open_loop(
    caller: Caller,
    health: Caller,
    bodies: list[bytes],
    truth: list[object],
    rate: float,
    seconds: float,
    deadline_ms: float,
) -> dict[str, float]:
    """What became of `rate` requests a second."""
    rows: list[tuple[float, int, bool]] = []
    probes: list[float] = []
    begun, line = time.monotonic(), f"{DEADLINE_HEADER}: {deadline_ms}\r\n"

    async def one(number: int, due: float) -> None:
        status, reply = await caller.ask(bodies[number % len(bodies)], line)
        right = status == 200 and answer_of(reply) == truth[number % len(bodies)]
        rows.append(((time.monotonic() - due) * 1e3, status, right))

    async def probe() -> None:
        while time.monotonic() < begun + seconds:
            asked = time.monotonic()
            status, _ = await health.ask(b"", method="GET")
            probes.append((time.monotonic() - asked) * 1e3 if status == 200 else TIMEOUT_S * 1e3)
            await asyncio.sleep(0.1)

    waiting = [asyncio.create_task(probe())]
    for number in range(int(rate * seconds)):
        due = begun + number / rate
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        waiting.append(asyncio.create_task(one(number, due)))
    lag = time.monotonic() - begun - seconds
    await asyncio.gather(*waiting)
    refused = [ms for ms, status, _ in rows if status == 429]
    statuses = Counter(status for _, status, _ in rows)
    missed = statuses.pop(504, 0)
    if other := {status: number for status, number in statuses.items() if status not in (200, 429)}:
        print(f"failed at {rate:.0f} a second, by status (0: a broken connection): {other}", file=sys.stderr)
    return {
        "good": sum(right and ms <= deadline_ms for ms, _, right in rows) / seconds,
        "failed": sum(other.values()),
        "missed": missed,
        "refused_p99": float(np.percentile(refused, 99)) if refused else 0.0,
        "health_p99": float(np.percentile(probes, 99)),
        "lag": max(0.0, lag),
    }


async def measure(url: str, options: argparse.Namespace) -> list[tuple[float, float, dict[str, float]]]:
    """(level, capacity, result) of each window."""
    bodies = images()
    caller = Caller(url, options.path, kept=not options.new)
    truth = [answer_of((await caller.ask(body))[1]) for body in bodies]
    found = []
    for _ in range(options.rounds):
        capacity = await closed_loop(caller, bodies)
        for level in LEVELS:
            health = Caller(url, "/healthz", kept=False)
            result = await open_loop(
                caller, health, bodies, truth, level * capacity, options.seconds, options.deadline_ms
            )
            found.append((level, capacity, result))
            await asyncio.sleep(1.0)
    return found


def show(found: list[tuple[float, float, dict[str, float]]]) -> None:
    """Print the worst and the best of each level."""
    table = Table(
        "offered", "right in time / capacity", "504", "429 P99 ms", "/healthz P99 ms", "failed", "generator late s"
    )
    for level in LEVELS:
        rows = [(capacity, result) for each, capacity, result in found if each == level]
        shares = sorted(result["good"] / capacity for capacity, result in rows)
        worst = {key: max(result[key] for _, result in rows) for key in rows[0][1]}
        table.add_row(
            f"{level:g}x", f"{shares[0]:.2f} to {shares[-1]:.2f}", f"{worst['missed']:.0f}",
            f"{worst['refused_p99']:.0f}", f"{worst['health_p99']:.0f}", f"{worst['failed']:.0f}",
            f"{worst['lag']:.1f}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(f"capacity {min(c for _, c, _ in found):.0f} to {max(c for _, c, _ in found):.0f} a second")
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server that runs; default: an edge node of its own")
    parser.add_argument("--path", default="/v1/classify?quality=fast", help="`/v1/infer` for a datacenter tier")
    parser.add_argument("--deadline-ms", type=float, default=300.0)
    parser.add_argument("--new", action="store_true", help="a new connection for each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("node", nargs="*", help="more options of `hawkvision edge up`, behind --")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        url = options.url
        if url is None:
            with pinned(cores[0]):
                url = stack.enter_context(running("edge", "--port", "0", *options.node)).url
        stack.enter_context(pinned(cores[-1]))
        show(asyncio.run(measure(url, options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
