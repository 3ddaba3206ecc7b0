"""The QUIC connection beside the sealed datagrams, and the control stream on it. `WIRE.md` §4.

QUIC (aioquic) does what must not be home-made: TLS 1.3, address validation by Retry tokens, and a reliable stream.

    client                                       server
           ── handshake ───────────────────────►        its certificate is checked
           ── Hello ───────────────────────────►        is this one let in? (`server.py`)
           ◄────────────────────────── Welcome ──       the session's number and keys
           ── Template, Tables ────────────────►        told once, then named by number in fragments
           ◄───────────────────── StreamAnswer ──       what no datagram could deliver
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, QuicEvent, StreamDataReceived

from hawkvision.transport.control import ALPN, CloseCode, Message, MessageReader, Tables, Template, encode_message
from hawkvision.transport.identity import Identity
from hawkvision.transport.quic_pacing import ALGORITHM
from hawkvision.transport.receiver import MAX_REGISTERED_BYTES
from hawkvision.transport.wire import WireError

IDLE_S: Final = 30.0
MAX_CLIENT_TEMPLATES: Final = 255


def server_configuration(identity: Identity) -> QuicConfiguration:
    """Of a server with this certificate."""
    return QuicConfiguration(
        is_client=False,
        alpn_protocols=[ALPN],
        congestion_control_algorithm=ALGORITHM,
        idle_timeout=IDLE_S,
        certificate=identity.chain[0],
        certificate_chain=list(identity.chain[1:]),
        private_key=identity.key,
    )


def client_configuration(certificate: str, name: str) -> QuicConfiguration:
    """Of a client that trusts this certificate (PEM), made out to this name."""
    return QuicConfiguration(
        is_client=True,
        alpn_protocols=[ALPN],
        congestion_control_algorithm=ALGORITHM,
        idle_timeout=IDLE_S,
        server_name=name,
        cadata=certificate.encode(),
    )


class ControlProtocol(QuicConnectionProtocol):
    """What the connection's two ends have in common."""

    def __init__(self, quic: QuicConnection) -> None:
        super().__init__(quic)
        self._reader = MessageReader()

    @property
    def unacknowledged_bytes(self) -> int:
        """What of the control stream the peer has not confirmed: QUIC keeps it, however much it is."""
        stream = self._quic._streams.get(0)  # aioquic has no public way to ask
        return 0 if stream is None else len(stream.sender._buffer)

    def tell(self, message: Message) -> None:
        """Send a message."""
        self._quic.send_stream_data(0, encode_message(message))
        self.transmit()


class Owner(Protocol):
    """Whom a client's connection tells what happens on it."""

    def message(self, message: Message) -> None:
        """Take a control message in."""

    def secured(self) -> None:
        """The handshake is over."""

    def ended(self, code: int, reason: str) -> None:
        """QUIC is over."""


class ClientProtocol(ControlProtocol):
    """The client's end of the connection, and what the server has been told on it."""

    def __init__(self, quic: QuicConnection, client: Owner) -> None:
        super().__init__(quic)
        self._client = client
        self._templates: dict[bytes, int] = {}
        self._tables: dict[bytes, int] = {}
        self._registered_bytes = 0

    def quic_event_received(self, event: QuicEvent) -> None:
        """Only the control stream and the end are of interest."""
        match event:
            case StreamDataReceived(data=data, stream_id=0):
                try:
                    for message in self._reader.feed(data):
                        self._client.message(message)
                except WireError as error:
                    self.close(CloseCode.PROTOCOL, str(error)[:200])
            case HandshakeCompleted():
                self._client.secured()
            case ConnectionTerminated(error_code=code, reason_phrase=reason):
                self._client.ended(code, reason)

    def nudge(self) -> None:
        """Keep the connection from going idle; unlike `ping`, without waiting for what may never come."""
        self._quic.send_ping(0)
        self.transmit()

    def template_number(self, request: bytes) -> int | None:
        """The number under which the server knows a request; None when there are too many."""
        return self._number(self._templates, request, 0, lambda number: Template(number, request))

    def tables_number(self, header: bytes) -> int | None:
        """The number under which the server knows a JPEG header; None when there are too many."""
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
            self.tell(message(number))
        return number


class QuicWay:
    """What QUIC sends through: whichever path's socket is best now."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def sendto(self, data: bytes, addr: Any = None) -> None:  # noqa: ARG002 - asyncio's signature
        """Send to the server."""
        self._send(data)
