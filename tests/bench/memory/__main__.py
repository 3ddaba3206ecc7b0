"""Six tasks on one node whose memory does not hold all of their models, beside INFaaS under the same budget.

    python -m tests.bench.memory [--seconds 25] [--seeds 1,2,3] [--share 0.6] [--systems all,lru,fifo,infaas]
    python -m tests.bench.memory --loads 500

Each task has a source of requests that is on for 2 s and off for 6 s on average (a Markov-modulated Poisson process);
the mean rates of the tasks follow a Zipf law. Five targets, drawn evenly. Runs of a seed have the same arrivals. The
datacenter is a stand-in that answers after 60 ms. The program prints, for each run, the answers and errors, P50 and P99
from the planned arrival, loads per hour, and the node's memory; with `--loads`, its memory over loads and unloads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import re
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from hawkvision.models.manifest import load_manifest, models_dir
from hawkvision.system.child_server import ServerProcess, running
from tests.bench.memory.tier import serving
from tests.bench.policies.baselines.plugin import with_baselines

TASKS: Final = ("imagenet", "coco", "cifar10", "coco_labels", "fashion_mnist", "coco_count")
"""From the most to the least popular."""
STAGES: Final = {task: load_manifest(task, models_dir(None, task)).cascade.default_edge for task in TASKS}
TARGETS: Final = (
    "quality=fast",
    "quality=balanced",
    "max_accuracy_drop=0.02",
    "max_accuracy_drop=0.01",
    "quality=best",
)
RATE: Final = 12.0
"""Requests a second of all tasks together."""
ON_S: Final = 2.0
OFF_S: Final = 6.0
TIER_S: Final = 0.06
ENOUGH: Final = 1 << 40
"""A budget, so that models are measured without the libraries that come with them."""
IN_FLIGHT: Final = 512
"""Connections; further requests wait for one, which counts as time."""
DATA: Final = Path(__file__).resolve().parents[4] / "shared" / "data"
FILES: Final = {"imagenet": "imagenet_eval", "cifar10": "cifar10", "fashion_mnist": "cifar10"}
INFAAS: Final = ("edge", "--policy", "infaas")
SYSTEMS: Final[dict[str, tuple[str, ...]]] = {
    "all": ("edge",),
    "lru": ("edge",),
    "fifo": ("tests.bench.memory.fifo",),
    "infaas": INFAAS,
    "one-variant": (*INFAAS, "--task-settings", ",".join(f"{task}.variant={stage}" for task, stage in STAGES.items())),
}
"""Nodes; all but `all` have memory for a share of the edge stages. `one-variant`: INFaaS that knows these alone."""


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at_s: float
    task: str
    target: str
    image: int


def arrivals(seed: int, seconds: float) -> list[Arrival]:
    """All requests of a run in their order; the same for the same seed."""
    weights = [1.0 / rank for rank in range(1, len(TASKS) + 1)]
    found = []
    for task, weight in zip(TASKS, weights, strict=True):
        draws = random.Random(f"{seed} {task}")
        rate = RATE * weight / sum(weights) * (ON_S + OFF_S) / ON_S
        at_s, on = 0.0, draws.random() < ON_S / (ON_S + OFF_S)
        while at_s < seconds:
            until_s = at_s + draws.expovariate(1.0 / (ON_S if on else OFF_S))
            while on and (at_s := at_s + draws.expovariate(rate)) < min(until_s, seconds):
                found.append(Arrival(at_s, task, draws.choice(TARGETS), draws.randrange(10_000)))
            at_s, on = until_s, not on
    return sorted(found, key=lambda each: each.at_s)


def images(task: str) -> list[bytes]:
    """Encoded images for a task."""
    loaded = np.load(DATA / f"{FILES.get(task, 'coco_eval')}.npz")
    data, offsets = loaded["data"], loaded["offsets"]
    return [data[offsets[i] : offsets[i + 1]].tobytes() for i in range(min(500, len(offsets) - 1))]


@contextlib.contextmanager
def node(system: str, url: str, budget: int | None) -> Iterator[ServerProcess]:
    """A node of one of `SYSTEMS`."""
    memory = () if budget is None else ("--model-memory-bytes", str(budget))
    asked = ("--port", "0", "--tasks", ",".join(TASKS), "--datacenter-url", url, "--log-level", "warning")
    program, *words = SYSTEMS[system]
    with running(program, *asked, *memory, *words, env=with_baselines()) as found:
        yield found


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) / 1e3


async def counted(session: aiohttp.ClientSession, name: str) -> float:
    """The sum of a metric's samples."""
    async with session.get("/metrics") as reply:
        page = await reply.text()
    return sum(float(value) for value in re.findall(rf"(?m)^hawkvision_{name}(?:{{.*}})? (\S+)$", page))


@contextlib.asynccontextmanager
async def sampled(pid: int, session: aiohttp.ClientSession) -> AsyncIterator[list[tuple[float, float]]]:
    """Resident memory and bytes of models in megabytes, each half second of the block."""
    found: list[tuple[float, float]] = []

    async def sample() -> None:
        while True:
            found.append((resident_mb(pid), await counted(session, "model_bytes") / 1e6))
            await asyncio.sleep(0.5)

    sampling = asyncio.create_task(sample())
    try:
        yield found
    finally:
        sampling.cancel()


async def one_run(server: ServerProcess, seed: int, seconds: float, bodies: dict[str, list[bytes]]) -> str:
    """One run in words."""
    latencies: list[float] = []
    errors: Counter[str] = Counter()
    tiers: list[str] = []
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        before = await counted(session, "model_load_duration_seconds_count")
        began = time.monotonic()

        async def ask(each: Arrival) -> None:
            query = f"/v1/infer?task={each.task}&{each.target}"
            body = bodies[each.task][each.image % len(bodies[each.task])]
            async with session.post(query, data=body, headers={"content-type": "image/jpeg"}) as reply:
                answer = await reply.json()
            if reply.status == 200:
                latencies.append((time.monotonic() - began - each.at_s) * 1e3)
                tiers.append(answer["tier"])
            else:
                errors[f"{reply.status} {answer['code']} of {each.task}"] += 1

        async with sampled(server.pid, session) as memory, asyncio.TaskGroup() as asking:
            for each in arrivals(seed, seconds):
                await asyncio.sleep(max(0.0, each.at_s - (time.monotonic() - began)))
                asking.create_task(ask(each))
        took_s = time.monotonic() - began
        loads = await counted(session, "model_load_duration_seconds_count") - before
    cuts = statistics.quantiles(latencies, n=100)
    resident, models = zip(*memory, strict=True)
    failed = f"{errors.total()} errors {dict(errors)}" if errors else "no error"
    return (
        f"seed {seed}: {len(latencies)} answers, {failed}, edge {tiers.count('edge') / len(tiers):.0%}, "
        f"P50 {cuts[49]:.1f} ms, P90 {cuts[89]:.0f} ms, P99 {cuts[98]:.0f} ms, {loads / took_s * 3600:.0f} loads/h, "
        f"RSS {min(resident):.0f} to {max(resident):.0f} MB, models at most {max(models):.1f} MB"
    )


async def compare(seconds: float, seeds: Sequence[int], share: float, systems: Sequence[str]) -> None:
    """Print the runs of each system."""
    bodies = {task: images(task) for task in TASKS}
    async with serving(TASKS, TIER_S) as url:
        whole = await asyncio.to_thread(needed, url)
        budget = int(whole * share)
        print(f"models of all tasks: {whole / 1e6:.1f} MB; budget {budget / 1e6:.1f} MB", flush=True)
        for system in systems:
            opened = node(system, url, None if system == "all" else budget)
            server = await asyncio.to_thread(opened.__enter__)
            try:
                for seed in seeds:
                    print(f"{system:12} {await one_run(server, seed, seconds, bodies)}", flush=True)
            finally:
                await asyncio.to_thread(opened.__exit__, None, None, None)


def needed(url: str) -> int:
    """Bytes of all models, each counted once."""
    with node("all", url, ENOUGH) as server, urllib.request.urlopen(f"{server.url}/metrics") as reply:
        found = re.search(r"(?m)^hawkvision_model_bytes (\S+)$", reply.read().decode())
    assert found is not None
    return int(float(found[1]))


async def cycles(number: int) -> None:
    """Print the node's memory over loads and unloads of two tasks in turn, with a request after each load."""
    pictures = {task: images(task)[0] for task in TASKS[:2]}
    async with serving(TASKS, TIER_S) as url:
        opened = node("all", url, None)
        server = await asyncio.to_thread(opened.__enter__)
        try:
            async with aiohttp.ClientSession(server.url) as session:
                for count, task in zip(range(number + 1), itertools.cycle(pictures), strict=False):
                    if count in (20, number // 2, number) or count % 100 == 0:
                        print(f"{count} loads and unloads: {resident_mb(server.pid):.1f} MB", flush=True)
                    for path in (f"/v1/tasks/{task}/unload", f"/v1/tasks/{task}/load"):
                        async with session.post(path) as reply:
                            assert reply.status == 200, await reply.text()
                    async with session.post(f"/v1/infer?task={task}&quality=fast", data=pictures[task]) as reply:
                        assert reply.status == 200, await reply.text()
        finally:
            await asyncio.to_thread(opened.__exit__, None, None, None)


def main() -> None:
    """Run what the command line says."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--share", type=float, default=0.6, help="of all models' memory; half does not hold ImageNet's")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--loads", type=int, default=0, help="load and unload so often instead")
    given: Any = parser.parse_args()
    if given.loads:
        asyncio.run(cycles(given.loads))
        return
    asyncio.run(
        compare(given.seconds, [int(each) for each in given.seeds.split(",")], given.share, given.systems.split(","))
    )


if __name__ == "__main__":
    main()
