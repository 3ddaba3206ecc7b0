"""The server of the datagram transport: one UDP port, and who gets in by it.

    datagram ─► Demultiplexer ─┬─ sealed ─► its `Session`, if there is one
                               └─ QUIC ──► ServerProtocol ── Hello ─► a `Session`          (`server_quic`)

Everything that decides is in `channel`, `receiver` and `response_delivery`, which know neither sockets nor clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
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
from hawkvision.transport.protocol.identity import Identity
from hawkvision.transport.protocol.wire import Drop
from hawkvision.transport.server.metrics import DatagramCounts
from hawkvision.transport.server.receiver import STRICT, Budget, ReceiveTimeouts
from hawkvision.transport.server.server_quic import MAX_SESSIONS, REASONS, Demultiplexer, ServerProtocol
from hawkvision.transport.server.session import Handler, Session

MAX_HALF_OPEN: Final = 256
"""QUIC connections that have not said hello yet; more are refused, so that a flood costs those inside nothing."""
MAX_HALF_OPEN_EACH: Final = 32
"""Of those, from one address, or one /64 of IPv6: Retry has shown that it is theirs, and one must not keep all out."""
TOTAL_BYTES: Final = 128 * 1024 * 1024
"""Unfinished images of all sessions."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a server has received and sent so far; bytes of UDP payloads."""

    received_bytes: int
    """QUIC's included."""
    sent_bytes: int
    """Sealed datagrams."""
    drops: Mapping[Drop, int]
    """Datagrams that were of no use, by why."""


class DatagramListener:
    """Listens for images. Made by `start`; close it."""

    def __init__(
        self,
        handler: Handler,
        *,
        keys: Keys,
        takes_sent_keys: bool,
        useful_side: int,
        timeouts: ReceiveTimeouts,
        congestion: CongestionFactory,
    ) -> None:
        self.handler = handler
        self.keys = keys
        self.takes_sent_keys = takes_sent_keys
        self.useful_side = useful_side
        self.timeouts = timeouts
        self.congestion = congestion
        self.budget = Budget(TOTAL_BYTES)
        self.sessions: dict[int, Session] = {}
        self.received_bytes = self.sent_bytes = 0
        self.drops = Counter[Drop]()
        """Datagrams that were nobody's, and those of sessions that are over."""
        self.refused_callers: dict[str, int] = dict.fromkeys(REASONS.values(), 0)
        self.stirred = asyncio.Event()
        """Set by every session that did something: what `drain` waits for."""
        self._protocols: set[ServerProtocol] = set()
        self._half_open: Counter[str] = Counter()
        """QUIC connections that have not said hello, by where they come from."""
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
        takes_sent_keys: bool = False,
        useful_side: int = 256,
        timeouts: ReceiveTimeouts = STRICT,
        congestion: CongestionFactory = LossTolerant,
        bound: socket.socket | None = None,
    ) -> DatagramListener:
        """Listen on a UDP port; 0 takes a free one.

        Args:
            host: address to bind.
            port: UDP port.
            bound: a socket that is bound already (`udp.bind`), in place of one for `host` and `port`.
            identity: the certificate.
            handler: answers images; its errors (`HawkVisionError`) become the caller's.
            keys: of which every client must have one that may infer; None asks for none. Who `handler` admits, it says.
            takes_sent_keys: also let in clients of version 1, which send the key itself.
            useful_side: told to clients.
            patience: how long images with a deadline are let come in.
            congestion: makes each path's congestion controller.

        Raises:
            ConfigError: if the address cannot be bound.
        """
        server = cls(
            handler,
            keys=keys or Keys(),
            takes_sent_keys=takes_sent_keys,
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
        """Show another certificate from now on; connections that are open go on."""
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
        """Whether nobody else from there may connect before others have said hello."""
        return self.half_open >= MAX_HALF_OPEN or self._half_open[network] >= MAX_HALF_OPEN_EACH

    def connect(self, quic: QuicConnection, network: str) -> ServerProtocol:
        """A new QUIC connection, not heard yet."""
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
        """It is half open no more."""
        if protocol.half_open:
            protocol.half_open = False
            self._half_open[protocol.network] -= 1
            self._half_open += Counter()  # without those that have none

    def open(self, protocol: ServerProtocol, caller: Caller) -> Session | None:
        """A session for a client that said hello; None if there are too many."""
        if len(self.sessions) >= MAX_SESSIONS:
            return None
        number = int.from_bytes(os.urandom(4))
        while number in self.sessions:
            number = int.from_bytes(os.urandom(4))
        session = self.sessions[number] = Session(self, number, protocol, caller, monotonic(), protocol.network)
        self._on_hello(protocol)
        return session

    @property
    def decided(self) -> bool:
        """Whether no image is under way, and every answer has reached its client."""
        return all(session.receiver.decided for session in self.sessions.values())

    async def drain(self, limit_s: float, confirm_s: float) -> None:
        """Wait until handlers have answered and their answers have arrived.

        Args:
            limit_s: for all of it.
            confirm_s: how much of that may go by once handlers are done: a client that is gone confirms nothing.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._until(lambda: not any(session.answering for session in self.sessions.values()))
                async with asyncio.timeout(confirm_s):
                    await self._until(lambda: self.decided)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.stirred.clear()
            await self.stirred.wait()

    def traffic(self) -> Traffic:
        """What came and went so far."""
        drops = Counter(dict.fromkeys(Drop, 0))
        drops.update(self.drops)
        for session in self.sessions.values():
            drops.update(session.receiver.channel.drops)
        return Traffic(self.received_bytes, self.sent_bytes, drops)

    def counts(self, outcomes: Mapping[str, int]) -> DatagramCounts:
        """For metrics; to the `outcomes` of images that the handler has had, the transport adds its refusals."""
        traffic = self.traffic()
        return DatagramCounts(
            {**outcomes, **{status.name.lower(): n for status, n in self.budget.refused.items()}},
            len(self.sessions),
            {str(why): n for why, n in traffic.drops.items()},
            self.refused_callers,
            traffic.received_bytes,
            traffic.sent_bytes,
        )

    def forget(self, session: Session) -> None:
        """The client is gone."""
        if self.sessions.pop(session.number, None) is not None:
            self.drops.update(session.receiver.channel.drops)
        session.close()
        self.stirred.set()

    async def close(self) -> None:
        """Close all connections."""
        for protocol in list(self._protocols):
            protocol.close(CloseCode.GOING_AWAY, "the server stops")
        for session in list(self.sessions.values()):
            self.forget(session)
        self.transport.close()
        await asyncio.sleep(0)
