"""A node that knows every answer, and data that it knows: for tests of what is asked and of what is made of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from aiohttp import web

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.core.errors import TargetUnreachable
from hawkvision.core.types import AccuracyGuarantee, AccuracyStatus, Answer, Basis, LabelledClass, Quality, Tier
from hawkvision.tasks.classification import Classification


def answer(index: int, escalated: bool = False, max_drop: float | None = 0.01, degraded: bool = False) -> Answer:
    status = AccuracyStatus.BEST_EFFORT if max_drop is None else AccuracyStatus.CERTIFIED
    guarantee = AccuracyGuarantee(Quality.FAST, status, Basis.SHIPPED, max_drop, delta=0.05, n=100)
    top = Classification((LabelledClass(str(index), index, 0.9),))
    return Answer("id", "t", top, "m", Tier.EDGE, guarantee, escalated=escalated, degraded=degraded)


@dataclass
class Oracle:
    """A node that is right at `best`, and wrong about every `wrong_every`-th image otherwise."""

    wrong_every: int = 4
    degraded_times: int = 0
    """Of each image, how often `best` is answered by the edge, below the target."""
    seen: list[tuple[int, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        number, target = (
            int(await request.read()),
            "&".join(f"{k}={v}" for k, v in request.query.items() if k != "task"),
        )
        self.seen.append((number, target))
        if "min_accuracy" in request.query:
            return web.json_response(TargetUnreachable("too much", 0.9).body(), status=422)
        best = request.query.get("quality") == "best"
        right = best or number % self.wrong_every != 0
        if best and self.seen.count((number, target)) <= self.degraded_times:
            return web.json_response(answer(7, escalated=False, degraded=True).to_json())
        return web.json_response(answer(number % 7 if right else 7, escalated=best).to_json())


@asynccontextmanager
async def asking(oracle: Oracle) -> AsyncIterator[AsyncClient]:
    app = web.Application()
    app.router.add_post("/v1/classify", oracle.handle)
    runner = web.AppRunner(app, shutdown_timeout=1.0)  # it may be made to hang
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with AsyncClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            yield client
    finally:
        await runner.cleanup()


def write_set(folder: Path, labels: list[int]) -> Path:
    """An npz set whose image i is the text i."""
    bodies = [b"%d" % i for i in range(len(labels))]
    path = folder / "set.npz"
    np.savez(
        path,
        data=np.frombuffer(b"".join(bodies), np.uint8),
        offsets=np.cumsum([0, *map(len, bodies)]).astype(np.uint32),
        labels=np.array(labels, np.int16),
    )
    return path
