"""The datagram server: the same node and the same answers as over HTTP, for images that arrive as datagrams.

    template: a query string ─┐                              ┌─ complete ──────────────────────────► classify
    meta: the stream's name ──┼─► request_fields ─► request ─┤
    deadline: the fragments' ─┘                              └─ partly there ─► infer_early ─┬─ accepted
                                                                                             └─ else ─► classify

While fragments of an image are missing, the edge stage runs once on what has arrived. If a certificate for images
received in that condition accepts the answer, it leaves, and the missing fragments are not waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import msgspec
from prometheus_client.registry import Collector

from edge.servers.shared.frontend import Frontend
from edge.servers.shared.request_fields import with_stream
from edge.serving.node import EdgeNode
from edge.serving.request import ImageRequest
from hawkvision.core.errors import NotReady, Overloaded, TooLarge
from hawkvision.core.escalation_api import DatagramEndpoint
from hawkvision.core.logs import bind_request
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.trace_context import start_trace
from hawkvision.core.types import Answer, Received, RequestFields
from hawkvision.transport.coding.image_coding import Complete, Expired, Partial
from hawkvision.transport.congestion.registry import controller_class
from hawkvision.transport.offer import OfferedEndpoint
from hawkvision.transport.protocol.server_certificate import identity_for
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.assembly import ReceiveTimeouts
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.metrics import DatagramServerCounts
from hawkvision.transport.server.session import Incoming
from hawkvision.transport.settings import DatagramSettings

log = logging.getLogger("hawkvision.edge")

RECEIVE_TIMEOUTS: Final = ReceiveTimeouts(reserve_s=0.02, grace_s=0.015, hold_s=0.08)
"""The reserve covers one inference and the return of the answer before the deadline. Complete images are held for a
moment too, because a first guess from few fragments is hardly earlier."""
MISSING_S: Final = 30.0
"""Longest wait for missing fragments without a deadline; the transport gives up after 10 s without a fragment."""
CONFIRM_S: Final = 2.0
"""How long a stopping server waits for callers to confirm its last answers; a caller that is gone confirms none."""

_encode = msgspec.json.encode


class DatagramServer:
    """The datagram adapter of a node's front end. Made by `open`; close it."""

    def __init__(self, frontend: Frontend) -> None:
        self._front = frontend
        self._outcomes: Counter[str] = Counter()
        self._stopping = False
        self._server: DatagramListener
        self.offered: OfferedEndpoint

    @classmethod
    async def open(cls, config: EdgeConfig, port: int, frontend: Frontend, useful_side: int) -> DatagramServer:
        """Listen on a UDP port of `config.host`; 0 takes a free one.

        Args:
            config: host, certificate and congestion control.
            port: UDP.
            frontend: answers.
            useful_side: no stage uses more pixels of an image's shorter side.

        Raises:
            ConfigError: if the address cannot be listened on, or certificate and key cannot be used.
        """
        server = cls(frontend)
        datagrams = config.feature(DatagramSettings)
        files = datagrams.certificate, datagrams.key
        identity = identity_for(*files)
        server._server = await DatagramListener.start(
            config.host,
            port,
            identity,
            server.answer,
            keys=frontend.keys,
            useful_side=useful_side,
            timeouts=RECEIVE_TIMEOUTS,
            congestion=controller_class(datagrams.congestion_control),
        )
        # Fragments become bodies, so they share that bound.
        server._server.budget.limit = min(server._server.budget.limit, frontend.bodies_limit_bytes)
        server.offered = OfferedEndpoint(server._server, *files, identity)
        frontend.metrics.watch(server)
        return server

    @property
    def offer(self) -> DatagramEndpoint:
        """The server's entry in `GET /v1/transport`."""
        return self.offered.offer

    def stop(self) -> None:
        """Refuse new images; those under way are still answered."""
        self._stopping = True

    async def close(self, drain_s: float) -> None:
        """Stop, answer what is under way within `drain_s`, and end all connections."""
        self.stop()
        await self._server.drain(drain_s, CONFIRM_S)
        await self._server.close()

    async def answer(self, incoming: Incoming) -> tuple[Status, bytes]:
        """The answer to one image, or its refusal. Cancelled when the caller no longer waits."""
        front, size, task = self._front, 0, None
        bodies = front.bodies
        front.in_flight += 1
        try:
            if self._stopping:
                raise NotReady("the node is shutting down")
            caller = front.admit(incoming.caller, incoming.network)
            tasks = front.ready_tasks()
            request = _asked(incoming)
            node = tasks.node(request.task, request.kind)
            task, bodies = node.task, front.bodies_of(node.task)
            arrived = incoming.arrived
            assert not isinstance(arrived, Expired), "the transport answers expired images"
            most = bodies.max_body_bytes
            if len(arrived.body) > most:
                raise TooLarge(f"the image has {len(arrived.body)} bytes; at most {most} are read")
            bodies.hold(len(arrived.body))
            size = len(arrived.body)
            answer = await self._classify(node, incoming, _image(incoming, request, caller))
        except asyncio.CancelledError:
            self._outcomes["cancelled"] += 1
            raise
        except Exception as error:  # noqa: BLE001 - a server: every error leaves as a documented body
            return Status.REFUSED, self._refusal(error, task)
        finally:
            bodies.give_back(size)
            front.in_flight -= 1
        front.count(answer)
        return Status.OK, _encode(answer.to_json())

    async def _classify(self, node: EdgeNode, incoming: Incoming, request: ImageRequest) -> Answer:
        bind_request(None, request.trace)
        declined = False
        if incoming.better is not None:
            if not incoming.better.done():
                answer, declined = await node.infer_early(request)
                if answer is not None:
                    self._count_arrival(incoming)
                    return answer
            incoming = await _at_its_best(incoming)
            body, received = _arrived(incoming)
            request = replace(request, body=body, received=received)
        try:
            answer = await node.infer(request, declined_before=declined)
        except Exception:  # a cancellation is counted as such
            self._count_arrival(incoming)
            raise
        self._count_arrival(incoming)
        return answer

    def _count_arrival(self, incoming: Incoming) -> None:
        _, received = _arrived(incoming)
        self._outcomes["complete" if isinstance(incoming.arrived, Complete) else "partial"] += 1
        self._front.metrics.received_fraction.observe(received.fraction)

    def _refusal(self, error: Exception, task: str | None) -> bytes:
        refused = self._front.refusal(error, task)
        body = {**refused.body(), "status": refused.status}
        if isinstance(refused, Overloaded):
            body["retry_after_s"] = refused.retry_after_s
        return _encode(body)

    def collectors(self) -> Iterable[Collector]:
        """See `Instrumented`."""
        return (DatagramServerCounts("hawkvision", lambda: self._server.counts(self._outcomes)),)


def _asked(incoming: Incoming) -> RequestFields:
    """What is asked about an image; a deadline in the fragments overrides the template's.

    Raises:
        BadField: as over HTTP.
    """
    request = with_stream(incoming.template, incoming.meta)
    if incoming.deadline is None:
        return request
    return replace(request, deadline_ms=max(0.0, incoming.deadline.remaining_ms(incoming.started)))


def _image(incoming: Incoming, asked: RequestFields, caller: str) -> ImageRequest:
    body, received = _arrived(incoming)
    return ImageRequest(body, asked, incoming.started, start_trace(), caller, received)


def _arrived(incoming: Incoming) -> tuple[bytes, Received]:
    match incoming.arrived:
        case Complete(body, quality):
            return body, Received(1.0, quality)
        case Partial(body, quality, fraction, _):
            return body, Received(fraction, quality)
        case Expired():
            raise AssertionError("the transport answers expired images")


async def _at_its_best(incoming: Incoming) -> Incoming:
    """The image once no more of it will arrive."""
    assert incoming.better is not None
    # The wait is bounded here too: a part of an image is better than none.
    until = incoming.started + MISSING_S
    if incoming.deadline is not None:
        until = max(incoming.deadline.at, incoming.started + RECEIVE_TIMEOUTS.grace_s)
    await asyncio.wait((incoming.better,), timeout=max(0.0, until - time.monotonic()))
    return incoming.better.result() if incoming.better.done() else incoming
