"""A stand-in for the datacenter: it answers images of any task, always the same, after a fixed time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import web

from hawkvision.core.escalation_api import (
    STAGES_PATH,
    EscalationReply,
    EscalationTiming,
    ListedStage,
    StageList,
    parse_escalation_headers,
)
from hawkvision.models.manifest import load_manifest, models_dir
from hawkvision.tasks.registry import INFER_PATH, load_kind
from hawkvision.tasks.serving import encode_reply


class Tier:
    """It states the fingerprints of the manifests, so that certificates are in force."""

    def __init__(self, tasks: Sequence[str], delay_s: float) -> None:
        self._delay_s = delay_s
        self._manifests = {task: load_manifest(task, models_dir(None, task)) for task in tasks}
        self._kinds = {task: load_kind(each, models_dir(None, task)) for task, each in self._manifests.items()}

    async def infer(self, request: web.Request) -> web.Response:
        """An escalated image."""
        await request.read()
        asked = parse_escalation_headers(request.headers)
        assert asked.task is not None
        kind, manifest = self._kinds[asked.task], self._manifests[asked.task]
        await asyncio.sleep(self._delay_s)
        model, prediction = asked.variant or manifest.best, type(kind).prediction.example()
        assert prediction is not None
        timing = EscalationTiming(1.0, 0.5, self._delay_s * 1e3, self._delay_s * 1e3)
        reply = EscalationReply(
            prediction, model, timing, batch_size=1, score=None, fingerprint=f"{manifest.fingerprint(model)}/int8"
        )
        return web.Response(body=encode_reply(kind, reply), content_type="application/json")

    async def stages(self, request: web.Request) -> web.Response:
        """What it serves of a task."""
        task = request.query["task"]
        manifest = self._manifests[task]
        found = tuple(
            ListedStage(name, (), manifest.fingerprint(name), f"{manifest.fingerprint(name)}/int8")
            for name in manifest.cascade.dc
        )
        return web.Response(body=msgspec.json.encode(StageList(task, manifest.best, found)))


@contextlib.asynccontextmanager
async def serving(tasks: Sequence[str], delay_s: float) -> AsyncIterator[str]:
    """Its address, while it runs."""
    tier, app = Tier(tasks, delay_s), web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post(INFER_PATH, tier.infer)
    app.router.add_get(STAGES_PATH, tier.stages)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
