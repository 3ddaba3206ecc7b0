"""The datacenter's server for images that come as datagrams: the same tier, the same replies as over HTTP.

An image of which fragments are missing is looked at when they came or can no longer come in time, not before: the
edge has asked because it was not sure itself, and a look at half an image would cost the tier as much as at a whole.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Iterable
from typing import Final

import msgspec
from prometheus_client.registry import Collector

from hawkvision.core.errors import HawkVisionError, InternalError, TooLarge
from hawkvision.core.escalation_api import (
    DatagramEndpoint,
    EscalationReply,
    EscalationRequest,
    parse_escalation_datagram,
)
from hawkvision.core.logs import bind_request
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.trace import start_trace
from hawkvision.datacenter.catalog import Catalog
from hawkvision.datacenter.service import Tier
from hawkvision.servers.keys import INFER, Keys
from hawkvision.transport.coding.image_coding import Complete, Expired, Partial
from hawkvision.transport.congestion.registry import controller_class
from hawkvision.transport.endpoint.receiver import ReceiveTimeouts, Status
from hawkvision.transport.endpoint.server import DatagramListener
from hawkvision.transport.endpoint.session import Incoming
from hawkvision.transport.metrics import DatagramServerCounts
from hawkvision.transport.offer import Offered
from hawkvision.transport.protocol.identity import identity_for
from hawkvision.transport.settings import DatagramSettings

log = logging.getLogger(__name__)

PATH: Final = "datagram"
"""In the place of a path in the tier's metrics."""
RESERVE_S: Final = 0.03
"""How long before its deadline an image is looked at, whatever is still missing of it: the ensemble takes 36 ms of
processor time, spread over its members."""
PATIENCE_S: Final = 30.0
"""Longest wait for missing fragments; the transport itself gives up after 10 s without news."""
CONFIRM_S: Final = 0.5
"""How long the last answers are repeated to callers that have not confirmed them, before connections end."""
GONE: Final = 499
"""What the metrics say of a caller that is gone, as at the HTTP server."""


class DatagramServer:
    """The tier's end of the datagram transport. Made by `open`; close it."""

    def __init__(self, tier: Tier, max_body_bytes: int, keys: Keys) -> None:
        self._keys = keys
        self._tier = tier
        self._max_body_bytes = max_body_bytes
        self._server: DatagramListener | None = None
        self.offered: Offered

    @classmethod
    async def open(
        cls, config: DatacenterConfig, port: int, tier: Tier, keys: Keys, bound: socket.socket | None = None
    ) -> DatagramServer:
        """Listen on a UDP port of `config.host`; 0 takes a free one. With `bound`, at that socket.

        Raises:
            ConfigError: if the address cannot be listened on, or certificate and key cannot be used.
        """
        datagram_server = cls(tier, config.max_body_bytes, keys)
        datagrams = config.feature(DatagramSettings)
        files = datagrams.certificate, datagrams.key
        identity = identity_for(*files)
        datagram_server._server = await DatagramListener.start(
            config.host,
            port,
            identity,
            datagram_server.answer,
            keys=keys,
            takes_sent_keys=datagrams.accept_sent_keys,
            useful_side=useful_side(tier.catalog),
            timeouts=ReceiveTimeouts(reserve_s=RESERVE_S),
            congestion=controller_class(datagrams.congestion_control),
            bound=bound,
        )
        datagram_server.offered = Offered(datagram_server._server, *files, identity)
        tier.metrics.watch(datagram_server)
        return datagram_server

    def collectors(self) -> Iterable[Collector]:
        """See `Instrumented`."""
        assert self._server is not None, "made by open"
        server = self._server
        return (DatagramServerCounts("hawkvision_datacenter", lambda: server.counts({})),)

    @property
    def offer(self) -> DatagramEndpoint:
        """What `GET /v1/transport` says of this server."""
        return self.offered.offer

    async def answer(self, incoming: Incoming) -> tuple[Status, bytes]:
        """The reply to one image.

        Raises:
            HawkVisionError: as over HTTP.
        """
        started = time.perf_counter()
        variant, status = None, GONE
        try:
            self._keys.admit(incoming.caller, INFER)
            asked, trace = parse_escalation_datagram(incoming.template, incoming.meta)
            bind_request(None, trace or start_trace())
            variant = asked.variant
            best = await _at_its_best(incoming)
            reply = await self._look(best, asked)
            status = 200
            return Status.OK, reply
        except HawkVisionError as error:
            status = error.status
            raise
        except Exception:  # process boundary: one image's defect must not reach the next
            status = InternalError.status
            log.exception("unexpected failure")
            raise InternalError("internal error; the datacenter's log has the details") from None
        finally:
            self._tier.count(PATH, variant, status, time.perf_counter() - started)

    async def _look(self, incoming: Incoming, asked: EscalationRequest) -> bytes:
        arrived = incoming.arrived
        assert not isinstance(arrived, Expired), "the transport answers these by itself"
        if incoming.deadline is not None:
            left_ms = incoming.deadline.remaining_ms(asyncio.get_running_loop().time())
            asked = msgspec.structs.replace(asked, deadline_ms=left_ms)
        with self._tier.admit(asked) as visit:
            if len(arrived.body) > self._max_body_bytes:
                raise TooLarge(f"the image has {len(arrived.body)} bytes; at most {self._max_body_bytes} are read")
            reply = await visit.look(arrived.body, lambda so_far: incoming.say(_encoded(so_far, arrived)))
        return _encoded(reply, arrived)

    async def close(self, drain_s: float) -> None:
        """Answer what is inside, at most so long, and end all connections."""
        assert self._server is not None
        await self._server.drain(drain_s, CONFIRM_S)
        await self._server.close()


def useful_side(catalog: Catalog) -> int:
    """Pixels of the shorter side of which the most demanding variant makes use."""
    return max(math.ceil(max(v.input.height, v.input.width) / v.input.crop_fraction) for v in catalog.variants)


def _encoded(reply: EscalationReply, arrived: Complete | Partial) -> bytes:
    """The body of a reply to what arrived of an image."""
    fraction = arrived.received_fraction if isinstance(arrived, Partial) else 1.0
    return msgspec.json.encode(msgspec.structs.replace(reply, received_fraction=fraction, quality=arrived.quality))


async def _at_its_best(incoming: Incoming) -> Incoming:
    """The image once no more of it will come."""
    if incoming.better is None:
        return incoming
    # Bounded by us, too: the image that is here is better than none.
    patience_s = PATIENCE_S
    if incoming.deadline is not None:
        patience_s = max(0.0, incoming.deadline.remaining_s(asyncio.get_running_loop().time()))
    await asyncio.wait((incoming.better,), timeout=patience_s)
    return incoming.better.result() if incoming.better.done() else incoming
