"""A datacenter of the test's own making: real sockets, the documented escalation, and the misbehaviour a test asks
for."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from hawkvision.core.errors import Overloaded
from hawkvision.core.escalation_api import (
    PROGRESSIVE_HEADER,
    PROGRESSIVE_TYPE,
    DatagramEndpoint,
    EscalationReply,
    EscalationRequest,
    EscalationTiming,
    IntermediateResult,
    ListedStage,
    PartialEnsemble,
    StageList,
    Transports,
    parse_escalation_datagram,
    parse_escalation_headers,
)
from hawkvision.core.types import WHOLE, Output, Prediction, Received
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.serving import encode_reply
from hawkvision.transport.coding.image_coding import Expired, Partial
from hawkvision.transport.protocol.control import VERSION
from hawkvision.transport.protocol.server_certificate import own_identity
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.session import Incoming
from tests.hawkvision.tasks.classes import TEN, predicted, write_reply

AS_LISTED = "as listed"
ANSWER_CLASS = 7
INTERMEDIATE_CLASS = 6


@dataclass
class Peer:
    """What the peer does, settable while it runs, and what it was asked."""

    url: str = ""
    delay_s: float = 0.0
    held: bool = False
    """Whether images over HTTP wait for their answers until it is False again."""
    stages_delay_s: float = 0.0
    status: int = 200
    stages_status: int = 200
    asked_for_stages: int = 0
    error_code: str = "overloaded"
    garbage: bool = False
    task: str = "imagenet"
    model: str = "reference"
    top_k: list[tuple[int, float]] = field(default_factory=lambda: [(ANSWER_CLASS, 0.99), (8, 0.005)])
    kind: TaskKind[Any] = TEN
    """Of its task."""
    answers: tuple[Prediction, Prediction] | None = None
    """Of another kind than classification: what it answers, and what it does when it differs."""
    differing: float = 0.0
    """Share of answers, at random, that are ANSWER_CLASS instead of what `top_k` says, or the second of `answers`."""
    draws: random.Random = field(default_factory=lambda: random.Random(1))
    fingerprint: str = ""
    """Of the models, in its listing; what its replicas are said to state there follows from it."""
    states: str | None = AS_LISTED
    """What answers state that they were computed by."""
    execution: str = "int8"
    """What its replicas state that runs their models."""
    old: bool = False
    """Whether it is a tier of a release that states nothing, in its listing either."""
    intermediate: str = ""
    """An intermediate stage that is served too; it answers INTERMEDIATE_CLASS, as sure as `intermediate_score` says."""
    intermediate_fingerprint: str = ""
    intermediate_score: float = 0.5
    parts: list[int] = field(default_factory=list)
    """Of a progressive request, what is said at once, before the answer: the classes of incomplete ones."""
    part_members: tuple[str, ...] = ("large_a",)
    """The members whose answers these are."""
    part_output: Output | None = None
    """What they computed, in place of a probability of 0.5 for the class."""
    part_fraction: float = 1.0
    """The share of the image that they had."""
    received: Received = WHOLE
    """What it says that it had of an image whose answer is complete; encoded anew, with `part_output` if it is set."""
    breaks_off: bool = False
    """Whether the connection ends after the parts, or over datagrams the last of them is the answer."""
    knows_intermediate: bool = True
    """False for a tier that ignores the headers of an intermediate stage."""
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    """Of the callers' ends of the connections that images came over."""
    gone: int = 0
    """Callers that closed their connection over HTTP while they were held, or cancelled their image over datagrams."""
    answered: int = 0
    """Images over HTTP whose answer was begun."""
    offer: DatagramEndpoint | None = None
    """What it says of its datagram transport."""
    transport_keys: list[str | None] = field(default_factory=list)
    """Keys that came with the question for that."""
    datagrams: list[tuple[EscalationRequest, bytes]] = field(default_factory=list)
    """What came over that: requests and images."""

    async def infer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if request.transport is not None:
            self.ports.add(request.transport.get_extra_info("peername")[1])
        if self.parts and request.headers.get(PROGRESSIVE_HEADER) == "1":
            return await self.in_parts(request)
        while self.held:
            if request.transport is None:
                self.gone += 1
                return web.Response()
            await asyncio.sleep(0.005)
        await asyncio.sleep(self.delay_s)
        self.answered += 1
        if self.garbage:
            return web.Response(text="<html>a captive portal</html>")
        if self.status != 200:
            return web.json_response({"error": "no", "code": self.error_code}, status=self.status)
        asked = parse_escalation_headers(request.headers)
        return web.Response(body=encode_reply(self.kind, self.reply(asked)), content_type="application/json")

    async def in_parts(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": PROGRESSIVE_TYPE})
        response.enable_chunked_encoding()
        await response.prepare(request)
        answer = self.reply(parse_escalation_headers(request.headers))
        for index in self.parts:
            await response.write(encode_reply(self.kind, self.part(answer, index)) + b"\n")
        if self.breaks_off and request.transport is not None:
            request.transport.close()
        await asyncio.sleep(self.delay_s)
        self.answered += 1
        timing = msgspec.structs.replace(answer.timing_ms, total=1e3 * self.delay_s + 4.0, first=4.0)
        await response.write(write_reply(msgspec.structs.replace(answer, timing_ms=timing)) + b"\n")
        return response

    async def infer_datagrams(self, incoming: Incoming) -> tuple[Status, bytes]:
        asked, _ = parse_escalation_datagram(incoming.template, incoming.meta)
        if incoming.better is not None:
            incoming = await incoming.better
        arrived = incoming.arrived
        assert not isinstance(arrived, Expired)
        self.datagrams.append((asked, arrived.body))
        so_far = [self.part(self.reply(asked), index) for index in (self.parts if asked.progressive else ())]
        for part in so_far:
            incoming.send_interim(write_reply(part))
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        if self.status != 200:
            raise Overloaded("no", 1.0)
        fraction = arrived.received_fraction if isinstance(arrived, Partial) else 1.0
        reply = so_far[-1] if so_far and self.breaks_off else self.reply(asked)
        reply = msgspec.structs.replace(reply, received_fraction=fraction, quality=arrived.quality)
        return Status.OK, b"<html>" if self.garbage else write_reply(reply)

    def part(self, answer: EscalationReply, index: int) -> EscalationReply:
        """An incomplete reply; a class that does not exist makes it malformed."""
        output = self.part_output
        if output is None:
            output = np.zeros(max(len(TEN.labels), index + 1), np.float32)
            output[index] = 0.5
        part = PartialEnsemble(self.part_members, output)
        return msgspec.structs.replace(answer, part=part, received_fraction=self.part_fraction)

    def reply(self, asked: EscalationRequest) -> EscalationReply:
        differs = self.differing > 0.0 and self.draws.random() < self.differing
        top: Any = predicted((ANSWER_CLASS, 0.99)) if differs else predicted(*self.top_k)
        if self.answers is not None:
            top = self.answers[differs]
        by_best, by_intermediate = self.stated(self.fingerprint), self.stated(self.intermediate_fingerprint)
        part = None
        if self.received.quality is not None and self.part_output is not None:
            part = PartialEnsemble(self.part_members, self.part_output, decided=True)
        answer = EscalationReply(
            top,
            self.model,
            EscalationTiming(1.0, 0.5, 2.0, 4.0),
            batch_size=1,
            score=None,
            fingerprint=by_best,
            received_fraction=self.received.fraction,
            quality=self.received.quality,
            part=part,
        )
        if asked.intermediate is None or not self.knows_intermediate:
            asked_for_intermediate = asked.variant is not None and asked.variant == self.intermediate
            if asked_for_intermediate:
                return msgspec.structs.replace(answer, model=self.intermediate, fingerprint=by_intermediate)
            return answer
        if self.intermediate_score >= asked.intermediate.accept_score:
            seen = predicted((INTERMEDIATE_CLASS, self.intermediate_score))
            return msgspec.structs.replace(
                answer,
                prediction=seen,
                model=self.intermediate,
                score=self.intermediate_score,
                fingerprint=by_intermediate,
            )
        passed_over = IntermediateResult(predicted((INTERMEDIATE_CLASS, 0.0)), self.intermediate_score, by_intermediate)
        return msgspec.structs.replace(answer, score=top.confidence, passed_over=passed_over)

    def stated(self, models: str) -> str | None:
        if self.old or self.states != AS_LISTED:
            return None if self.old else self.states
        return f"{models}/{self.execution}" if models else None

    def listed(self, name: str, models: str) -> ListedStage:
        return ListedStage(name, (), models, f"{models}/{self.execution}" if models and not self.old else None)

    async def stages(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.stages_delay_s)
        self.asked_for_stages += 1
        if self.stages_status != 200:
            return web.json_response({"error": "no", "code": self.error_code}, status=self.stages_status)
        stages = (self.listed(self.intermediate, self.intermediate_fingerprint),) if self.intermediate else ()
        listing = StageList(self.task, self.model, (*stages, self.listed(self.model, self.fingerprint)))
        return web.Response(body=msgspec.json.encode(listing), content_type="application/json")

    async def transports(self, request: web.Request) -> web.Response:
        self.transport_keys.append(request.headers.get("Authorization"))
        return web.Response(body=msgspec.json.encode(Transports(self.offer)), content_type="application/json")

    async def open_datagram(self) -> DatagramListener:
        identity = own_identity()
        server = await DatagramListener.start("127.0.0.1", 0, identity, self.infer_datagrams)
        self.offer = DatagramEndpoint(server.port, identity.pem, identity.name, VERSION)
        return server


@contextlib.contextmanager
def running_peer(
    port: int = 0, *, datagram: bool = False, tls: ssl.SSLContext | None = None, **behaviour: object
) -> Iterator[Peer]:
    """The peer, listening on loopback until the block ends; for datagrams, too, if `datagram`, and over `tls` if
    given."""
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
        app.router.add_get("/v1/stages", peer.stages)
        app.router.add_get("/v1/transport", peer.transports)
        datagrams = await peer.open_datagram() if datagram else None
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        host, bound = runner.addresses[0][:2]
        peer.url = f"{'http' if tls is None else 'https'}://{host}:{bound}"
        ready.set()
        await stop.wait()
        if datagrams is not None:
            await datagrams.close()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield peer
    finally:
        loop, stop = running[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()
