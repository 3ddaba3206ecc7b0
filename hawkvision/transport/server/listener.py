"""The server of the datagram transport: one UDP port, and the admission of clients.

    datagram ─► Demultiplexer ─┬─ sealed ─► its `Session`, if there is one
                               └─ QUIC ──► ServerProtocol ── Hello ─► a `Session`          (`server_quic`)

All decisions are in `endpoint.channel`, `receiver` and `response_delivery`, which know neither sockets nor clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from aioquic.quic.connection import QuicConnection

from hawkvision.core.errors import ConfigError
from hawkvision.servers.keys import Caller, Keys
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.endpoint.quic import server_configuration
from hawkvision.transport.endpoint.udp import bind
from hawkvision.transport.protocol.control import (
    CloseCode,
)
from hawkvision.transport.protocol.server_certificate import Identity
from hawkvision.transport.protocol.wire import Drop
from hawkvision.transport.server.assembly import STRICT, Budget, ReceiveTimeouts
from hawkvision.transport.server.metrics import DatagramCounts
from hawkvision.transport.server.server_quic import MAX_SESSIONS, REASONS, Demultiplexer, ServerProtocol
from hawkvision.transport.server.session import Handler, Session

MAX_HALF_OPEN: Final = 256
"""QUIC connections before their hello; more are refused, so that a flood does not harm open sessions."""
MAX_HALF_OPEN_EACH: Final = 32
"""Of those, from one address or one /64 of IPv6, which Retry has validated: one host must not keep all others out."""
TOTAL_BYTES: Final = 128 * 1024 * 1024
"""Of unfinished images, all sessions together."""


class DatagramListener:
    """Listens for images. Made by `start`; close it."""

    def __init__(
        self,
        handler: Handler,
        *,
        keys: Keys,
        useful_side: int,
        timeouts: ReceiveTimeouts,
        congestion: CongestionFactory,
    ) -> None:
        self.handler = handler
        self.keys = keys
        self.useful_side = useful_side
        self.timeouts = timeouts
        self.congestion = congestion
        self.budget = Budget(TOTAL_BYTES)
        self.sessions: dict[int, Session] = {}
        self.received_bytes = self.sent_bytes = 0
        """Of UDP payloads: QUIC included, and sealed datagrams."""
        self.drops = Counter[Drop]()
        """Dropped datagrams without a session, and those of ended sessions."""
        self.refused_callers: dict[str, int] = dict.fromkeys(REASONS.values(), 0)
        self.changed = asyncio.Event()
        """Set whenever a session did something; `drain` waits for it."""
        self._protocols: set[ServerProtocol] = set()
        self._half_open: Counter[str] = Counter()
        """QUIC connections before their hello, by network."""
        self._endpoint: Demultiplexer | None = None
        self.transport: asyncio.DatagramTransport

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        identity: Identity,
        handler: Handler,
        *,
        keys: Keys | None = None,
        useful_side: int = 256,
        timeouts: ReceiveTimeouts = STRICT,
        congestion: CongestionFactory = LossTolerant,
        bound: socket.socket | None = None,
    ) -> DatagramListener:
        """Listen on a UDP port, where 0 takes a free one.

        Args:
            host: the address to bind.
            port: the UDP port.
            bound: a socket from `udp.bind`, instead of `host` and `port`.
            identity: the certificate and its key.
            handler: responds to images; its errors (`HawkVisionError`) reach the caller.
            keys: each client needs one with the scope `infer`; None asks for none. The handler checks rates.
            useful_side: the pixels of the shorter side that models can use; clients scale images to it.
            timeouts: how long images with a deadline may take to arrive.
            congestion: makes each path's congestion controller.

        Raises:
            ConfigError: if the address cannot be bound.
        """
        server = cls(
            handler,
            keys=keys or Keys(),
            useful_side=useful_side,
            timeouts=timeouts,
            congestion=congestion,
        )
        configuration = server_configuration(identity)
        loop = asyncio.get_running_loop()

        def endpoint() -> Demultiplexer:
            made: Demultiplexer = Demultiplexer(
                configuration=configuration,
                create_protocol=lambda quic, **_: server.connect(quic, made.network),
                retry=True,
            )
            made.server = server
            return made

        try:
            transport, protocol = await loop.create_datagram_endpoint(endpoint, sock=bound or bind(host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on UDP {host}:{port}: {error.strerror or error}") from None
        server.transport, server._endpoint = transport, protocol
        return server

    def renew(self, identity: Identity) -> None:
        """Show another certificate to new clients; open connections go on."""
        assert self._endpoint is not None, "made by start"
        self._endpoint._configuration = server_configuration(identity)

    @property
    def port(self) -> int:
        """The UDP port."""
        return int(self.transport.get_extra_info("sockname")[1])

    @property
    def half_open(self) -> int:
        """QUIC connections without a session."""
        return len(self._protocols) - len(self.sessions)

    def is_full(self, network: str) -> bool:
        """Whether a network must wait until earlier connections have said hello."""
        return self.half_open >= MAX_HALF_OPEN or self._half_open[network] >= MAX_HALF_OPEN_EACH

    def connect(self, quic: QuicConnection, network: str) -> ServerProtocol:
        """The protocol of a new QUIC connection."""
        protocol = ServerProtocol(quic, self, network)
        self._protocols.add(protocol)
        self._half_open[network] += 1
        closed = asyncio.ensure_future(protocol.wait_closed())
        closed.add_done_callback(lambda _: self._gone(protocol))
        return protocol

    def _gone(self, protocol: ServerProtocol) -> None:
        self._protocols.discard(protocol)
        self._on_hello(protocol)

    def _on_hello(self, protocol: ServerProtocol) -> None:
        """Count a connection as half open no longer."""
        if protocol.half_open:
            protocol.half_open = False
            self._half_open[protocol.network] -= 1
            self._half_open += Counter()  # drops networks with a count of zero

    def open(self, protocol: ServerProtocol, caller: Caller) -> Session | None:
        """A session for a client that has said hello; None if there are too many."""
        if len(self.sessions) >= MAX_SESSIONS:
            return None
        number = int.from_bytes(os.urandom(4))
        while number in self.sessions:
            number = int.from_bytes(os.urandom(4))
        session = self.sessions[number] = Session(self, number, protocol, caller, protocol.network)
        self._on_hello(protocol)
        return session

    @property
    def idle(self) -> bool:
        """Whether no image is in progress and each response has reached its client."""
        return all(session.receiver.idle for session in self.sessions.values())

    async def drain(self, limit_s: float, confirm_s: float) -> None:
        """Wait until handlers have finished and their responses have arrived.

        Args:
            limit_s: the longest wait in all.
            confirm_s: the part of it after handlers have finished; a gone client never confirms.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._until(lambda: not any(session.answering for session in self.sessions.values()))
                async with asyncio.timeout(confirm_s):
                    await self._until(lambda: self.idle)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def dropped(self) -> Counter[Drop]:
        """All dropped datagrams so far, by reason."""
        drops = Counter(dict.fromkeys(Drop, 0))
        drops.update(self.drops)
        for session in self.sessions.values():
            drops.update(session.receiver.channel.drops)
        return drops

    def counts(self, outcomes: Mapping[str, int]) -> DatagramCounts:
        """For metrics: the `outcomes` of the handler's images, and the transport's own refusals."""
        return DatagramCounts(
            {**outcomes, **{status.name.lower(): n for status, n in self.budget.refused.items()}},
            len(self.sessions),
            {str(reason): n for reason, n in self.dropped().items()},
            self.refused_callers,
            self.received_bytes,
            self.sent_bytes,
        )

    def forget(self, session: Session) -> None:
        """End the session of a client that is gone."""
        if self.sessions.pop(session.number, None) is not None:
            self.drops.update(session.receiver.channel.drops)
        session.close()
        self.changed.set()

    async def close(self) -> None:
        """Close all connections."""
        for protocol in list(self._protocols):
            protocol.close(CloseCode.GOING_AWAY, "the server stops")
        for session in list(self.sessions.values()):
            self.forget(session)
        self.transport.close()
        await asyncio.sleep(0)
