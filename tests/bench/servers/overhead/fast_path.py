"""What the HTTP fast path of the edge node gains (`edge/servers/fast_path.py`).

    python -m tests.bench.servers.overhead.fast_path [--rounds 15] [--one-core] [EDGE OPTIONS]

Three nodes answer one photograph over loopback: two as shipped, and one without the fast path. They take turns in
random order. Each turn measures the latency of single requests, the throughput of concurrent ones, and processor time.
A gain is the ratio to the first node as shipped, within one round; the second shows how far equal nodes differ. The
fast path stays in the product if its median gain in one of them is at least 10 %, and more than equal nodes differ. A
quick model, such as that of `--task cifar10`, shows more of it than a slow one.
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

THIS: Final = "tests.bench.servers.overhead.fast_path"
SHIPPED: Final = "as shipped"
SAME: Final = "as shipped, again"
FAST_PATH: Final = "no fast path"
NODES: Final = (SHIPPED, SAME, FAST_PATH)
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


def serve(name: str, argv: list[str]) -> int:
    """Run one of the nodes."""
    from edge import run

    def plain(limits: Limits, app: object, *, answers_pages: bool = True) -> type[asyncio.Protocol]:
        return bounded(limits)

    if name == FAST_PATH:
        assert hasattr(run, "fast_path_protocol"), "it has moved"
        setattr(run, "fast_path_protocol", plain)  # noqa: B010 - a function of another type
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


def gains(measured: dict[str, Measured], name: str) -> tuple[list[float], ...]:
    """Of each round: how much faster, how many more requests, and how much less processor time; 1 is no difference."""
    shipped, other = measured[SHIPPED], measured[name]
    faster = [theirs / ours for ours, theirs in zip(shipped.latency_ms, other.latency_ms, strict=True)]
    more = [ours / theirs for ours, theirs in zip(shipped.per_s, other.per_s, strict=True)]
    less = [theirs / ours for ours, theirs in zip(shipped.cpu_ms, other.cpu_ms, strict=True)]
    return faster, more, less


def report(measured: dict[str, Measured]) -> Table:
    """Worst, median and best gain, and the verdict."""
    noise = [statistics.median(values) for values in gains(measured, SAME)]
    table = Table("node", "P50 ms", "gain", "requests/s", "gain", "CPU ms/request", "gain", "RSS MB", "verdict")
    for name, turns in measured.items():
        found = gains(measured, name)
        worth = any(statistics.median(v) >= max(WORTH, n) for v, n in zip(found, noise, strict=True))
        verdict = ("keep" if worth else "drop") if name == FAST_PATH else ""
        shown = ["" if name == SHIPPED else _spread(values) for values in found]
        latency, rate, cpu = map(statistics.median, (turns.latency_ms, turns.per_s, turns.cpu_ms))
        rss = f"{turns.memory_mb:.0f}"
        table.add_row(name, f"{latency:.2f}", shown[0], f"{rate:.0f}", shown[1], f"{cpu:.2f}", shown[2], rss, verdict)
    return table


def _spread(values: list[float]) -> str:
    worst, median, best = (100 * (value - 1) for value in (min(values), statistics.median(values), max(values)))
    return f"{median:+.1f} % ({worst:+.1f} to {best:+.1f})"


def measure(options: argparse.Namespace, edge_options: list[str]) -> dict[str, Measured]:
    """All rounds."""
    measured = {name: Measured() for name in NODES}
    order, cores = random.Random(0), os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        body = camera_image(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        servers = {}
        for name in NODES:
            command = (THIS, "--serve", name, "--port", "0", "--log-level", "warning", *edge_options)
            if options.one_core:
                os.sched_setaffinity(0, {NODE_CORE})  # which the node inherits
            servers[name] = stack.enter_context(running(*command, title=name))
        if options.one_core:
            os.sched_setaffinity(0, cores - {NODE_CORE})
        for number in range(options.rounds + 1):
            for name in order.sample(NODES, len(NODES)):
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
