"""What three special cases of the edge node gain: the HTTP fast path, large pages, inference on the event loop.

    python -m tests.bench.inference.special_cases [--rounds 15] [--one-core] [EDGE OPTIONS]

Five nodes answer one photograph over loopback: two as shipped, and three that each lack one special case. They take
turns in random order. Each turn measures the latency of single requests and the throughput of concurrent ones. A gain
is the ratio to the first node as shipped, within one round; the second shows how far equal nodes differ. A special case
stays in the product if its median gain in latency or in throughput is at least 10 %, and more than equal nodes differ.
Takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import cv2
from rich.console import Console
from rich.table import Table

from hawkvision.models.sample_images import sample_image
from hawkvision.servers.connections import Limits
from hawkvision.servers.protocol import bounded
from hawkvision.system.child_server import ServerProcess, running

THIS: Final = "tests.bench.inference.special_cases"
SHIPPED: Final = "as shipped"
SAME: Final = "as shipped, again"
FAST_PATH: Final = "no fast path"
LARGE_PAGES: Final = "no large pages"
ON_LOOP: Final = "no inference on the event loop"
WITHOUT: Final = (FAST_PATH, LARGE_PAGES, ON_LOOP)
SIDE: Final = 256
"""Shorter side of the image, in pixels."""
NODE_CORE: Final = 0
WORTH: Final = 1.10
"""Median gain from which on a special case is worth its code."""


@dataclass
class Measured:
    """The turns of one node."""

    latency_ms: list[float] = field(default_factory=list)
    """Median of each turn."""
    per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """Processor time of each request of a turn, single and concurrent ones together."""
    memory_mb: float = 0.0


def serve(without: str, argv: list[str]) -> int:
    """Run a node that lacks one special case."""
    from edge import factory, run

    def plain(limits: Limits, app: object, *, answers_pages: bool = True) -> type[asyncio.Protocol]:
        return bounded(limits)

    replaced: dict[str, tuple[object, str, Callable[..., object]]] = {
        FAST_PATH: (run, "fast_path_protocol", plain),
        LARGE_PAGES: (factory, "take_large_pages", lambda: 0),
        ON_LOOP: (factory, "on_loop", lambda *_: None),
    }
    if without in replaced:
        module, name, other = replaced[without]
        assert hasattr(module, name), f"{name} has moved"
        setattr(module, name, other)
    return run.run(argv)


def camera_image(scratch: Path) -> bytes:
    """A photograph as a small camera sends it: a JPEG of some 15 KB, which the fast path takes."""
    pixels = cv2.imread(str(sample_image(scratch)))
    assert pixels is not None
    scale = SIDE / min(pixels.shape[:2])
    small = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return cv2.imencode(".jpg", small, (cv2.IMWRITE_JPEG_QUALITY, 85))[1].tobytes()


def ask(connection: http.client.HTTPConnection, body: bytes) -> None:
    """Send one request and check that it is answered."""
    connection.request("POST", "/v1/infer?quality=fast", body)
    response = connection.getresponse()
    answer = response.read()
    assert response.status == 200, answer


def latency_ms(server: ServerProcess, body: bytes, requests: int, pause_s: float) -> float:
    """Median time of single requests."""
    took: list[float] = []
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        for _ in range(requests):
            time.sleep(pause_s)  # requests of a camera: the node is idle between them
            begun = time.perf_counter()
            ask(connection, body)
            took.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(took)


def throughput(server: ServerProcess, body: bytes, connections: int, duration_s: float) -> tuple[int, float]:
    """Requests answered over concurrent connections, and those per second."""
    end = time.perf_counter() + duration_s

    def caller() -> int:
        answered = 0
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
            while time.perf_counter() < end:
                ask(connection, body)
                answered += 1
        return answered

    begun = time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        answered = sum(future.result() for future in [threads.submit(caller) for _ in range(connections)])
    return answered, answered / (time.perf_counter() - begun)


def cpu_s(pid: int) -> float:
    """Processor time of all threads so far."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def memory_mb(pid: int) -> float:
    """Resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError("Linux states VmRSS")


def gains(measured: dict[str, Measured], name: str) -> tuple[list[float], list[float]]:
    """Of each round: how much faster, and how many more requests, the node as shipped has; 1 is no difference."""
    shipped, other = measured[SHIPPED], measured[name]
    faster = [theirs / ours for ours, theirs in zip(shipped.latency_ms, other.latency_ms, strict=True)]
    more = [ours / theirs for ours, theirs in zip(shipped.per_s, other.per_s, strict=True)]
    return faster, more


def report(measured: dict[str, Measured]) -> Table:
    """Worst, median and best gain of each special case, and the verdict."""
    noise = [statistics.median(values) for values in gains(measured, SAME)]
    table = Table("node", "P50 ms", "gain", "requests/s", "gain", "CPU ms/request", "gain", "RSS MB", "verdict")
    for name, turns in measured.items():
        faster, more = gains(measured, name)
        worth = any(statistics.median(v) >= max(WORTH, n) for v, n in zip((faster, more), noise, strict=True))
        verdict = "" if name in (SHIPPED, SAME) else "keep" if worth else "drop"
        shown = ["" if name == SHIPPED else _spread(values) for values in (faster, more)]
        less = [theirs / ours for ours, theirs in zip(measured[SHIPPED].cpu_ms, turns.cpu_ms, strict=True)]
        shown.append("" if name == SHIPPED else _spread(less))
        latency, rate, cpu = map(statistics.median, (turns.latency_ms, turns.per_s, turns.cpu_ms))
        figures = (
            f"{latency:.2f}",
            shown[0],
            f"{rate:.0f}",
            shown[1],
            f"{cpu:.2f}",
            shown[2],
            f"{turns.memory_mb:.0f}",
        )
        table.add_row(name, *figures, verdict)
    return table


def _spread(values: list[float]) -> str:
    worst, median, best = (100 * (value - 1) for value in (min(values), statistics.median(values), max(values)))
    return f"{median:+.1f} % ({worst:+.1f} to {best:+.1f})"


def measure(options: argparse.Namespace, edge_options: list[str]) -> dict[str, Measured]:
    """All rounds."""
    names = (SHIPPED, SAME, *WITHOUT)
    measured = {name: Measured() for name in names}
    order, cores = random.Random(0), os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        body = camera_image(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        servers = {}
        for name in names:
            command = (THIS, "--serve", name, "--port", "0", "--log-level", "warning", *edge_options)
            if options.one_core:
                os.sched_setaffinity(0, {NODE_CORE})  # which the node inherits
            servers[name] = stack.enter_context(running(*command, title=name))
        if options.one_core:
            os.sched_setaffinity(0, cores - {NODE_CORE})
        for number in range(options.rounds + 1):
            for name in order.sample(names, len(names)):
                begun = cpu_s(servers[name].pid)
                latency = latency_ms(servers[name], body, options.requests, options.pause_ms * 1e-3)
                answered, rate = throughput(servers[name], body, options.connections, options.duration_s)
                spent = cpu_s(servers[name].pid) - begun
                if number:  # the first round warms up
                    measured[name].latency_ms.append(latency)
                    measured[name].per_s.append(rate)
                    measured[name].cpu_ms.append(spent / (answered + options.requests) * 1e3)
        for name, server in servers.items():
            measured[name].memory_mb = memory_mb(server.pid)
    return measured


def main(argv: list[str]) -> int:
    """Run from the command line."""
    if argv[:1] == ["--serve"]:
        return serve(argv[1], argv[2:])
    parser = argparse.ArgumentParser(
        prog=f"python -m {THIS}", epilog="Other options are those of `hawkvision edge up`."
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns of each node that count")
    parser.add_argument("--requests", type=int, default=25, help="single requests in a turn")
    parser.add_argument("--pause-ms", type=float, default=10.0, help="before each single request")
    parser.add_argument("--connections", type=int, default=4, help="concurrent requests for the throughput")
    parser.add_argument("--duration-s", type=float, default=0.7, help="of each measurement of throughput")
    parser.add_argument("--one-core", action="store_true", help="nodes share one core, and the load has the others")
    options, edge_options = parser.parse_known_args(argv)
    Console(width=150).print(report(measure(options, edge_options)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
