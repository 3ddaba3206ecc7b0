"""HTTP/1.1 connections within bounds: uvicorn's protocol, with limits below the application.

Uvicorn with httptools reads a header of any size (and copies it again for every piece that arrives), waits for the end
of a header for ever, and accepts connections until the process has no file descriptors left. This subclass adds what
the application cannot see. A connection is always in one of four states:

    owing     the caller owes us something: a head, the rest of a body that was already refused, or to take the answer
              that we hold for it. Has a deadline.
    working   a request is being answered. The application bounds it: body, queue, datacenter.
    idle      kept alive between requests. Uvicorn closes it after `timeout_keep_alive`.
    leaving   refused: the answer and our FIN are sent, what still comes is dropped. Has a deadline.

                   head complete           answered
    accept ─► owing ───────────► working ───────────► idle ─► owing …
                └── malformed, too large, late ──► leaving ─► closed

`Connections` holds the last three of these in the order in which they came, so that making room for a new connection
takes the longest idle one without a search. A request costs two dictionary operations; there is one timer per server,
and it runs only while somebody owes something.

Requests that two readers could understand differently are refused (RFC 9112): `Host` missing, doubled or malformed, a
transfer coding other than `chunked`. Trailers are dropped. An offer to go on with another protocol (`Upgrade`) is
declined by answering: its head is read once more without the offer, which the parser would end at (`_decline`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import resource
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Final

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

log = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 64 * 1024
"""Request line and headers together; Apache takes 100 lines of 8 KiB, nginx 32 KiB, Node.js 16 KiB. The parser copies a
growing header once for each piece that arrives, which at this size is nothing. A head that begins in the same read as
the end of another request is counted from the next read on: at most one read (256,000 bytes) more."""
MAX_URL_BYTES: Final = 16 * 1024
"""Twice what nginx and Apache take; every field of this API fits into 1 KiB."""
MAX_PIPELINED: Final = 32
"""Requests sent ahead of their answers. One read holds 14,000 minimal ones, and each costs about 3 kB once parsed."""
MAX_CONNECTIONS: Final = 4096
RESERVED_FILES: Final = 128
"""File descriptors that callers cannot take: 32 to the datacenter, `MAX_LEAVING`, models, logs, and some to spare."""
MIN_CONNECTIONS: Final = 16
MAX_OPEN_FILES: Final = 65_536
PER_ADDRESS: Final = 512
"""Connections from one address, unless set: sixteen edge nodes behind one translated address, or the largest load test
(`loadgen`). An eighth of all connections."""
KEEP_ALIVE_S: Final = 75
"""Idle connections are kept longer than most clients and proxies keep theirs (60 s), so that the client closes first
and no request is sent into a closing connection."""
MAX_LEAVING: Final = 16
"""Refused connections that are still listened to, so that their callers get to read why; beyond this the oldest is cut
off, which may lose the explanation but nothing else."""
DRAIN_STEP_BYTES: Final = 15_000
"""Of a body that was refused early, in `Limits.drain_s` (500 bytes a second), to be let finish."""
MAX_DRAINED_BYTES: Final = 16 * 1024 * 1024
"""Of a body that was refused early, let come beyond `Limits.drain_s`."""

_HOST: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?").fullmatch
"""RFC 9110 §7.2, RFC 3986 §3.2.2; may be empty."""
_OWS: Final = b" \t"
"""White space that may follow a value, and that the parser leaves there."""


@dataclass(frozen=True)
class Limits:
    """How many connections, and how patient with them; tests are less patient."""

    connections: int
    per_address: int = PER_ADDRESS
    """From one address other than loopback (IPv6: one /64 network), and never more than half of all; 0 for no bound."""
    head_s: float = 10.0
    """From the first byte of a request, or from connecting, to the end of its head."""
    drain_s: float = 30.0
    """For the rest of a body that was refused early, and then for the next head; and again for each `DRAIN_STEP_BYTES`
    of it that come in time."""
    leave_s: float = 2.0
    """For a refused caller to read the answer and hang up."""
    grace_s: float = 1.0
    """A caller is not cut off for lack of room before it has had this long to send its head."""
    unread_s: float = 30.0
    """For a caller to take an answer off our hands, once so much waits (64 KiB) that we stop writing."""


class Connections:
    """All connections of one server: which of them can be closed for a newer one, and which have run out of time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.per_address = min(limits.per_address, max(1, limits.connections // 2))
        """0 for no bound."""
        self._idle: OrderedDict[BoundedProtocol, None] = OrderedDict()
        self._owing: OrderedDict[BoundedProtocol, tuple[float, float]] = OrderedDict()
        """Since when, until when (loop time)."""
        self._leaving: OrderedDict[BoundedProtocol, float] = OrderedDict()
        """Until when."""
        self._from: dict[str, int] = {}
        """Connections by address, as `address_of` has it."""
        self._timer: asyncio.TimerHandle | None = None
        self._turned_away = 0
        self._of_one_address = 0

    def enters(self, connection: BoundedProtocol) -> HawkVisionError | None:
        """Take the newest connection in; else why not."""
        address = address_of(connection.client)
        bound = self.per_address
        if address is not None and bound and self._from.get(address, 0) >= bound:
            self._of_one_address += 1
            return Overloaded(f"{bound} connections from {address} are open; no more are taken from one address", 1.0)
        if not self.make_room(len(connection.connections), connection.loop.time()):
            return NotReady(f"all {self.limits.connections} connections of this server are in use")
        if address is not None:
            connection.address = address
            self._from[address] = self._from.get(address, 0) + 1
        return None

    def mark_busy(self, connection: BoundedProtocol) -> None:
        """The connection has a request to answer."""
        self._idle.pop(connection, None)
        self._owing.pop(connection, None)

    def mark_idle(self, connection: BoundedProtocol) -> None:
        """The connection is kept alive and nothing is outstanding."""
        self._idle[connection] = None

    def mark_unsent(self, connection: BoundedProtocol, within_s: float) -> None:
        """The caller must send what is missing in time; a second call changes nothing."""
        self._idle.pop(connection, None)
        if connection not in self._owing:
            now = connection.loop.time()
            self._owing[connection] = (now, now + within_s)
            self._watch(connection.loop)

    def sends_on(self, connection: BoundedProtocol) -> None:
        """What the connection owes is coming in: it gets as long again for the rest."""
        if connection in self._owing:
            since, _ = self._owing[connection]
            self._owing[connection] = (since, connection.loop.time() + self.limits.drain_s)

    def mark_closing(self, connection: BoundedProtocol) -> None:
        """The connection was refused and waits for its caller to hang up."""
        self.mark_busy(connection)
        self._leaving[connection] = connection.loop.time() + self.limits.leave_s
        if len(self._leaving) > MAX_LEAVING:
            oldest, _ = self._leaving.popitem(last=False)
            oldest.transport.abort()
        self._watch(connection.loop)

    def gone(self, connection: BoundedProtocol) -> None:
        """The connection is closed."""
        self.mark_busy(connection)
        self._leaving.pop(connection, None)
        address = connection.address
        if address is not None:
            self._from[address] -= 1
            if not self._from[address]:
                del self._from[address]

    def make_room(self, accepted: int, now: float) -> bool:
        """Whether there is room for the newest of `accepted` connections, after closing another one if need be.

        The one that has been idle longest goes first. Without any, the one that has owed its head longest goes, so
        that callers who never finish theirs cannot keep out those who do.
        """
        if accepted - len(self._leaving) <= self.limits.connections:
            return True
        if self._idle:
            oldest, _ = self._idle.popitem(last=False)
            oldest.transport.abort()
            return True
        if self._owing:
            oldest, (since, _) = next(iter(self._owing.items()))
            if now - since >= self.limits.grace_s:
                del self._owing[oldest]
                oldest.transport.abort()
                return True
        self._turned_away += 1
        return False

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(min(1.0, self.limits.leave_s), self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close what has run out of time; bounded by the number of connections."""
        self._timer = None
        now = loop.time()
        for connection in [one for one, (_, until) in self._owing.items() if until <= now]:
            del self._owing[connection]
            connection.expire()
        for connection in [one for one, until in self._leaving.items() if until <= now]:
            del self._leaving[connection]
            connection.transport.abort()
        if self._turned_away:
            log.warning("turned away %d connections: %d are open", self._turned_away, self.limits.connections)
            self._turned_away = 0
        if self._of_one_address:
            log.warning(
                "turned away %d connections: %d were open from their address (connections_per_address)",
                self._of_one_address,
                self.per_address,
            )
            self._of_one_address = 0
        if self._owing or self._leaving:
            self._watch(loop)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Use `bounded` to tie the class to a server's `Connections`."""

    book: ClassVar[Connections]

    address: str | None = None
    """Whom it counts for; None for nobody."""
    _taken_in = False
    """It counts since before its handshake."""
    _begun = False
    """A head has begun and is not complete."""
    _head_bytes = 0
    """Of the head under way, those read so far; in a body, those read since there was a piece of it."""
    _heads = 0
    """Complete heads so far."""
    _hosts = 0
    """`Host` lines in the head under way."""
    _host = b""
    """The latest that was found well-formed."""
    _offered = False
    """The head under way offers another protocol."""
    _in_body = False
    _pieces = 0
    """Of bodies, and of chunks, so far."""
    _drained_bytes = 0
    """Of the body under way, after it was refused."""
    _closed_for_reading = False
    _refusal: HawkVisionError | None = None
    """To be sent when the earlier requests of a pipeline are answered."""

    # ----------------------------------------------------------------------------------------- from the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or turn it away."""
        super().connection_made(transport)
        if self._taken_in:  # before its handshake: it owes its first head within the same time
            return
        refusal = self._take_in()
        if refusal is not None:
            self._leave(refusal)

    def handshaking(self, transport: asyncio.Transport) -> bool:
        """Take the connection in before its TLS handshake; False if there is no room, which nobody can be told."""
        self.transport = transport
        self.client = get_remote_addr(transport)
        self.connections.add(self)
        self._taken_in = self._take_in() is None
        return self._taken_in

    def _take_in(self) -> HawkVisionError | None:
        """Count the connection, which owes its first head from now on; else why not."""
        refusal = self.book.enters(self)
        if refusal is None:
            self.book.mark_unsent(self, self.book.limits.head_s)
        return refusal

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.book.gone(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, never more of one head than its limit."""
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
            ours = error.__context__
            self._refuse(ours if isinstance(ours, HawkVisionError) else BadField(f"not an HTTP/1.1 request: {error}"))
            return
        if read is not None:
            self._decline(memoryview(data)[read:])
            return
        if heads != self._heads or pieces != self._pieces or (in_body and not self._in_body):
            self._head_bytes = 0
            if self._begun and not self._answering():
                self.book.mark_unsent(self, self.book.limits.head_s)
            elif self._in_body and heads == self._heads and not self._answering() and not self.flow.write_paused:
                self._drain(len(data))
            return
        self._head_bytes += len(data)
        if self._head_bytes >= MAX_HEAD_BYTES:
            part = "the trailers" if in_body else "the request line and headers"
            self._refuse(HeadersTooLarge(f"{part} exceed {MAX_HEAD_BYTES} bytes"))
        elif not in_body and not self._answering():
            self.book.mark_unsent(self, self.book.limits.head_s)

    def _decline(self, rest: memoryview) -> None:
        """Read the head that offers another protocol once more, without the offer, and go on with what follows.

        RFC 9110 §7.8 lets a server ignore it. The parser ends there, and would take the body for the other protocol.
        At most `MAX_PIPELINED` deep, for an answer takes more than one read.
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
        """Let the rest of a refused body come, as long as it comes."""
        steps = self._drained_bytes // DRAIN_STEP_BYTES
        self._drained_bytes += size
        if self._drained_bytes // DRAIN_STEP_BYTES > steps and self._drained_bytes <= MAX_DRAINED_BYTES:
            self.book.sends_on(self)

    # -------------------------------------------------------------------------------------------- from the parser

    def on_message_begin(self) -> None:
        """Note that a head is under way."""
        self._begun = True
        self._hosts = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Collect the URL, within its bound."""
        self.url += url
        if len(self.url) > MAX_URL_BYTES:
            raise UriTooLong(f"the URL exceeds {MAX_URL_BYTES} bytes; send the image in the body")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; a trailer is dropped, for it must not pass for one (RFC 9110 §6.5.1)."""
        if self._in_body:
            return
        name = name.lower()
        if name == b"host":
            self._hosts += 1
            if self._hosts > 1 or (value != self._host and not _HOST(value.strip(_OWS))):
                raise BadField(f"Host: expected one header HOST[:PORT], got {value[:60]!r} (RFC 9112 §3.2)")
            self._host = value
        elif name == b"transfer-encoding" and value.strip(_OWS).lower() != b"chunked":
            raise BadField(f"Transfer-Encoding: expected 'chunked', got {value[:60]!r}")
        elif name == b"expect" and value.strip(_OWS).lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start to answer, or queue behind the requests before."""
        if not self._hosts and self.parser.get_http_version() != "1.0":
            raise BadField("Host: missing; HTTP/1.1 asks for one header HOST[:PORT] (RFC 9112 §3.2)")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise BadField("CONNECT: this server is no proxy")
            self._offered = True
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise Overloaded(f"more than {MAX_PIPELINED} requests were sent ahead of their answers", 1.0)
        self.begin()
        self._begun = False
        self._in_body = True
        self._drained_bytes = 0
        self._heads += 1
        if not self.flow.write_paused:  # else it goes on owing us to read
            self.book.mark_busy(self)

    def begin(self) -> None:
        """Start to answer the request whose head is complete, or queue it."""
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """A chunk begins, or the end of them."""
        self._pieces += 1

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._pieces += 1
        self.keep(body)

    def keep(self, body: bytes) -> None:
        """Keep a piece for who reads the body."""
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is complete, read or refused."""
        if self._offered:  # of the parser, which goes no further
            return
        self._in_body = False
        self.complete()

    def complete(self) -> None:
        """Tell who reads the body that it is complete."""
        super().on_message_complete()

    # --------------------------------------------------------------------------------------- from uvicorn's cycle

    def on_response_complete(self) -> None:
        """Go on to the next request, or send the refusal that waited, or rest."""
        last = not self.pipeline
        super().on_response_complete()
        if not last:
            return
        if self._refusal is not None and not self.transport.is_closing():
            self._leave(self._refusal)
        else:
            self._rest()

    def pause_writing(self) -> None:
        """The caller does not read: it has some time to begin."""
        super().pause_writing()
        self.book.mark_unsent(self, self.book.limits.unread_s)

    def resume_writing(self) -> None:
        """The caller reads again."""
        super().resume_writing()
        self.book.mark_busy(self)
        if not self._answering() and not self._closed_for_reading:
            self._rest()

    def timeout_keep_alive_handler(self) -> None:
        """Close after a long rest, even if the last answer was never taken: a plain close would wait for that."""
        self.transport.abort()

    def _rest(self) -> None:
        limits = self.book.limits
        if self.flow.write_paused or self.transport.is_closing():
            self.book.mark_unsent(self, limits.unread_s)
        elif self._begun or self._head_bytes:
            self.book.mark_unsent(self, limits.head_s)
        elif self._in_body:
            self.book.mark_unsent(self, limits.drain_s)
        else:
            self.book.mark_idle(self)

    # ------------------------------------------------------------------------------------------------- refusing

    def expire(self) -> None:
        """Time is up: say so if a head was awaited and had begun, and close."""
        if (self._begun or self._head_bytes) and not self.flow.write_paused and not self.transport.is_closing():
            self._leave(RequestTimeout(f"the headers were not complete after {self.book.limits.head_s:g} s"))
        else:
            self.transport.abort()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: HawkVisionError) -> None:
        """Read no more, and send `error` after the answers that come before it."""
        self._closed_for_reading = True
        cycle = self.cycle
        if not self._answering():
            if self._in_body:  # the broken request has had its answer
                self.transport.close()
            else:
                self._leave(error)
        elif not cycle.more_body:  # broken is the one after it
            self._refusal = error
        elif self.pipeline:  # the newest is broken and has not been started
            self.pipeline.popleft()
            self._refusal = error
        else:
            started = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
            if started:
                self.transport.close()
            else:
                self._leave(error)

    def _leave(self, error: HawkVisionError) -> None:
        """Answer with `error` and our FIN, then wait a moment for the caller's.

        Closing at once with unread bytes would reset the connection, and the caller might never see the answer.
        """
        self._closed_for_reading = True
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        body = msgspec.json.encode(error.body())
        again = b"retry-after: 1\r\n" if isinstance(error, NotReady | Overloaded) else b""
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            + again
            + b"connection: close\r\n\r\n"
            + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS ends both ways at once
            self.transport.close()
        self.flow.resume_reading()
        self.book.mark_closing(self)


def bounded(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class of one server, for `uvicorn.Config(http=…)`."""

    class Bounded(BoundedProtocol):
        book = Connections(limits)

    return Bounded


def address_of(client: tuple[str, int] | None) -> str | None:
    """Whom a connection counts for: its address, or of IPv6 the network of 64 bits that one caller has to itself.

    None for callers on this machine: a reverse proxy here speaks for many, and a load test here is the operator's own.
    """
    if client is None:  # a Unix socket
        return None
    address = ipaddress.ip_address(client[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return None
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, at most `MAX_OPEN_FILES`; the limit then in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connections_for(open_files: int) -> int:
    """How many connections fit into a limit of open files, after what the server itself needs."""
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, open_files - RESERVED_FILES))
