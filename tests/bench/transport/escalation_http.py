"""`python -m tests.bench.transport.escalation_http`: the cost of an escalation to the datacenter tier, by
the owner of its socket.

Starts the tier on a no-op variant under each host (our own server, and Ray Serve's ingress behind its HAProxy and its
Python proxy), all on this machine at once, and sends the same JPEG over kept-alive connections: closed loop, one
caller and sixteen, in rounds that rotate the order so that drift of the machine falls on all alike. `wall` is the
caller's wait; `escalation` is that minus the reply's times of decoding, queue and inference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import cv2
import msgspec
import numpy as np

from hawkvision.core.escalation_api import INFER_PATH, VARIANT_HEADER, EscalationReply
from hawkvision.system.child_server import ended
from tests.bench.ports import free_port

START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
WARM_UP = 30
TUNED = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
}


@dataclass(frozen=True, slots=True)
class SocketOwner:
    """One way to own the socket: `own` is `python -m hawkvision.datacenter`, else `serve run` with this environment."""

    name: str
    own: bool
    environment: Mapping[str, str]


HOSTS = (
    SocketOwner("own server", True, {}),
    SocketOwner("Serve, HAProxy", False, {**TUNED, "RAY_SERVE_ENABLE_HA_PROXY": "1"}),
    SocketOwner("Serve, Python proxy, tuned", False, {**TUNED, "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}),
    SocketOwner("Serve, Python proxy", False, {}),
)


@dataclass(slots=True)
class Samples:
    """Milliseconds of one host at one concurrency, over all rounds, and how long the rounds took in seconds."""

    wall: list[float] = field(default_factory=list)
    escalation: list[float] = field(default_factory=list)
    seconds: float = 0.0


def main() -> int:
    """Run the comparison and print one row per host and concurrency."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200, help="per round, host and concurrency")
    parser.add_argument("--variant", default="efficientnet_lite0", help="a variant of task imagenet, run as no-op")
    given = parser.parse_args()
    image = _image()
    with ExitStack() as stack:
        urls = [_start(host, given.variant, stack) for host in HOSTS]
        table = asyncio.run(_measure(urls, image, given.variant, given.rounds, given.requests))
    _say(f"{len(image)} byte JPEG, {os.cpu_count()} cores, {given.rounds} rounds of {given.requests}; milliseconds")
    _say(f"{'host':28}{'callers':>8}{'n':>7}{'wall P50':>10}{'wall P99':>10}{'tier P50':>9}{'tier P99':>9}{'req/s':>7}")
    for (name, callers), samples in table.items():
        figures = [*np.percentile(samples.wall, (50, 99)), *np.percentile(samples.escalation, (50, 99))]
        n = len(samples.wall)
        row = "".join(f"{f:{w}.2f}" for f, w in zip(figures, (10, 10, 9, 9), strict=True))
        _say(f"{name:28}{callers:8}{n:7}{row}{n / samples.seconds:7.0f}")
    return 0


async def _measure(
    urls: list[str], image: bytes, variant: str, rounds: int, requests: int
) -> dict[tuple[str, int], Samples]:
    table = {(host.name, callers): Samples() for callers in (1, 16) for host in HOSTS}
    hosts = list(zip(HOSTS, urls, strict=True))
    async with aiohttp.ClientSession(headers={VARIANT_HEADER: variant}) as session:
        for _, url in hosts:
            await _round(session, url, image, 1, WARM_UP, Samples())
        for turn in range(rounds):
            first = turn % len(hosts)
            for host, url in hosts[first:] + hosts[:first]:
                for callers in (1, 16):
                    await _round(session, url, image, callers, requests, table[host.name, callers])
    return table


async def _round(
    session: aiohttp.ClientSession, url: str, image: bytes, callers: int, requests: int, into: Samples
) -> None:
    async def caller() -> None:
        for _ in range(requests // callers):
            started = time.perf_counter()
            async with session.post(url + INFER_PATH, data=image) as response:
                body = await response.read()
                response.raise_for_status()
            wall = (time.perf_counter() - started) * 1e3
            spent = msgspec.json.decode(body, type=EscalationReply).timing_ms
            into.wall.append(wall)
            into.escalation.append(wall - spent.decode - spent.queue - spent.infer)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    into.seconds += time.perf_counter() - started


def _start(host: SocketOwner, variant: str, stack: ExitStack) -> str:
    """Start the host, wait until it answers, and have the stack stop it; its address."""
    port = free_port()
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local", **host.environment}
    if host.own:
        command = [sys.executable, "-m", "hawkvision.datacenter", "--backend", "noop", "--with-parent"]
        command += ["--port", str(port), "--variants", variant]
    else:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file = Path(folder) / "serve.json"  # JSON is YAML too
        file.write_text(json.dumps(_serve_document(port, variant)))
        command = [str(Path(sys.executable).with_name("serve")), "run", "--app-dir", str(Path.cwd()), str(file)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(_stop, process)
    started = time.monotonic()
    url = f"http://127.0.0.1:{port}"
    asyncio.run(_until_ready(url, process))
    _say(f"{host.name}: ready after {time.monotonic() - started:.1f} s")
    return url


def _serve_document(port: int, variant: str) -> dict[str, object]:
    application = {
        "name": "hawkvision",
        "route_prefix": "/",
        "import_path": "hawkvision.datacenter.app:build",
        "args": {"backend": "noop", "variants": [variant]},
    }
    http = {"host": "127.0.0.1", "port": port}
    return {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}


async def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + START_LIMIT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < ends and process.poll() is None:
            try:
                async with session.get(url + "/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit(f"{process.args!r}: not ready after {START_LIMIT_S:g} s (exit status {process.poll()})")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    ended(process, STOP_LIMIT_S)


def _image() -> bytes:
    """A smooth random 500 x 375 JPEG of about 30 KB, like a typical ImageNet image."""
    noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".jpg", cv2.GaussianBlur(noise, (5, 5), 0), [cv2.IMWRITE_JPEG_QUALITY, 55])[1])


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
