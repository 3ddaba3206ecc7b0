"""A datacenter of the test's own making: real sockets, the documented hop, and the misbehaviour a test asks for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from hawkvision.hop import HopClass, HopReply, HopTiming, PassedOver, Rung, Rungs, parse_hop_headers

ANSWER_CLASS = 7
MIDDLE_CLASS = 6


@dataclass
class Peer:
    """What the peer does, settable while it runs, and what it was asked."""

    url: str = ""
    delay_s: float = 0.0
    rungs_delay_s: float = 0.0
    status: int = 200
    error_code: str = "overloaded"
    garbage: bool = False
    model: str = "committee"
    top_k: list[tuple[int, float]] = field(default_factory=lambda: [(ANSWER_CLASS, 0.99), (8, 0.005)])
    fingerprint: str = ""
    middle: str = ""
    """A middle rung that is served too; it answers MIDDLE_CLASS, as sure as `middle_score` says."""
    middle_fingerprint: str = ""
    middle_score: float = 0.5
    knows_middle: bool = True
    """False for a tier that ignores the headers of a middle rung."""
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def infer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        await asyncio.sleep(self.delay_s)
        if self.garbage:
            return web.Response(text="<html>a captive portal</html>")
        if self.status != 200:
            return web.json_response({"error": "no", "code": self.error_code}, status=self.status)
        return web.Response(body=msgspec.json.encode(self.reply(request)), content_type="application/json")

    def reply(self, request: web.Request) -> HopReply:
        top = tuple(HopClass(*entry) for entry in self.top_k)
        answer = HopReply(top, self.model, HopTiming(1.0, 0.5, 2.0, 4.0), batch_size=1, score=None)
        asked = parse_hop_headers(request.headers)
        if asked.middle is None or not self.knows_middle:
            return answer
        if self.middle_score >= asked.middle.accept_score:
            seen = (HopClass(MIDDLE_CLASS, self.middle_score),)
            return msgspec.structs.replace(answer, top_k=seen, model=self.middle, score=self.middle_score)
        passed_over = PassedOver(MIDDLE_CLASS, self.middle_score)
        return msgspec.structs.replace(answer, score=top[0].confidence, passed_over=passed_over)

    async def rungs(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.rungs_delay_s)
        rungs = (Rung(self.middle, (), self.middle_fingerprint),) if self.middle else ()
        listing = Rungs("imagenet", self.model, (*rungs, Rung(self.model, (), self.fingerprint)))
        return web.Response(body=msgspec.json.encode(listing), content_type="application/json")


@contextlib.contextmanager
def running_peer(port: int = 0, **behaviour: object) -> Iterator[Peer]:
    """The peer, listening on loopback until the block ends."""
    peer = Peer()
    for name, value in behaviour.items():
        setattr(peer, name, value)
    ready = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        running.append((asyncio.get_running_loop(), stop))
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/infer", peer.infer)
        app.router.add_get("/v1/rungs", peer.rungs)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, bound = runner.addresses[0][:2]
        peer.url = f"http://{host}:{bound}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield peer
    finally:
        loop, stop = running[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()
