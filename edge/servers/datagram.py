"""The datagram server: images that come as datagrams, the same node and the same answers as over HTTP.

    template: a query string ─┐                            ┌─ complete ───────────────────────────► classify
    meta: the stream's name ──┼─► fields.py ─► request ─────┤
    deadline: the fragments' ─┘                            └─ partial, more asked for ─► look_early ─┬─ believed
                                                                                                     └─ not ─► classify

What is there of an image is looked at once while its missing fragments are on their way; if a certificate for images
received like that accepts the answer, it leaves, and what is still on its way is of no use to anybody.
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

from edge.monitoring.streams import caller_of
from edge.servers.http import EdgeApp
from edge.servers.request_fields import with_stream
from edge.serving.node import EdgeNode
from hawkvision.core.config import EdgeConfig
from hawkvision.core.errors import NotReady, Overloaded, TooLarge
from hawkvision.core.escalation_api import DatagramEndpoint
from hawkvision.core.logs import about
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace import TraceContext, start_trace
from hawkvision.core.types import Answer, ClassifyRequest, Received
from hawkvision.servers.keys import INFER, Keys
from hawkvision.transport.coding.image_coding import Complete, Expired, Partial
from hawkvision.transport.congestion.registry import controller_class
from hawkvision.transport.offer import OfferedEndpoint
from hawkvision.transport.protocol.identity import identity_for
from hawkvision.transport.protocol.status import Status
from hawkvision.transport.server.assembly import ReceiveTimeouts
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.metrics import DatagramServerCounts
from hawkvision.transport.server.session import Incoming
from hawkvision.transport.settings import DatagramSettings

log = logging.getLogger("hawkvision.edge")

RECEIVE_TIMEOUTS: Final = ReceiveTimeouts(reserve_s=0.02, grace_s=0.015, hold_s=0.08)
"""A look takes 3 to 10 ms on two cores, and answers leave 5 ms before the deadline. What an image's first fragments
show is a guess, and little earlier. Holding whole images leaves 0.23 % of answers later than 225 ms, not 0.32,
outside held spells of a simulated busy wireless LAN (40 rounds, 13,619 answers)."""
MISSING_S: Final = 30.0
"""Longest wait for missing fragments without a deadline; the transport itself gives up after 10 s without news."""
CONFIRM_S: Final = 2.0
"""How long a stopping server waits for its last answers to be confirmed, once they are given: a caller that is gone
confirms nothing."""

_encode = msgspec.json.encode


class DatagramServer:
    """A node's end of the datagram transport. Made by `open`; close it."""

    def __init__(self, app: EdgeApp, metrics: EdgeMetrics, max_body_bytes: int, keys: Keys) -> None:
        self._keys = keys
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._outcomes: Counter[str] = Counter()
        self._stopping = False
        self._server: DatagramListener
        self.offered: OfferedEndpoint

    @classmethod
    async def open(
        cls, config: EdgeConfig, port: int, app: EdgeApp, metrics: EdgeMetrics, useful_side: int, keys: Keys
    ) -> DatagramServer:
        """Listen on a UDP port of `config.host`; 0 takes a free one.

        Args:
            config: host, certificate and bounds.
            port: UDP.
            app: the HTTP server, whose node, bounds and counters this one shares.
            metrics: where to count.
            useful_side: pixels of the shorter side beyond which no stage gains anything.
            keys: those of the HTTP server.

        Raises:
            ConfigError: if the address cannot be listened on, or certificate and key cannot be used.
        """
        server = cls(app, metrics, config.max_body_bytes, keys)
        datagrams = config.feature(DatagramSettings)
        files = datagrams.certificate, datagrams.key
        identity = identity_for(*files)
        server._server = await DatagramListener.start(
            config.host,
            port,
            identity,
            server.answer,
            keys=keys,
            accept_sent_keys=datagrams.accept_sent_keys,
            useful_side=useful_side,
            timeouts=RECEIVE_TIMEOUTS,
            congestion=controller_class(datagrams.congestion_control),
        )
        # Fragments become bodies, and may take as much memory.
        server._server.budget.limit = min(server._server.budget.limit, app.bodies.limit_bytes)
        server.offered = OfferedEndpoint(server._server, *files, identity)
        metrics.watch(server)
        return server

    @property
    def offer(self) -> DatagramEndpoint:
        """What `GET /v1/transport` says of this server."""
        return self.offered.offer

    def stop(self) -> None:
        """Take no more images; those under way are still answered."""
        self._stopping = True

    async def close(self, drain_s: float) -> None:
        """Stop, answer what is under way, at most so long, and end all connections."""
        self.stop()
        await self._server.drain(drain_s, CONFIRM_S)
        await self._server.close()

    async def answer(self, incoming: Incoming) -> tuple[Status, bytes]:
        """The answer to one image, or its refusal; a cancelled one has nobody who waits for it."""
        size = 0
        try:
            if self._stopping:
                raise NotReady("the node is shutting down")
            self._keys.admit(incoming.caller, INFER)
            node = self._app.ready_node()
            request = _request(incoming)
            arrived = incoming.arrived
            assert not isinstance(arrived, Expired), "the transport answers these by itself"
            if len(arrived.body) > self._max_body_bytes:
                raise TooLarge(f"the image has {len(arrived.body)} bytes; at most {self._max_body_bytes} are read")
            self._app.bodies.reserve(len(arrived.body))
            size = len(arrived.body)
            answer = await self._classify(node, incoming, request)
        except asyncio.CancelledError:
            self._outcomes["cancelled"] += 1
            raise
        except Exception as error:  # noqa: BLE001 - the server: everything leaves as a documented error body
            return Status.REFUSED, self._refusal(error)
        finally:
            self._app.bodies.give_back(size)
        self._app.count(answer)
        return Status.OK, _encode(answer.to_json())

    async def _classify(self, node: EdgeNode, incoming: Incoming, request: ClassifyRequest) -> Answer:
        trace = start_trace()
        about(None, trace)
        if incoming.better is not None:
            answer = await self._look_early(node, incoming, request, trace)
            if answer is not None:
                self._arrived(incoming)
                return answer
            incoming = await _at_its_best(incoming)
        body, received = _image(incoming)
        try:
            caller = _caller(incoming)
            answer = await node.classify(body, request, incoming.started, trace, received=received, caller=caller)
        except Exception:  # not if it is cancelled: that is counted as such
            self._arrived(incoming)
            raise
        self._arrived(incoming)
        return answer

    @staticmethod
    async def _look_early(
        node: EdgeNode, incoming: Incoming, request: ClassifyRequest, trace: TraceContext
    ) -> Answer | None:
        assert incoming.better is not None
        if incoming.better.done():
            return None
        body, received = _image(incoming)
        return await node.look_early(body, request, incoming.started, trace, received, _caller(incoming))

    def _arrived(self, incoming: Incoming) -> None:
        _, received = _image(incoming)
        self._outcomes["complete" if isinstance(incoming.arrived, Complete) else "partial"] += 1
        self._metrics.received_fraction.observe(received.fraction)

    def _refusal(self, error: Exception) -> bytes:
        ours = self._app.count_refusal(error)
        body = {**ours.body(), "status": ours.status}
        if isinstance(ours, Overloaded):
            body["retry_after_s"] = ours.retry_after_s
        return _encode(body)

    def collectors(self) -> Iterable[Collector]:
        """See `Instrumented`."""
        return (DatagramServerCounts("hawkvision", lambda: self._server.counts(self._outcomes)),)


def _request(incoming: Incoming) -> ClassifyRequest:
    """What is asked of an image; the fragments' deadline counts before the template's.

    Raises:
        BadField: as over HTTP.
    """
    request = with_stream(incoming.template, incoming.meta)
    if incoming.deadline is None:
        return request
    return replace(request, deadline_ms=max(0.0, incoming.deadline.remaining_ms(incoming.started)))


def _caller(incoming: Incoming) -> str:
    return caller_of(incoming.caller.name, incoming.network)


def _image(incoming: Incoming) -> tuple[bytes, Received]:
    match incoming.arrived:
        case Complete(body, quality):
            return body, Received(1.0, quality)
        case Partial(body, quality, fraction, _):
            return body, Received(fraction, quality)
        case Expired():
            raise AssertionError("the transport answers these by itself")


async def _at_its_best(incoming: Incoming) -> Incoming:
    """The image once no more of it will come."""
    assert incoming.better is not None
    # Bounded here, too: the image that is there is better than none.
    until = incoming.started + MISSING_S
    if incoming.deadline is not None:
        until = max(incoming.deadline.at, incoming.started + RECEIVE_TIMEOUTS.grace_s)
    await asyncio.wait((incoming.better,), timeout=max(0.0, until - time.monotonic()))
    return incoming.better.result() if incoming.better.done() else incoming
