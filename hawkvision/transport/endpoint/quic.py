"""The QUIC connection beside the sealed datagrams, and the control stream on it. `WIRE.md` §4.

QUIC (aioquic) provides TLS 1.3, address validation by Retry tokens, and a reliable stream.

    client                                       server
           ── handshake ───────────────────────►        its certificate is the advertised one
           ── Hello ───────────────────────────►        version and key (`server_quic`)
           ◄────────────────────────── Welcome ──       the session's number and keys
           ── Template, Tables ────────────────►        sent once, then named by number in fragments
           ◄───────────────────── StreamAnswer ──       a response that datagrams could not deliver
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Callable
from typing import Any, Final, Protocol

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, QuicEvent, StreamDataReceived
from cryptography import x509

from hawkvision.transport.congestion.quic_congestion import ALGORITHM
from hawkvision.transport.protocol.control import (
    ALPN,
    MAX_REGISTERED_BYTES,
    CloseCode,
    Message,
    MessageReader,
    Tables,
    Template,
    encode_message,
)
from hawkvision.transport.protocol.exporter import Exporter
from hawkvision.transport.protocol.server_certificate import Identity, fingerprint
from hawkvision.transport.protocol.wire import WireError

IDLE_S: Final = 30.0
MAX_CLIENT_TEMPLATES: Final = 255
MAX_UNREAD: Final = 128 * 1024
"""Bytes that a client may send out of order before it has proved its key; 32 MB with `MAX_HALF_OPEN` connections."""


def server_configuration(identity: Identity) -> QuicConfiguration:
    """The configuration of a server with this certificate."""
    return QuicConfiguration(
        is_client=False,
        alpn_protocols=[ALPN],
        congestion_control_algorithm=ALGORITHM,
        idle_timeout=IDLE_S,
        certificate=identity.chain[0],
        certificate_chain=list(identity.chain[1:]),
        private_key=identity.key,
        max_data=MAX_UNREAD,
        max_stream_data=MAX_UNREAD,
    )


def client_configuration(name: str) -> QuicConfiguration:
    """The configuration of a client that asks for this name.

    TLS checks that the server has its certificate's key, but no dates, names or chains: `ClientProtocol` compares the
    certificate before it sends or accepts anything.
    """
    return QuicConfiguration(
        is_client=True,
        alpn_protocols=[ALPN],
        congestion_control_algorithm=ALGORITHM,
        idle_timeout=IDLE_S,
        server_name=name,
        verify_mode=ssl.CERT_NONE,
    )


def shown_certificate(quic: QuicConnection) -> x509.Certificate | None:
    """The peer's certificate, whose key it has proved to have; None before the handshake, or if it showed none."""
    shown: x509.Certificate | None = quic.tls._peer_certificate  # aioquic has no public way to ask
    return shown


class ControlProtocol(QuicConnectionProtocol):
    """The part of the connection that both ends share."""

    def __init__(self, quic: QuicConnection) -> None:
        super().__init__(quic)
        self.exporter = Exporter(quic)
        self._reader = MessageReader()

    @property
    def unacknowledged_bytes(self) -> int:
        """The bytes of the control stream that the peer has not acknowledged; QUIC does not bound them."""
        stream = self._quic._streams.get(0)  # aioquic has no public way to ask
        return 0 if stream is None else len(stream.sender._buffer)

    def send_message(self, message: Message) -> None:
        """Send a message."""
        self._quic.send_stream_data(0, encode_message(message))
        self.transmit()


class ClientEvents(Protocol):
    """Takes the events of a client's connection."""

    def on_message(self, message: Message) -> None:
        """Take in a control message."""

    def on_secured(self) -> None:
        """The handshake with the expected server is complete."""

    def on_closed(self, code: int, reason: str) -> None:
        """The connection has ended."""


class ClientProtocol(ControlProtocol):
    """The client's end of the connection, and the requests and headers that the server knows.

    It sends and accepts nothing before the server's certificate has matched `pin` (SHA-256).
    """

    def __init__(self, quic: QuicConnection, client: ClientEvents, pin: bytes) -> None:
        super().__init__(quic)
        self._client = client
        self._pin = pin
        self._known = False
        """Whether the server has shown the expected certificate."""
        self._templates: dict[bytes, int] = {}
        self._tables: dict[bytes, int] = {}
        self._registered_bytes = 0

    def quic_event_received(self, event: QuicEvent) -> None:
        """Handle the control stream and the end of the connection."""
        match event:
            case StreamDataReceived(data=data, stream_id=0) if self._known:
                try:
                    for message in self._reader.feed(data):
                        self._client.on_message(message)
                except WireError as error:
                    self.close(CloseCode.PROTOCOL, str(error)[:200])
            case HandshakeCompleted():
                self._compare()
            case ConnectionTerminated(error_code=code, reason_phrase=reason):
                self._client.on_closed(code, reason)

    def _compare(self) -> None:
        shown = shown_certificate(self._quic)
        if shown is not None and hmac.compare_digest(fingerprint(shown), self._pin):
            self._known = True
            self._client.on_secured()
            return
        found = "none" if shown is None else fingerprint(shown).hex()
        why = f"the server shows another certificate: expected SHA-256 {self._pin.hex()}, got {found}"
        self.close(CloseCode.UNTRUSTED, why)
        self._client.on_closed(CloseCode.UNTRUSTED, why)

    def nudge(self) -> None:
        """Keep the connection from going idle; unlike `ping`, without waiting for a reply."""
        self._quic.send_ping(0)
        self.transmit()

    def template_number(self, request: bytes) -> int | None:
        """The number by which the server knows a request; None if there are too many."""
        return self._number(self._templates, request, 0, lambda number: Template(number, request))

    def tables_number(self, header: bytes) -> int | None:
        """The number by which the server knows a JPEG header; None if there are too many."""
        return self._number(self._tables, header, 1, lambda number: Tables(number, header))

    def _number(
        self, known: dict[bytes, int], content: bytes, first: int, message: Callable[[int], Message]
    ) -> int | None:
        number = known.get(content)
        if number is None:
            if len(known) >= MAX_CLIENT_TEMPLATES or self._registered_bytes + len(content) > MAX_REGISTERED_BYTES:
                return None
            self._registered_bytes += len(content)
            number = known[content] = len(known) + first
            self.send_message(message(number))
        return number


class QuicWay:
    """A transport for QUIC that sends through the best path's socket."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def sendto(self, data: bytes, addr: Any = None) -> None:  # noqa: ARG002 - asyncio's signature
        """Send to the server."""
        self._send(data)
