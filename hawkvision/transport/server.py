"""The server of the lossy transport: one UDP port, and who gets in by it.

    datagram ─► _Demultiplexer ─┬─ sealed ─► its `Session`, if there is one
                                └─ QUIC ──► _ServerProtocol ── Hello ─► version, API key, room ─► a `Session`

Everything that decides is in `channel`, `receiver` and `answering`, which know neither sockets nor clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from aioquic.asyncio.server import QuicServer
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, QuicEvent, StreamDataReceived

from hawkvision.errors import ConfigError
from hawkvision.transport.control import VERSION, CloseCode, Hello, Message, Tables, Template, Welcome
from hawkvision.transport.identity import Identity
from hawkvision.transport.quic import ControlProtocol, server_configuration
from hawkvision.transport.receiver import STRICT, Budget, Patience, Status
from hawkvision.transport.seal import is_sealed, peek
from hawkvision.transport.session import Handler, Session
from hawkvision.transport.udp import bind
from hawkvision.transport.wire import WireError

MAX_SESSIONS: Final = 1024
MAX_HALF_OPEN: Final = 256
"""QUIC connections that have not said hello yet; more are refused, so that a flood costs those inside nothing."""
MAX_HALF_OPEN_EACH: Final = 32
"""Of those, from one address, or one /64 of IPv6: Retry has shown that it is theirs, and one must not keep all out."""
HELLO_TIMEOUT_S: Final = 5.0
TOTAL_BYTES: Final = 128 * 1024 * 1024
"""Unfinished pictures of all sessions."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a server has received and sent so far; bytes of UDP payloads."""

    received_bytes: int
    """QUIC's included."""
    sent_bytes: int
    """Sealed datagrams."""
    dropped: int
    """Datagrams that were no session's, forged, damaged, replayed or malformed."""


class _ServerProtocol(ControlProtocol):
    """The QUIC connection of one client: hello, templates, and answers that datagrams could not deliver."""

    def __init__(self, quic: QuicConnection, server: LossyServer, network: str) -> None:
        super().__init__(quic)
        self._server = server
        self.network = network
        """Where it comes from, see `network_of`."""
        self.session: Session | None = None
        self.half_open = True
        self._refused = False
        self._hello = asyncio.get_running_loop().call_later(
            HELLO_TIMEOUT_S, self._refuse, CloseCode.PROTOCOL, "no hello came"
        )

    def quic_event_received(self, event: QuicEvent) -> None:
        """Only the control stream and the end are of interest."""
        match event:
            case StreamDataReceived(data=data, stream_id=0):
                try:
                    for message in self._reader.feed(data):
                        if self._refused:  # a second key in the same breath is no second try
                            return
                        self._take(message)
                except WireError as error:
                    self._refuse(CloseCode.PROTOCOL, str(error)[:200])
            case ConnectionTerminated():
                self._hello.cancel()
                if self.session is not None:
                    self._server.forget(self.session)
                    self.session = None

    def _refuse(self, code: int, why: str) -> None:
        self._refused = True
        self.close(code, why)

    def _take(self, message: Message) -> None:
        match message, self.session:
            case Hello(version, api_key), None:
                self._welcome(version, api_key)
            case Template(number, request), Session() as session:
                session.receiver.register_template(number, request)
                session.soon()
            case Tables(number, header), Session() as session:
                session.receiver.register_tables(number, header)
                session.soon()
            case _:
                raise WireError(f"a {type(message).__name__} message is out of place here")

    def _welcome(self, version: int, api_key: str | None) -> None:
        if version != VERSION:
            self._refuse(CloseCode.VERSION, f"this end speaks version {VERSION}")
            return
        expected = self._server.api_key
        if expected is not None and not hmac.compare_digest((api_key or "").encode(), expected.encode()):
            self._refuse(CloseCode.UNAUTHORIZED, "missing or wrong API key")
            return
        session = self._server.open(self)
        if session is None:
            self._refuse(CloseCode.TOO_MANY, f"{MAX_SESSIONS} sessions are open")
            return
        self._hello.cancel()
        self.session = session
        client, server = session.secrets
        self.tell(Welcome(session.number, client.key + client.iv, server.key + server.iv, self._server.useful_side))


def network_of(address: str) -> str:
    """Whose an address is, as far as it tells: a host's of IPv4, and of IPv6 the /64 that hosts are given."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(ip), 64), strict=False))
        ip = ip.ipv4_mapped
    return str(ip)


class _Demultiplexer(QuicServer):
    """Gives sealed datagrams to their sessions and all others to QUIC."""

    lossy: LossyServer
    network = ""
    """Where the datagram comes from that is being taken in."""

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        """Route one datagram; what cannot be is dropped, for its sender may be forged."""
        assert isinstance(data, bytes)
        self.lossy.received_bytes += len(data)
        if not is_sealed(data):
            # Long headers carry connection ids with their length. Those half open already may finish.
            long = len(data) > 5 and data[0] & 0x80
            if long and data[6 : 6 + data[5]] not in self._protocols:
                self.network = network_of(addr[0])
                if self.lossy.is_full(self.network):
                    return
            super().datagram_received(data, addr)
            return
        try:
            header = peek(data)
        except WireError:
            self.lossy.dropped += 1
            return
        session = self.lossy.sessions.get(header.session)
        if session is None:
            self.lossy.dropped += 1
        else:
            session.datagram(header, data, addr)


class LossyServer:
    """Listens for pictures. Made by `start`; close it."""

    def __init__(self, handler: Handler, *, api_key: str | None, useful_side: int, patience: Patience) -> None:
        self.handler = handler
        self.api_key = api_key
        self.useful_side = useful_side
        self.patience = patience
        self.budget = Budget(TOTAL_BYTES)
        self.sessions: dict[int, Session] = {}
        self.received_bytes = self.sent_bytes = self.dropped = 0
        self.stirred = asyncio.Event()
        """Set by every session that did something: what `drain` waits for."""
        self._protocols: set[_ServerProtocol] = set()
        self._half_open: Counter[str] = Counter()
        """QUIC connections that have not said hello, by where they come from."""
        self._endpoint: _Demultiplexer | None = None
        self.transport: asyncio.DatagramTransport

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        identity: Identity,
        handler: Handler,
        *,
        api_key: str | None = None,
        useful_side: int = 256,
        patience: Patience = STRICT,
        bound: socket.socket | None = None,
    ) -> LossyServer:
        """Listen on a UDP port; 0 takes a free one.

        Args:
            host: address to bind.
            port: UDP port.
            bound: a socket that is bound already (`udp.bind`), in place of one for `host` and `port`.
            identity: the certificate.
            handler: answers pictures; its errors (`HawkVisionError`) become the caller's.
            api_key: asked of every client, if given.
            useful_side: told to clients.
            patience: how long pictures with a deadline are let come in.

        Raises:
            ConfigError: if the address cannot be bound.
        """
        server = cls(handler, api_key=api_key, useful_side=useful_side, patience=patience)
        configuration = server_configuration(identity)
        loop = asyncio.get_running_loop()

        def endpoint() -> _Demultiplexer:
            made = _Demultiplexer(
                configuration=configuration,
                create_protocol=lambda quic, **_: server.connect(quic, made.network),
                retry=True,
            )
            made.lossy = server
            return made

        try:
            transport, protocol = await loop.create_datagram_endpoint(endpoint, sock=bound or bind(host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on UDP {host}:{port}: {error.strerror or error}") from None
        server.transport, server._endpoint = transport, protocol
        return server

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

    def connect(self, quic: QuicConnection, network: str) -> _ServerProtocol:
        """A new QUIC connection, not heard yet."""
        protocol = _ServerProtocol(quic, self, network)
        self._protocols.add(protocol)
        self._half_open[network] += 1
        closed = asyncio.ensure_future(protocol.wait_closed())
        closed.add_done_callback(lambda _: self._gone(protocol))
        return protocol

    def _gone(self, protocol: _ServerProtocol) -> None:
        self._protocols.discard(protocol)
        self._heard(protocol)

    def _heard(self, protocol: _ServerProtocol) -> None:
        """It is half open no more."""
        if protocol.half_open:
            protocol.half_open = False
            self._half_open[protocol.network] -= 1
            self._half_open += Counter()  # without those that have none

    def open(self, protocol: _ServerProtocol) -> Session | None:
        """A session for a client that said hello; None if there are too many."""
        if len(self.sessions) >= MAX_SESSIONS:
            return None
        number = int.from_bytes(os.urandom(4))
        while number in self.sessions:
            number = int.from_bytes(os.urandom(4))
        session = self.sessions[number] = Session(self, number, protocol, monotonic())
        self._heard(protocol)
        return session

    @property
    def refused(self) -> Mapping[Status, int]:
        """Pictures that the transport itself refused, by why."""
        return self.budget.refused

    @property
    def settled(self) -> bool:
        """Whether no picture is under way, and every answer has reached its client."""
        return all(session.receiver.settled for session in self.sessions.values())

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
                    await self._until(lambda: self.settled)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.stirred.clear()
            await self.stirred.wait()

    def traffic(self) -> Traffic:
        """What came and went so far."""
        dropped = self.dropped + sum(session.receiver.channel.dropped for session in self.sessions.values())
        return Traffic(self.received_bytes, self.sent_bytes, dropped)

    def forget(self, session: Session) -> None:
        """The client is gone."""
        if self.sessions.pop(session.number, None) is not None:
            self.dropped += session.receiver.channel.dropped
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
