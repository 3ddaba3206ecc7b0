"""Whether a picture has arrived at the datacenter, as far as its transport can tell: what was acknowledged or reported.

Whoever waits for an answer learns this sooner than that the answer is late. In a spell in which nothing gets through,
pictures lie in the kernel's buffer, and an edge that looks gives up long before the deadline. Over TCP, a proxy in
between acknowledges in the datacenter's place; then a picture is taken to have arrived too early, never too late. Of
datagrams reports tell, 8 ms and half a round trip later, or later still where one is lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import aiohttp

from hawkvision.cascade.patience import Patience
from hawkvision.clock import Clock
from hawkvision.transport.sender import Delivery

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

LOOK_S: Final = 0.004
"""Between two looks at the kernel's buffer, which take some ten microseconds each."""
LATE_SEGMENTS: Final = 2
"""Segments whose acknowledgement a receiver may delay, until the next one or for up to half a second (RFC 9293
§3.8.6.3)."""
OUTQ: Final = getattr(termios, "TIOCOUTQ", None)
"""Linux's SIOCOUTQ (tcp(7)): bytes of the send buffer that are not acknowledged, sent or not."""


class Sending:
    """One picture on its way: as datagrams, or over a TCP connection that it has to itself meanwhile."""

    def __init__(self) -> None:
        """Of a picture that has not got a connection yet."""
        self.stuck = asyncio.Event()
        """Set once there is hardly any hope that it arrives soon enough."""
        self.arrived_at: float | None = None
        """When that was seen, in seconds of the clock that `watch` was given: a look later than it could be."""
        self._delivery: Delivery | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._written = False
        self._ended = False

    def connected(self, transport: asyncio.WriteTransport | None) -> None:
        """It has a connection now, and will be written to it."""
        self._transport = transport

    def written(self) -> None:
        """It is in the transport's buffer, or the kernel's."""
        self._written = True

    def by_datagrams(self) -> Delivery:
        """It goes as datagrams, whose sender tells what this returns."""
        self._delivery = Delivery()
        return self._delivery

    def end(self) -> None:
        """The exchange is over, and the connection is another picture's."""
        self._ended = True

    @property
    def under_way(self) -> bool:
        """Whether some of it is not there yet, beyond what nobody need acknowledge; False where that cannot be told."""
        if self._delivery is not None:
            return not (self._ended or self._delivery.complete)
        if self._ended or OUTQ is None:
            return False
        transport = self._transport
        if transport is None or not self._written:
            return True
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is None:
            return False
        try:
            segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            (unacknowledged,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), OUTQ, b"\0\0\0\0"))
        except (OSError, ValueError):  # no TCP, or closed meanwhile
            return False
        return bool(transport.get_write_buffer_size() + unacknowledged > LATE_SEGMENTS * segment)

    def arrived(self, now: float) -> None:
        """It is there, unless all that is known is that the exchange is over."""
        if not self._ended:
            self.arrived_at = now


sending: ContextVar[Sending | None] = ContextVar("sending", default=None)
"""What the exchange of the current task sends."""


def tracing() -> aiohttp.TraceConfig:
    """Tells `sending` that it is written."""

    async def written(*_: object) -> None:
        picture = sending.get()
        if picture is not None:
            picture.written()  # the writing follows before anything else is done on this loop

    config = aiohttp.TraceConfig()
    config.on_request_chunk_sent.append(written)
    return config


class Connector(aiohttp.TCPConnector):
    """Tells `sending` which connection it got, and whoever wants to know that one has ended."""

    def __init__(self, ended: Callable[[], None] | None = None, **options: Any) -> None:
        """As aiohttp's; `ended` is called whenever a connection is closed, by either end."""
        super().__init__(**options)
        self._ended = ended
        self._watched: WeakSet[asyncio.Future[None]] = WeakSet()
        """Those that tell of their connections' ends, one each."""

    async def connect(
        self,
        req: ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  aiohttp's own signature
    ) -> Connection:
        """See `aiohttp.TCPConnector.connect`."""
        connection = await super().connect(req, traces, timeout)
        self._watch_end(connection)
        picture = sending.get()
        if picture is not None:
            picture.connected(connection.transport)
        return connection

    def _watch_end(self, connection: Connection) -> None:
        closed: asyncio.Future[None] | None = getattr(connection.protocol, "closed", None)  # from aiohttp 3.12 on
        if closed is None or closed in self._watched:
            return

        def ended(future: asyncio.Future[None]) -> None:
            if not future.cancelled():
                future.exception()  # why does not matter
            if self._ended is not None:
                self._ended()

        self._watched.add(closed)
        closed.add_done_callback(ended)


async def watch(picture: Sending, patience: Patience, latest_ms: float, clock: Clock) -> None:
    """Learn when a picture arrives, and call it stuck once few that are under way so long arrive before `latest_ms`.

    It ends with the exchange at the latest.
    """
    begun, waited_ms, in_time = clock.now(), 0.0, True
    worth_ms = patience.worth_ms(latest_ms, begun)
    while picture.under_way:
        if waited_ms >= worth_ms:
            picture.stuck.set()
        if waited_ms >= latest_ms and in_time:
            patience.late(waited_ms, clock.now())
            in_time = False
        await asyncio.sleep(LOOK_S)
        waited_ms = (clock.now() - begun) * 1e3
    picture.arrived(clock.now())
    if in_time:
        patience.answered(waited_ms, clock.now())
