"""A node of a few lines for the client's tests: a real HTTP server on a real socket that answers as it was told to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from aiohttp import web

from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Answer,
    Basis,
    LabelledClass,
    MaxAccuracyDrop,
    Tier,
    Timing,
)
from hawkvision.tasks.classification import Classification

ANSWER = Answer(
    id="a1",
    task="imagenet",
    prediction=Classification((LabelledClass("tabby", 281, 0.83), LabelledClass("lynx", 287, 0.1))),
    model="mobilenet_v2_int8",
    tier=Tier.EDGE,
    accuracy=AccuracyGuarantee(
        MaxAccuracyDrop(0.01), AccuracyStatus.CERTIFIED, Basis.SITE, max_drop=0.01, delta=0.05, n=680
    ),
    timing_ms=Timing(1.0, 0.1, 4.0, total=5.2),
)

Reply: TypeAlias = tuple[int, dict[str, str], bytes]


def ok() -> Reply:
    return 200, {}, json.dumps(ANSWER.to_json()).encode()


def refusal(error: HawkVisionError, **headers: str) -> Reply:
    return error.status, {k.replace("_", "-"): v for k, v in headers.items()}, json.dumps(error.body()).encode()


@dataclass
class Node:
    """Answers with the listed replies in turn, the last one for ever, and records what it was sent."""

    replies: list[Reply]
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    peers: set[object] = field(default_factory=set)
    delay_s: float = 0.0
    """Before each reply."""

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self.queries.append(dict(request.query))
        self.keys.append(request.headers.get("Authorization"))
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        await asyncio.sleep(self.delay_s)
        status, headers, body = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return web.Response(status=status, headers=headers, body=body)


@asynccontextmanager
async def serving(node: Node) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", node.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address: tuple[str, int] = runner.addresses[0]
    node.url = f"http://{address[0]}:{address[1]}"
    try:
        yield
    finally:
        await runner.cleanup()


def starter() -> Iterator[Callable[..., Node]]:
    """Starts nodes on a loop of their own and stops them afterwards."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    opened = []

    def run(*replies: Reply) -> Node:
        node = Node(list(replies) or [ok()])
        context = serving(node)
        asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
        opened.append(context)
        return node

    yield run
    for context in opened:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


Start: TypeAlias = Callable[..., Node]
