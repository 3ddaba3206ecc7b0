"""HTTP/1.1 connections within bounds: uvicorn's protocol, with limits below the application.

Uvicorn with httptools reads a header of any size, waits without end for the rest of a header, and accepts connections
until the process has no file descriptors left. This subclass adds the limits that the application cannot set. A
connection is in one of four states:

    expecting  the caller has to act: send a head or the rest of a refused body, or read the response. Has a deadline.
    busy       a request is being answered. The application bounds it.
    idle       kept alive between requests. Uvicorn closes it after `timeout_keep_alive`.
    closing    refused: the response and our FIN are sent, and further input is dropped. Has a deadline.

                       head complete        answered
    accept ─► expecting ───────────► busy ───────────► idle ─► expecting …
                  └── malformed, too large, late ──► closing ─► closed

`ConnectionRegistry` keeps these states. Requests that two readers could understand differently are refused (RFC 9112):
`Host` missing, repeated or malformed, `Authorization` repeated, or a transfer coding other than `chunked`. Trailers are
dropped. An `Upgrade` offer is declined: its head is parsed again without the offer (`_decline`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
import time
from collections.abc import Callable
from typing import ClassVar, Final, Protocol

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from hawkvision.core.errors import (
    BadField,
    HawkVisionError,
    HeadersTooLarge,
    NotReady,
    Overloaded,
    RequestTimeout,
    UriTooLong,
)
from hawkvision.servers.connections import ARRIVED, DRAIN_STEP_BYTES, PLACE, ConnectionRegistry, Limits

log = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 64 * 1024
"""Request line and headers together. Apache accepts 100 lines of 8 KiB, nginx 32 KiB, Node.js 16 KiB. A head that
begins in the same read as the end of another request is counted from the next read on, so at most one read (256,000
bytes) comes on top."""
MAX_URL_BYTES: Final = 16 * 1024
"""Twice what nginx and Apache take; every field of this API fits into 1 KiB."""
MAX_PIPELINED: Final = 32
"""Requests sent ahead of their responses. A parsed request takes about 3 kB."""
MAX_DRAINED_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a refused body that extend its deadline; later ones do not."""

_LAST_DATA_RECV: Final = struct.Struct("@52xI")
"""`tcpi_last_data_recv` of Linux's `struct tcp_info`: milliseconds since data came in."""

_HOST: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?").fullmatch
"""RFC 9110 §7.2, RFC 3986 §3.2.2; may be empty."""
_OWS: Final = b" \t"
"""White space that may follow a value; the parser does not remove it."""


class Gate(Protocol):
    """What is asked about a POST at the end of its head, before anything else is done for it."""

    def admit(
        self, url: bytes, headers: list[tuple[bytes, bytes]], client: tuple[str, int] | None, waited_s: float
    ) -> bytes | Callable[[], object] | None:
        """The response that refuses the request, or what makes its place (`PLACE`) when its body is there, or neither.

        Args:
            url: path and query.
            headers: names in lower case.
            client: the caller's address.
            waited_s: seconds since it reached the kernel.
        """
        ...


class _NothingMore(Exception):
    """The connection was answered for the last time."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `bounded` binds the class to the registry of a server."""

    registry: ClassVar[ConnectionRegistry]
    gate: ClassVar[Gate | None] = None

    address: str | None = None
    """The address that the connection counts for; None if it counts for none."""
    _registered = False
    """The connection was registered before its TLS handshake."""
    _begun = False
    """A head has begun and is not complete."""
    _head_bytes = 0
    """Bytes read of the current head; in a body, bytes read since its last piece."""
    _heads = 0
    """Complete heads so far."""
    _hosts = 0
    """`Host` lines in the current head."""
    _host = b""
    """The last well-formed value of `Host`."""
    _offered = False
    """The current head offers another protocol."""
    _in_body = False
    _pieces = 0
    """Pieces of bodies and chunk headers so far."""
    _drained_bytes = 0
    """Bytes read of the current body after its refusal."""
    _closed_for_reading = False
    _reserve: Callable[[], object] | None = None
    """Makes the place of the current request when its body is there."""
    _skipping = False
    """The current request was refused at its head, and its body is skipped."""
    _refusal: HawkVisionError | None = None
    """Sent when the earlier requests of the pipeline are answered."""

    # ----------------------------------------------------------------------------------------- from the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, or refuse it."""
        super().connection_made(transport)
        if self._registered:  # before its handshake, which shares the deadline of the first head
            return
        refusal = self._register()
        if refusal is not None:
            self._close_with(refusal)

    def handshaking(self, transport: asyncio.Transport) -> bool:
        """Register the connection before its TLS handshake. Returns False if there is no room."""
        self.transport = transport
        self.client = get_remote_addr(transport)
        self.connections.add(self)
        self._registered = self._register() is None
        return self._registered

    def _register(self) -> HawkVisionError | None:
        """Register the connection and expect its first head. Returns why the connection is refused, or None."""
        refusal = self.registry.add(self)
        if refusal is None:
            self.registry.expect(self, self.registry.limits.head_s)
        return refusal

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.registry.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, with at most `MAX_HEAD_BYTES` of one head."""
        if self._closed_for_reading:
            return
        self._unset_keepalive_if_required()
        room = MAX_HEAD_BYTES - self._head_bytes
        if self._in_body or len(data) <= room:
            self._feed(data)
            return
        rest = memoryview(data)
        while rest and not self._closed_for_reading:
            piece = rest if self._in_body else rest[: MAX_HEAD_BYTES - self._head_bytes]
            rest = rest[len(piece) :]
            self._feed(piece)

    def _feed(self, data: bytes | memoryview) -> None:
        in_body, heads, pieces = self._in_body, self._heads, self._pieces
        read: int | None = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            read = offer.args[0]
        except httptools.HttpParserError as error:
            if self._closed_for_reading:  # `_skip` stopped the parser
                return
            ours = error.__context__
            self._refuse(ours if isinstance(ours, HawkVisionError) else BadField(f"not an HTTP/1.1 request: {error}"))
            return
        if read is not None:
            self._decline(memoryview(data)[read:])
            return
        if heads != self._heads or pieces != self._pieces or (in_body and not self._in_body):
            self._head_bytes = 0
            if self._begun and not self._answering():
                self.registry.expect(self, self.registry.limits.head_s)
            elif self._in_body and heads == self._heads and not self._answering() and not self.flow.write_paused:
                self._drain(len(data))
            return
        self._head_bytes += len(data)
        if self._head_bytes >= MAX_HEAD_BYTES:
            part = "the trailers" if in_body else "the request line and headers"
            self._refuse(HeadersTooLarge(f"{part} exceed {MAX_HEAD_BYTES} bytes"))
        elif not in_body and not self._answering():
            self.registry.expect(self, self.registry.limits.head_s)

    def _decline(self, rest: memoryview) -> None:
        """Parse the head that offers another protocol again without the offer, then parse `rest`.

        RFC 9110 §7.8 lets a server ignore the offer. The parser stops at it and would take the body for the other
        protocol. The recursion is at most `MAX_PIPELINED` deep.
        """
        lines = [self.parser.get_method(), b" ", self.url, b" HTTP/", self.parser.get_http_version().encode(), b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                lines += (name, b": ", value, b"\r\n")
        self._offered = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._feed(b"".join((*lines, b"\r\n")))
        if rest and not self._closed_for_reading:
            self._feed(rest)

    def _drain(self, size: int) -> None:
        """Extend the deadline while the rest of a refused body keeps arriving."""
        steps = self._drained_bytes // DRAIN_STEP_BYTES
        self._drained_bytes += size
        if self._drained_bytes // DRAIN_STEP_BYTES > steps and self._drained_bytes <= MAX_DRAINED_BYTES:
            self.registry.extend(self)

    # -------------------------------------------------------------------------------------------- from the parser

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._begun = True
        self._hosts = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Collect the URL, up to `MAX_URL_BYTES`."""
        self.url += url
        if len(self.url) > MAX_URL_BYTES:
            raise UriTooLong(f"the URL exceeds {MAX_URL_BYTES} bytes; send the image in the body")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header. Trailers are dropped, because they must not be taken for headers (RFC 9110 §6.5.1)."""
        if self._in_body:
            return
        name = name.lower()
        if name == b"host":
            self._hosts += 1
            if self._hosts > 1 or (value != self._host and not _HOST(value.strip(_OWS))):
                raise BadField(f"Host: expected one header HOST[:PORT], got {value[:60]!r} (RFC 9112 §3.2)")
            self._host = value
        elif name == b"authorization" and any(known == name for known, _ in self.headers):
            raise BadField("Authorization: expected one header, got two; which key counts would be a guess")
        elif name == b"transfer-encoding" and value.strip(_OWS).lower() != b"chunked":
            raise BadField(f"Transfer-Encoding: expected 'chunked', got {value[:60]!r}")
        elif name == b"expect" and value.strip(_OWS).lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind earlier ones."""
        if not self._hosts and self.parser.get_http_version() != "1.0":
            raise BadField("Host: missing; HTTP/1.1 asks for one header HOST[:PORT] (RFC 9112 §3.2)")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise BadField("CONNECT: this server is no proxy")
            self._offered = True
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise Overloaded(f"more than {MAX_PIPELINED} requests were sent ahead of their answers", 1.0)
        waited_s = self._waited_s()
        if self.gate is not None and self.parser.get_method() == b"POST" and not self._answering():
            found = self.gate.admit(self.url, self.headers, self.client, waited_s)
            if isinstance(found, bytes):
                self._skip(found)
                return
            self._reserve = found
        self.scope[ARRIVED] = time.monotonic() - waited_s  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._begun = False
        self._in_body = True
        self._drained_bytes = 0
        self._heads += 1
        if not self.flow.write_paused:  # otherwise the caller still has to read the response
            self.registry.mark_busy(self)

    def _skip(self, response: bytes) -> None:
        """Refuse the request at once, and skip its body."""
        self._begun = False
        self._heads += 1
        self._head_bytes = 0
        if not self.parser.should_keep_alive():
            self._close_with(response)
            raise _NothingMore
        self._in_body = self._skipping = True
        self._drained_bytes = 0
        self.transport.write(response)
        self.registry.expect(self, self.registry.limits.drain_s)

    def _waited_s(self) -> float:
        """Seconds that the newest bytes have waited in the kernel, also while the connection was not accepted yet."""
        try:
            found = self.transport.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.size
            )
            return float(_LAST_DATA_RECV.unpack(found)[0]) * 1e-3
        except (AttributeError, OSError, struct.error):  # a Unix socket, or another system
            return 0.0

    def on_chunk_header(self) -> None:
        """Count a chunk header."""
        self._pieces += 1

    def on_body(self, body: bytes) -> None:
        """Count a piece of a body and pass it on."""
        self._pieces += 1
        if not self._skipping:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body, read or refused."""
        if self._offered:  # the parser stops here
            return
        self._in_body = False
        if self._skipping:
            self._skipping = False
            self._head_bytes = 0
            self.registry.mark_busy(self)
            self._rest()
            return
        super().on_message_complete()
        if self._reserve is not None:
            self.scope[PLACE] = self._reserve()  # type: ignore[typeddict-unknown-key]
            self._reserve = None

    # --------------------------------------------------------------------------------------- from uvicorn's cycle

    def on_response_complete(self) -> None:
        """Start the next request, send the pending refusal, or become idle."""
        last = not self.pipeline
        super().on_response_complete()
        if not last:
            return
        if self._refusal is not None and not self.transport.is_closing():
            self._close_with(self._refusal)
        else:
            self._rest()

    def pause_writing(self) -> None:
        """Give a caller that does not read `unread_s` to read on."""
        super().pause_writing()
        self.registry.expect(self, self.registry.limits.unread_s)

    def resume_writing(self) -> None:
        """End the deadline: the caller reads again."""
        super().resume_writing()
        self.registry.mark_busy(self)
        if not self._answering() and not self._closed_for_reading:
            self._rest()

    def timeout_keep_alive_handler(self) -> None:
        """Abort the idle connection. A plain close would wait until the caller has read the last response."""
        self.transport.abort()

    def _rest(self) -> None:
        limits = self.registry.limits
        if self.flow.write_paused or self.transport.is_closing():
            self.registry.expect(self, limits.unread_s)
        elif self._begun or self._head_bytes:
            self.registry.expect(self, limits.head_s)
        elif self._in_body:
            self.registry.expect(self, limits.drain_s)
        else:
            self.registry.mark_idle(self)

    # ------------------------------------------------------------------------------------------------- refusing

    def expire(self) -> None:
        """Close after the deadline, with an error response if a head had begun."""
        if (self._begun or self._head_bytes) and not self.flow.write_paused and not self.transport.is_closing():
            self._close_with(RequestTimeout(f"the headers were not complete after {self.registry.limits.head_s:g} s"))
        else:
            self.transport.abort()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: HawkVisionError) -> None:
        """Stop reading, and send `error` after the responses to earlier requests."""
        self._closed_for_reading = True
        cycle = self.cycle
        if not self._answering():
            if self._in_body:  # the malformed request has been answered already
                self.transport.close()
            else:
                self._close_with(error)
        elif not cycle.more_body:  # the next request is malformed
            self._refusal = error
        elif self.pipeline:  # the newest request is malformed and has not started
            self.pipeline.popleft()
            self._refusal = error
        else:
            started = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
            if started:
                self.transport.close()
            else:
                self._close_with(error)

    def _close_with(self, error: HawkVisionError | bytes) -> None:
        """Send `error`, or a whole response, and our FIN, then wait `leave_s` for the caller's FIN.

        To close at once with unread bytes would reset the connection, and the caller might not see the response.
        """
        self._closed_for_reading = True
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.transport.write(error if isinstance(error, bytes) else _refusal(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS closes both directions at once
            self.transport.close()
        self.flow.resume_reading()
        self.registry.mark_closing(self)


def bounded(limits: Limits, asked: Gate | None = None) -> type[asyncio.Protocol]:
    """The protocol class of one server, for `uvicorn.Config(http=…)`; its gate is asked about each request."""

    class Bounded(BoundedProtocol):
        registry = ConnectionRegistry(limits)
        gate = asked

    return Bounded


def _refusal(error: HawkVisionError) -> bytes:
    """The response that refuses a request and announces the end of the connection."""
    body = msgspec.json.encode(error.body())
    retry = b"retry-after: 1\r\n" if isinstance(error, NotReady | Overloaded) else b""
    return (
        STATUS_LINE[error.status]
        + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        + retry
        + b"connection: close\r\n\r\n"
        + body
    )
