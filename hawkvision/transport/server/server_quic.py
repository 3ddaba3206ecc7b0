"""QUIC at the server's port: which datagrams belong to it, and how a client gets a session.

datagram ─► Demultiplexer ─┬─ sealed ─► its `Session`, if there is one
└─ QUIC ──► ServerProtocol ── Hello ─► version, key, room ─► a `Session`
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final, Protocol

from aioquic.asyncio.server import QuicServer
from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # its stub does not re-export it
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, QuicEvent, StreamDataReceived
from aioquic.quic.packet import QuicPacketType, pull_quic_header

from hawkvision.servers.keys import INFER, Caller, Keys
from hawkvision.transport.endpoint.quic import ControlProtocol
from hawkvision.transport.protocol.control import (
    MAX_HELLO,
    MAX_MESSAGE,
    VERSION,
    CloseCode,
    Hello,
    Message,
    Tables,
    Template,
    Welcome,
)
from hawkvision.transport.protocol.exporter import KEY_PROOF
from hawkvision.transport.protocol.handshake_limits import HandshakeLimits, network_of
from hawkvision.transport.protocol.packet_protection import is_sealed, peek
from hawkvision.transport.protocol.wire import Drop, WireError
from hawkvision.transport.server.session import Session

HELLO_TIMEOUT_S: Final = 5.0
SMALLEST_INITIAL: Final = 1200
"""The least bytes of a datagram that opens a connection (RFC 9000 §14.1)."""
SHORTEST_QUIC: Final = 21
"""The least bytes of a packet (RFC 9000 §10.3, RFC 9001 §5.4.2)."""
REASONS: Final = {
    CloseCode.PROTOCOL: "protocol",
    CloseCode.UNAUTHORIZED: "unauthorized",
    CloseCode.VERSION: "version",
    CloseCode.TOO_MANY: "too_many",
}
"""The metrics' labels of refusals."""
LONG_HEADER: Final = 0x80
FIXED_BIT: Final = 0x40
MAX_SESSIONS: Final = 1024


class HandshakeHost(Protocol):
    """What the handshake needs of its server."""

    keys: Keys
    useful_side: int
    sessions: dict[int, Session]
    received_bytes: int
    drops: Counter[Drop]
    refused_callers: dict[str, int]

    def open(self, protocol: ServerProtocol, caller: Caller) -> Session | None:
        """A session for a client that has said hello; None if there are too many."""

    def forget(self, session: Session) -> None:
        """End the session of a client that is gone."""

    def is_full(self, network: str) -> bool:
        """Whether a network must wait until earlier connections have said hello."""


class ServerProtocol(ControlProtocol):
    """The QUIC connection of one client: hello, templates, and responses that datagrams could not deliver."""

    def __init__(self, quic: QuicConnection, server: HandshakeHost, network: str) -> None:
        super().__init__(quic)
        self._reader.most = MAX_HELLO
        self._server = server
        self.network = network
        """The client's network, see `network_of`."""
        self.session: Session | None = None
        self.half_open = True
        self._refused = False
        self._hello = asyncio.get_running_loop().call_later(
            HELLO_TIMEOUT_S, self._refuse, CloseCode.PROTOCOL, "no hello came in time"
        )

    def quic_event_received(self, event: QuicEvent) -> None:
        """Handle the control stream and the end of the connection."""
        match event:
            case StreamDataReceived(data=data, stream_id=0):
                try:
                    for message in self._reader.feed(data):
                        if self._refused:  # a second hello in the same data gets no second try
                            return
                        self._take(message)
                except WireError as error:
                    self._refuse(CloseCode.PROTOCOL, str(error)[:200])
            case ConnectionTerminated():
                self._ended()

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        """End the session as soon as the client closes; QUIC itself waits three more timeouts."""
        super().datagram_received(data, addr)
        if self._quic._close_event is not None:  # aioquic reports it only after those
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
        if hello.version != VERSION:
            self._refuse(CloseCode.VERSION, f"this end speaks version {VERSION}, not {hello.version}")
            return
        caller = keys.by_proof(hello.proof or b"", self.exporter.export(KEY_PROOF))
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


class Demultiplexer(QuicServer):
    """Passes sealed datagrams to their sessions and all others to QUIC."""

    server: HandshakeHost
    network = ""
    """The network of the datagram that is being handled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._handshakes = HandshakeLimits(self._loop.time())

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        """Route one datagram; one without a destination is dropped and counted, because its sender may be forged."""
        assert isinstance(data, bytes)
        self.server.received_bytes += len(data)
        if not is_sealed(data):
            drop = self._stranger(data, addr)
            if drop is None:
                super().datagram_received(data, addr)
            else:
                self.server.drops[drop] += 1
            return
        try:
            header = peek(data)
        except WireError:
            self.server.drops[Drop.MALFORMED] += 1
            return
        session = self.server.sessions.get(header.session)
        if session is None:
            self.server.drops[Drop.NO_SESSION] += 1
        else:
            session.datagram(header, data, addr)

    def _stranger(self, data: bytes, addr: Any) -> Drop | None:
        """Why QUIC does not get a datagram; None if it belongs to a connection or may open one."""
        if len(data) < SHORTEST_QUIC or not data[0] & FIXED_BIT:
            return Drop.MALFORMED
        long = bool(data[0] & LONG_HEADER)
        # Long headers carry the length of connection ids; short ones have ours, which are of one length.
        length = data[5] if long else self._configuration.connection_id_length
        begin = 6 if long else 1
        if data[begin : begin + length] in self._protocols:
            return None
        if not long:
            return Drop.NO_CONNECTION
        try:
            header = pull_quic_header(Buffer(data=data))
        except ValueError:  # a short buffer is one as well
            return Drop.MALFORMED
        if not header.version:  # a version negotiation; this end opens no connections
            return Drop.MALFORMED
        known = header.version in self._configuration.supported_versions
        if known and header.packet_type != QuicPacketType.INITIAL:
            return Drop.NO_CONNECTION
        if len(data) < SMALLEST_INITIAL:  # a reply must not be larger than its request (RFC 9000 §14.1, §6.1)
            return Drop.MALFORMED
        now = self._loop.time()
        if known and header.token:
            assert self._retry is not None, "Retry is on"
            try:
                self._retry.validate_token(
                    address=addr, destination_cid=header.destination_cid, token=header.token, now=now
                )
            except ValueError:
                self.server.drops[Drop.BAD_TOKEN] += 1  # QUIC tells the client, so that it does not wait
                return None if self._handshakes.may_retry(now) else Drop.CROWDED
            self.network = network_of(addr[0])
            may = not self.server.is_full(self.network) and self._handshakes.may_begin(self.network, now)
        else:
            may = self._handshakes.may_retry(now)
        return None if may else Drop.CROWDED
