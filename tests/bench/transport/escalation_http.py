"""`python -m tests.bench.transport.escalation_http`: the cost of an escalation to the datacenter tier, by its way in.

All at once on this machine, and asked in rounds that rotate the order, so that drift of the machine falls on all alike:

- `launcher`: `hawkvision dc up`, whose ingress serves at the launcher's sockets;
- `HAProxy`: the same application on a Ray without launcher, through Serve's HAProxy;
- `before`: the tier of an earlier commit (`--before`, in a git worktree), whose driver was the server and called its
  replicas over a local socket.

Each gets the same JPEG over kept-alive connections in a closed loop of one caller, then of sixteen: a no-op variant,
then (`--stages`) a stage with its models. Printed are the median of the rounds, the best and the worst.
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
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import aiohttp
import cv2
import numpy as np

from hawkvision.core.escalation_api import INFER_PATH, VARIANT_HEADER
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config
from hawkvision.models.manifest import load_manifest, models_dir
from hawkvision.system.child_server import ended
from tests.bench.ports import free_port
from tests.hawkvision.tasks.classes import read_reply

ROOT: Final = Path(__file__).parents[3]
BEFORE: Final = "1211107f"
"""The last commit with the driver's own server."""
CALLERS: Final = (1, 16)
WARM_UP: Final = 30
START_LIMIT_S: Final = 240.0
STOP_LIMIT_S: Final = 60.0
SAME: Final = {"RAY_worker_niceness": "0"}
"""Of all ways in; the earlier tier's replica would otherwise wait for every other program."""
RAY_CPUS: Final = 32
"""What the Ray behind HAProxy plans with, so that it starts all replicas on any machine, as a launcher's Ray does."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What is asked for."""

    title: str
    name: str
    backend: str


@dataclass(slots=True)
class Rounds:
    """Of one way in at one concurrency: a value per round."""

    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    own_p50_ms: list[float] = field(default_factory=list)
    """Without the reply's times of decoding, queue and inference."""
    per_s: list[float] = field(default_factory=list)
    refused: int = 0
    """Requests without an answer of 200; they are in no other figure."""


def main() -> int:
    """Run the comparison and print one row per stage, concurrency and way in."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.transport.escalation_http", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=160, help="per round, way in and concurrency")
    parser.add_argument("--stages", default="noop,reference", help="of noop and reference")
    parser.add_argument("--before", default=BEFORE, help="a commit, or `none`")
    parser.add_argument("--serve", metavar="JSON", help="used by the command itself: these settings behind HAProxy")
    given = parser.parse_args()
    if given.serve is not None:
        _serve(json.loads(given.serve))
    best = load_manifest("imagenet", models_dir(None)).cascade.dc[-1]
    known = {"noop": Stage("no-op", "efficientnet_lite0", "noop"), "reference": Stage(best, best, "auto")}
    _print(f"{os.cpu_count()} cores, {given.rounds} rounds of {given.requests} requests; median (best to worst)")
    for stage in (known[name] for name in given.stages.split(",")):
        with ExitStack() as stack:
            urls = {name: stack.enter_context(way) for name, way in _ways(stage, given.before).items()}
            table = asyncio.run(_measure(urls, stage, given.rounds, given.requests))
        for (name, callers), rounds in table.items():
            cells = [
                _cell(rounds.p50_ms),
                _cell(rounds.p99_ms),
                _cell(rounds.own_p50_ms),
                _cell(rounds.per_s, most=True),
            ]
            titles = ("P50 ms", "P99 ms", "P50 of the tier ms", "requests/s")
            words = ", ".join(f"{title} {cell}" for title, cell in zip(titles, cells, strict=True))
            _print(f"{stage.title}, {callers} callers, {name}: {words}, refused {rounds.refused}")
    return 0


def _ways(stage: Stage, before: str) -> dict[str, AbstractContextManager[str]]:
    """The ways in, as context managers of their URLs."""
    ways: dict[str, AbstractContextManager[str]] = {
        "launcher": _launched(stage, ROOT),
        "HAProxy": _behind_haproxy(stage),
    }
    if before != "none":
        ways[f"before ({before})"] = _of_commit(stage, before)
    return ways


@contextmanager
def _launched(stage: Stage, tree: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "hawkvision.datacenter", "--backend", stage.backend, "--with-parent"]
    command += ["--port", str(port), "--variants", stage.name]
    with _running(command, {"PYTHONPATH": str(tree)}, tree, port) as url:
        yield url


@contextmanager
def _of_commit(stage: Stage, commit: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hawkvision-before-") as folder:
        tree = Path(folder) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--detach", str(tree), commit], check=True, capture_output=True)
        try:
            with _launched(stage, tree) as url:
                yield url
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


@contextmanager
def _behind_haproxy(stage: Stage) -> Iterator[str]:
    port = free_port()
    settings = {"backend": stage.backend, "variants": [stage.name], "port": port}
    command = [sys.executable, "-m", "tests.bench.transport.escalation_http", "--serve", json.dumps(settings)]
    environment = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    with _running(command, environment, ROOT, port) as url:
        yield url


def _serve(settings: Mapping[str, object]) -> None:
    """The application behind Serve's proxy, until a signal. In a process of its own."""
    config = load_config(DatacenterConfig, overrides=settings, environ={})
    from hawkvision.datacenter.deployment.ray_settings import TUNING

    for name, value in TUNING.items():
        os.environ.setdefault(name, value)
    import ray
    from ray.serve.config import HTTPOptions

    from hawkvision.datacenter.ingress.application import application, run_application

    ray.init(address="local", num_cpus=RAY_CPUS, include_dashboard=False, log_to_driver=False, logging_level="error")
    for number in (signal.SIGTERM, signal.SIGINT):  # in place of Ray's
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        run_application(
            application(config), config, HTTPOptions(host="127.0.0.1", port=config.port, location="HeadOnly")
        )
        signal.pause()
    finally:
        ray.shutdown()


@contextmanager
def _running(command: list[str], environment: Mapping[str, str], folder: Path, port: int) -> Iterator[str]:
    """Run a host until the block ends; it answers when the block begins."""
    started, url = time.monotonic(), f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env={**os.environ, **SAME, **environment}, cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            if not asyncio.run(_answers(url, process)):
                output.seek(0)
                raise SystemExit(f"{command}: not ready\n{output.read()[-3000:].decode(errors='replace')}")
            _print(f"ready after {time.monotonic() - started:.1f} s: {folder.name} {command[2:4]}")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            ended(process, STOP_LIMIT_S)


async def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    ends = time.monotonic() + START_LIMIT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < ends and process.poll() is None:
            try:
                async with session.get(url + "/readyz") as response:
                    if response.status == 200:
                        return True
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    return False


async def _measure(urls: Mapping[str, str], stage: Stage, rounds: int, requests: int) -> dict[tuple[str, int], Rounds]:
    table = {(name, callers): Rounds() for callers in CALLERS for name in urls}
    ways, image = list(urls.items()), _image()
    async with aiohttp.ClientSession(headers={VARIANT_HEADER: stage.name}) as session:
        for _, url in ways:
            for callers in CALLERS:
                await _round(session, url, image, callers, WARM_UP, Rounds())
        for turn in range(rounds):
            first = turn % len(ways)
            for name, url in ways[first:] + ways[:first]:
                for callers in CALLERS:
                    await _round(session, url, image, callers, requests, table[name, callers])
    return table


async def _round(
    session: aiohttp.ClientSession, url: str, image: bytes, callers: int, requests: int, into: Rounds
) -> None:
    wall: list[float] = []
    own: list[float] = []

    async def caller() -> None:
        for _ in range(max(1, requests // callers)):
            begun = time.perf_counter()
            async with session.post(url + INFER_PATH, data=image) as response:
                body = await response.read()
            if response.status != 200:
                into.refused += 1
                continue
            wall.append((time.perf_counter() - begun) * 1e3)
            spent = read_reply(body).timing_ms
            own.append(wall[-1] - spent.decode - spent.queue - spent.infer)

    begun = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    if not wall:
        return
    into.per_s.append(len(wall) / (time.perf_counter() - begun))
    p50, p99 = np.percentile(wall, (50, 99))
    into.p50_ms.append(float(p50))
    into.p99_ms.append(float(p99))
    into.own_p50_ms.append(median(own))


def _cell(values: list[float], *, most: bool = False) -> str:
    if not values:
        return "none"
    best, worst = (max(values), min(values)) if most else (min(values), max(values))
    return f"{median(values):.2f} ({best:.2f} to {worst:.2f})"


def _image() -> bytes:
    """A smooth random 500 x 375 JPEG of about 30 KB, like a typical ImageNet image."""
    noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".jpg", cv2.GaussianBlur(noise, (5, 5), 0), [cv2.IMWRITE_JPEG_QUALITY, 55])[1])


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
