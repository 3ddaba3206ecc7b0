"""The server of the lossy transport: one UDP port, and who gets in by it.

    datagram ─► _Demultiplexer ─┬─ sealed ─► its `Session`, if there is one
                                └─ QUIC ──► _ServerProtocol ── Hello ─► version, key, room ─► a `Session`

Everything that decides is in `channel`, `receiver` and `response_delivery`, which know neither sockets nor clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from aioquic.asyncio.server import QuicServer
from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # its stub does not re-export it
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, QuicEvent, StreamDataReceived
from aioquic.quic.packet import QuicPacketType, pull_quic_header

from hawkvision.errors import ConfigError
from hawkvision.servers.keys import INFER, Caller, Keys
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.endpoint.quic import ControlProtocol, server_configuration
from hawkvision.transport.endpoint.receiver import STRICT, Budget, ReceiveTimeouts
from hawkvision.transport.endpoint.session import Handler, Session
from hawkvision.transport.endpoint.udp import bind
from hawkvision.transport.metrics import LossyCounts
from hawkvision.transport.protocol.control import (
    MAX_HELLO,
    MAX_MESSAGE,
    SENT_KEY_VERSION,
    VERSION,
    CloseCode,
    Hello,
    Message,
    Tables,
    Template,
    Welcome,
)
from hawkvision.transport.protocol.exporter import KEY_PROOF
from hawkvision.transport.protocol.handshake_limits import HandshakeLimits
from hawkvision.transport.protocol.identity import Identity
from hawkvision.transport.protocol.packet_protection import is_sealed, peek
from hawkvision.transport.protocol.wire import Drop, WireError

MAX_SESSIONS: Final = 1024
MAX_HALF_OPEN: Final = 256
"""QUIC connections that have not said hello yet; more are refused, so that a flood costs those inside nothing."""
MAX_HALF_OPEN_EACH: Final = 32
"""Of those, from one address, or one /64 of IPv6: Retry has shown that it is theirs, and one must not keep all out."""
HELLO_TIMEOUT_S: Final = 5.0
SMALLEST_INITIAL: Final = 1200
"""Bytes of a datagram that begins a connection (RFC 9000 §14.1)."""
SHORTEST_QUIC: Final = 21
"""Bytes of a packet (RFC 9000 §10.3, RFC 9001 §5.4.2)."""
REASONS: Final = {
    CloseCode.PROTOCOL: "protocol",
    CloseCode.UNAUTHORIZED: "unauthorized",
    CloseCode.VERSION: "version",
    CloseCode.TOO_MANY: "too_many",
}
"""What metrics call the refusal of a caller."""
LONG_HEADER: Final = 0x80
FIXED_BIT: Final = 0x40
TOTAL_BYTES: Final = 128 * 1024 * 1024
"""Unfinished pictures of all sessions."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a server has received and sent so far; bytes of UDP payloads."""

    received_bytes: int
    """QUIC's included."""
    sent_bytes: int
    """Sealed datagrams."""
    drops: Mapping[Drop, int]
    """Datagrams that were of no use, by why."""


class _ServerProtocol(ControlProtocol):
    """The QUIC connection of one client: hello, templates, and answers that datagrams could not deliver."""

    def __init__(self, quic: QuicConnection, server: LossyServer, network: str) -> None:
        super().__init__(quic)
        self._reader.most = MAX_HELLO
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
                self._ended()

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        """A client that says goodbye takes its session along; QUIC itself listens for three timeouts more."""
        super().datagram_received(data, addr)
        if self._quic._close_event is not None:  # aioquic tells of it at the end of those
            self._ended()

    def _ended(self) -> None:
        self._hello.cancel()
        if self.session is not None:
            self._server.forget(self.session)
            self.session = None

    def _refuse(self, code: int, why: str) -> None:
        self._refused = True
        if self.session is None:
            self._server.refused_callers[REASONS[code]] += 1
        self.close(code, why)

    def _take(self, message: Message) -> None:
        match message, self.session:
            case Hello() as hello, None:
                self._welcome(hello)
            case Template(number, request), Session() as session:
                session.receiver.register_template(number, request)
                session.schedule_flush()
            case Tables(number, header), Session() as session:
                session.receiver.register_tables(number, header)
                session.schedule_flush()
            case _:
                raise WireError(f"a {type(message).__name__} message is out of place here")

    def _welcome(self, hello: Hello) -> None:
        keys = self._server.keys
        if hello.version == VERSION:
            caller = keys.by_proof(hello.proof or b"", self.exporter.export(KEY_PROOF))
        elif hello.version == SENT_KEY_VERSION and (self._server.takes_sent_keys or not keys.required):
            caller = keys.identify(None if hello.api_key is None else hello.api_key.encode())
        else:
            self._refuse(CloseCode.VERSION, _version_refusal(hello.version))
            return
        if caller is None:
            keys.refused()  # counted
            self._refuse(CloseCode.UNAUTHORIZED, "missing or wrong API key")
            return
        if not caller.scopes & INFER:
            self._refuse(CloseCode.UNAUTHORIZED, f"the API key {caller.name!r} lacks the scope 'infer'")
            return
        session = self._server.open(self, caller)
        if session is None:
            self._refuse(CloseCode.TOO_MANY, f"{MAX_SESSIONS} sessions are open")
            return
        self._hello.cancel()
        self._reader.most = MAX_MESSAGE
        self.session = session
        client, server = session.secrets
        self.send_message(
            Welcome(session.number, client.key + client.iv, server.key + server.iv, self._server.useful_side)
        )


def _version_refusal(version: int) -> str:
    if version != SENT_KEY_VERSION:
        return f"this end speaks version {VERSION}, not {version}"
    return (
        f"version {version} sends the API key itself to whoever answers; expected version {VERSION}: "
        "the client needs an update, or this end lossy_accept_sent_keys meanwhile"
    )


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

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._handshakes = HandshakeLimits(self._loop.time())

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        """Route one datagram; what cannot be is dropped and counted, for its sender may be forged."""
        assert isinstance(data, bytes)
        self.lossy.received_bytes += len(data)
        if not is_sealed(data):
            drop = self._stranger(data, addr)
            if drop is None:
                super().datagram_received(data, addr)
            else:
                self.lossy.drops[drop] += 1
            return
        try:
            header = peek(data)
        except WireError:
            self.lossy.drops[Drop.MALFORMED] += 1
            return
        session = self.lossy.sessions.get(header.session)
        if session is None:
            self.lossy.drops[Drop.NO_SESSION] += 1
        else:
            session.datagram(header, data, addr)

    def _stranger(self, data: bytes, addr: Any) -> Drop | None:
        """Why QUIC is not given a datagram; None for those of its connections, and of whoever may begin one."""
        if len(data) < SHORTEST_QUIC or not data[0] & FIXED_BIT:
            return Drop.MALFORMED
        long = bool(data[0] & LONG_HEADER)
        # Long headers carry connection ids with their length; short ones have ours, which are of one length.
        length = data[5] if long else self._configuration.connection_id_length
        begin = 6 if long else 1
        if data[begin : begin + length] in self._protocols:
            return None
        if not long:
            return Drop.NO_CONNECTION
        try:
            header = pull_quic_header(Buffer(data=data))
        except ValueError:  # a buffer that ends too soon is one as well
            return Drop.MALFORMED
        if not header.version:  # an answer to a version of ours that was none; we ask nothing
            return Drop.MALFORMED
        known = header.version in self._configuration.supported_versions
        if known and header.packet_type != QuicPacketType.INITIAL:
            return Drop.NO_CONNECTION
        if len(data) < SMALLEST_INITIAL:  # no answer may be larger than what asks for it (RFC 9000 §14.1, §6.1)
            return Drop.MALFORMED
        now = self._loop.time()
        if known and header.token:
            assert self._retry is not None, "tokens are what was asked for"
            try:
                self._retry.validate_token(
                    address=addr, destination_cid=header.destination_cid, token=header.token, now=now
                )
            except ValueError:
                self.lossy.drops[Drop.BAD_TOKEN] += 1  # which QUIC says to him, lest he wait
                return None if self._handshakes.may_retry(now) else Drop.CROWDED
            self.network = network_of(addr[0])
            may = not self.lossy.is_full(self.network) and self._handshakes.may_begin(self.network, now)
        else:
            may = self._handshakes.may_retry(now)
        return None if may else Drop.CROWDED


class LossyServer:
    """Listens for pictures. Made by `start`; close it."""

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
        keys: Keys | None = None,
        takes_sent_keys: bool = False,
        useful_side: int = 256,
        timeouts: ReceiveTimeouts = STRICT,
        congestion: CongestionFactory = LossTolerant,
        bound: socket.socket | None = None,
    ) -> LossyServer:
        """Listen on a UDP port; 0 takes a free one.

        Args:
            host: address to bind.
            port: UDP port.
            bound: a socket that is bound already (`udp.bind`), in place of one for `host` and `port`.
            identity: the certificate.
            handler: answers pictures; its errors (`HawkVisionError`) become the caller's.
            keys: of which every client must have one that may infer; None asks for none. Who `handler` admits, it says.
            takes_sent_keys: also let in clients of version 1, which send the key itself.
            useful_side: told to clients.
            patience: how long pictures with a deadline are let come in.
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

        def endpoint() -> _Demultiplexer:
            made: _Demultiplexer = _Demultiplexer(
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
        self._on_hello(protocol)

    def _on_hello(self, protocol: _ServerProtocol) -> None:
        """It is half open no more."""
        if protocol.half_open:
            protocol.half_open = False
            self._half_open[protocol.network] -= 1
            self._half_open += Counter()  # without those that have none

    def open(self, protocol: _ServerProtocol, caller: Caller) -> Session | None:
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
        drops = Counter(dict.fromkeys(Drop, 0))
        drops.update(self.drops)
        for session in self.sessions.values():
            drops.update(session.receiver.channel.drops)
        return Traffic(self.received_bytes, self.sent_bytes, drops)

    def counts(self, outcomes: Mapping[str, int]) -> LossyCounts:
        """For metrics; to the `outcomes` of pictures that the handler has had, the transport adds its refusals."""
        traffic = self.traffic()
        return LossyCounts(
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
