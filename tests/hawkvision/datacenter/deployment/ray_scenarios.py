"""`python -m tests.hawkvision.datacenter.deployment.ray_scenarios FOLDER`: real Serve deployments, called as a server
calls them. `test_on_ray` starts it and judges what it prints: one JSON object.

A process of its own, because Ray reads its environment when it is imported. FOLDER has the models' manifest.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import cv2
import msgspec
import numpy as np

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.launch import local_ray
from hawkvision.datacenter.stages.cascade_executor import run_two_stages
from hawkvision.datacenter.stages.catalog import Catalog, load_catalogs, loaded
from hawkvision.system.child_server import adopt_orphans
from tests.hawkvision.datacenter.conftest import image

ResultT = TypeVar("ResultT")

LIMIT_S = 120.0
IMAGE = image()


@dataclass
class Load:
    """What became of the images that eight callers sent, by error or "answered", and the statements of the answers."""

    outcomes: Counter[str] = field(default_factory=Counter)
    statements: set[str] = field(default_factory=set)


class Tier:
    """The groups of one catalog on a private Ray, with two replicas each."""

    def __init__(self, config: DatacenterConfig, catalog: Catalog, thread: ThreadPoolExecutor) -> None:
        self.config = config
        self.catalog = catalog
        self._thread = thread

    async def deploy(self, **changes: Any) -> None:
        """Deploy, or update what runs, and wait until Serve calls it running."""
        from hawkvision.datacenter.deployment.group_deployments import group_apps
        from hawkvision.datacenter.deployment.handles import HandleVariants

        config = msgspec.structs.replace(self.config, **changes)
        apps = group_apps(config, self.catalog)

        def run() -> list[Any]:
            from ray import serve

            handles: list[Any] = serve.run_many(
                [serve.RunTarget(app, name=name, route_prefix=None) for name, app in apps.items()]
            )
            return handles

        handles = await self.in_ray(run)
        self.variants = HandleVariants(self.catalog.groups, handles)

    async def in_ray(self, work: Callable[[], ResultT]) -> ResultT:
        """The result of work that needs Ray, and may block."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def ask(self, deadline: Deadline | None = None, *, streaming: bool = False, body: bytes = IMAGE) -> str:
        """The statement of the answer."""
        partial = (lambda _: None) if streaming else None
        (result,) = await run_two_stages(
            self.variants, self.catalog.kind, self.catalog.best, None, body, deadline, partial
        )
        return result.answers[0].statement

    @asynccontextmanager
    async def load(self, *, streaming: bool = True) -> AsyncIterator[Load]:
        """Eight callers while the block lasts, half of them for parts if `streaming`; they are answered before it."""
        seen, stopping = Load(), asyncio.Event()

        async def caller(for_parts: bool) -> None:
            while not stopping.is_set():
                try:
                    seen.statements.add(await self.ask(streaming=for_parts))
                    seen.outcomes["answered"] += 1
                except HawkVisionError as error:
                    seen.outcomes[error.code] += 1

        callers = [asyncio.create_task(caller(streaming and bool(number % 2))) for number in range(8)]
        await until(lambda: answered_all(seen))
        yield seen
        stopping.set()
        await asyncio.gather(*callers)

    def replicas(self) -> list[int]:
        """The process ids of the replicas."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and "ServeReplica" in (entry / "cmdline").read_text():
                    session = os.environ["HAWKVISION_TEST_MARK"].encode()
                    found += [int(entry.name)] * (session in (entry / "environ").read_bytes())
        return sorted(found)


async def answered_all(seen: Load) -> bool:
    return seen.outcomes["answered"] >= 16


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def killed(tier: Tier) -> dict[str, Any]:
    """One of two replicas is killed under load, and replaced. No caller has had a part of an answer."""
    before = tier.replicas()
    async with tier.load(streaming=False) as seen:
        os.kill(before[0], signal.SIGKILL)

        async def replaced() -> bool:
            return len(tier.replicas()) == len(before) and before[0] not in tier.replicas()

        await until(replaced)
        enough = seen.outcomes["answered"] + 64

        async def more() -> bool:
            return seen.outcomes["answered"] >= enough

        await until(more)
    return {"outcomes": dict(seen.outcomes)}


async def reconfigured(tier: Tier) -> dict[str, Any]:
    """Other models under load."""
    before = tier.replicas()
    older = await tier.ask()
    warmer = tuple(msgspec.structs.replace(variant, temperature=2.0) for variant in tier.catalog.variants)
    async with tier.load() as seen:
        tier.catalog = replace(tier.catalog, variants=warmer)
        await tier.deploy()
        seen.statements.clear()

        async def changed() -> bool:
            return older not in seen.statements and len(seen.statements) == 1

        async def stable() -> bool:
            seen.statements.clear()
            await asyncio.sleep(0.2)
            return await changed()

        await until(stable)
    return {"outcomes": dict(seen.outcomes), "same processes": tier.replicas() == before}


async def rolled(tier: Tier) -> dict[str, Any]:
    """An update that replaces all processes, under load."""
    before = tier.replicas()
    async with tier.load() as seen:
        await tier.deploy(memory_bytes=64 * 2**20)

        async def replaced() -> bool:
            return not set(before) & set(tier.replicas())

        await until(replaced)
    return {"outcomes": dict(seen.outcomes), "replicas": len(tier.replicas())}


async def stored(tier: Tier) -> dict[str, Any]:
    """Large images, and what Ray's object store has taken meanwhile, in bytes."""
    large = noise_png()
    before = await tier.in_ray(bytes_stored)
    for streaming in (False, True):
        await tier.ask(body=large, streaming=streaming)
    return {"sent": 2 * len(large), "stored": await tier.in_ray(bytes_stored) - before}


def bytes_stored() -> int:
    """All that has ever been put into Ray's object store."""
    import ray
    from ray._private import internal_api

    address = ray.get_runtime_context().gcs_address
    reply = internal_api.get_memory_info_reply(internal_api.get_state_from_address(address))
    return int(reply.store_stats.cumulative_created_bytes)


def noise_png() -> bytes:
    """More than Ray passes inline (100 kB)."""
    pixels = np.random.default_rng(1).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".png", pixels)[1])


async def main(models: Path) -> dict[str, Any]:
    """What became of each scenario."""
    from hawkvision.datacenter.ingress.application import application

    config = DatacenterConfig(
        tasks=("shapes",), models_dir=models, backend="noop", min_replicas=2, max_replicas=2, num_cpus=0.5
    )
    catalog = loaded(load_catalogs(config))["shapes"]
    with tempfile.TemporaryDirectory(prefix="hawkvision") as folder, ThreadPoolExecutor(1, "ray") as thread:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(thread, local_ray.start_ray, application(config), Path(folder))
            tier = Tier(config, catalog, thread)
            await tier.deploy()
            scenarios = (stored, killed, reconfigured, rolled)
            results = {}
            for scenario in scenarios:
                results[scenario.__name__] = await scenario(tier)
                print(scenario.__name__, results[scenario.__name__], file=sys.stderr, flush=True)
            return results
        finally:
            await loop.run_in_executor(thread, lambda: local_ray.stop_ray(ask=True))


if __name__ == "__main__":
    local_ray.set_environment()
    adopt_orphans()
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))), flush=True)
