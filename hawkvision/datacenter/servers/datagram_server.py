"""The datacenter's server for images that arrive as datagrams: the same tier and the same replies as over HTTP.

An incomplete image runs once its fragments have arrived or can no longer arrive in time, not before: the edge escalates
because it was not confident, and an incomplete image costs the tier as much as a whole one.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from prometheus_client.registry import Collector

from hawkvision.core.errors import TooLarge
from hawkvision.core.escalation_api import (
    DatagramEndpoint,
    EscalationReply,
    EscalationRequest,
    parse_escalation_datagram,
)
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.servers.service import DATAGRAM_PATH, ObservedRequest, TierService
from hawkvision.datacenter.stages.catalog import Catalog
from hawkvision.servers.keys import INFER, Keys
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.serving import encode_reply
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

RESERVE_S: Final = 0.03
"""How long before its deadline an incomplete image runs: about what the ensemble takes."""
MAX_WAIT_S: Final = 30.0
"""The longest wait for missing fragments; the transport itself gives up after 10 s without news."""
CONFIRM_S: Final = 0.5
"""How long the last replies are repeated to callers that have not confirmed them, before connections end."""


class TierDatagramServer:
    """The tier's end of the datagram transport. Made by `open`; close it."""

    def __init__(self, tier: TierService, max_body_bytes: int, keys: Keys) -> None:
        self._tier = tier
        self._max_body_bytes = max_body_bytes
        self._keys = keys
        self._server: DatagramListener | None = None
        self.offered: OfferedEndpoint

    @classmethod
    async def open(
        cls, config: DatacenterConfig, port: int, tier: TierService, keys: Keys, bound: socket.socket | None = None
    ) -> TierDatagramServer:
        """Listen on a UDP port of `config.host`, where 0 takes a free one, or at the socket `bound`.

        Raises:
            ConfigError: if the address cannot be listened on, or certificate and key cannot be used.
        """
        server = cls(tier, config.max_body_bytes, keys)
        datagrams = config.feature(DatagramSettings)
        files = datagrams.certificate, datagrams.key
        identity = identity_for(*files)
        server._server = await DatagramListener.start(
            config.host,
            port,
            identity,
            server.answer,
            keys=keys,
            useful_side=useful_side(*tier.catalogs.values()),
            timeouts=ReceiveTimeouts(reserve_s=RESERVE_S),
            congestion=controller_class(datagrams.congestion_control),
            bound=bound,
        )
        server.offered = OfferedEndpoint(server._server, *files, identity)
        tier.metrics.watch(server)
        return server

    def collectors(self) -> Iterable[Collector]:
        """See `Instrumented`."""
        assert self._server is not None, "made by open"
        server = self._server
        return (DatagramServerCounts("hawkvision_datacenter", lambda: server.counts({})),)

    @property
    def offer(self) -> DatagramEndpoint:
        """This server in the reply to `GET /v1/transport`."""
        return self.offered.offer

    async def answer(self, incoming: Incoming) -> tuple[Status, bytes]:
        """The reply to one image.

        Raises:
            HawkVisionError: as over HTTP.
        """
        with ObservedRequest(self._tier, DATAGRAM_PATH) as observed:
            self._keys.admit(incoming.caller, INFER)
            request, trace = parse_escalation_datagram(incoming.template, incoming.meta)
            observed.use_trace(trace)
            observed.task, observed.stage = request.task, request.variant
            reply = await self._run(await _best_version(incoming), request)
            observed.status = 200
            return Status.OK, reply

    async def _run(self, incoming: Incoming, request: EscalationRequest) -> bytes:
        image = incoming.arrived
        assert not isinstance(image, Expired), "the transport answers these by itself"
        if incoming.deadline is not None:
            left_ms = incoming.deadline.remaining_ms(asyncio.get_running_loop().time())
            request = msgspec.structs.replace(request, deadline_ms=left_ms)
        admitted = self._tier.admit(request, incoming.caller.name)
        with admitted.in_flight():
            if (size := len(image.body)) > self._max_body_bytes:
                raise TooLarge(f"the image has {size} bytes; at most {self._max_body_bytes} are read")
            kind, reduced = admitted.kind, isinstance(image, Partial) or image.quality is not None
            reply = await admitted.run(
                image.body, lambda partial: incoming.send_interim(_encoded(kind, partial, image)), reduced=reduced
            )
        return _encoded(kind, reply, image)

    async def close(self, drain_s: float) -> None:
        """Answer the requests inside, for at most `drain_s`, and end all connections."""
        assert self._server is not None
        await self._server.drain(drain_s, CONFIRM_S)
        await self._server.close()


def useful_side(*catalogs: Catalog) -> int:
    """The pixels of an image's shorter side that the most demanding variant can use."""
    inputs = [variant.input for catalog in catalogs for variant in catalog.variants]
    return max(math.ceil(max(each.height, each.width) / each.crop_fraction) for each in inputs)


def _encoded(kind: TaskKind[Any], reply: EscalationReply, image: Complete | Partial) -> bytes:
    """The body of a reply to an image as it arrived."""
    fraction = image.received_fraction if isinstance(image, Partial) else 1.0
    received = msgspec.structs.replace(reply, received_fraction=fraction, quality=image.quality)
    return encode_reply(kind, received)


async def _best_version(incoming: Incoming) -> Incoming:
    """The image once no more of it can arrive in time."""
    if incoming.better is None:
        return incoming
    wait_s = MAX_WAIT_S
    if incoming.deadline is not None:
        wait_s = max(0.0, incoming.deadline.remaining_s(asyncio.get_running_loop().time()))
    await asyncio.wait((incoming.better,), timeout=wait_s)
    return incoming.better.result() if incoming.better.done() else incoming
