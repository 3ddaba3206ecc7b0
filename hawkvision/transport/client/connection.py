"""The client of the datagram transport: one socket per path, and `ask`, which sends an image and awaits its answer.

    ask ─► Sender ─► sealed datagrams ───┬─► one socket per path ◄─► server
           ClientProtocol ─► QuicWay ────┘   (QUIC: over one whose path lives)

Everything that decides is in `channel` and `sender`, which know neither sockets nor clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from aioquic.quic.connection import QuicConnection

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import BadField, Unauthorized
from hawkvision.servers.keys import prove
from hawkvision.transport.client.pending_responses import ConnectionLost, PendingResponses, ignore_interim
from hawkvision.transport.client.sender import Sender
from hawkvision.transport.coding.image_coding import Coded
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_meter import LossEstimate
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.endpoint.channel import Channel
from hawkvision.transport.endpoint.quic import ClientProtocol, QuicWay, client_configuration
from hawkvision.transport.endpoint.udp import TICK_S, PathSocket, Route, bursts, open_path
from hawkvision.transport.protocol.control import (
    MAX_TEMPLATE,
    VERSION,
    CloseCode,
    Hello,
    Message,
    StreamAnswer,
    Welcome,
)
from hawkvision.transport.protocol.exporter import KEY_PROOF
from hawkvision.transport.protocol.identity import pin_of
from hawkvision.transport.protocol.packet_protection import Secret, is_sealed, peek
from hawkvision.transport.protocol.status import Status
from hawkvision.transport.protocol.wire import WireError

log = logging.getLogger("hawkvision.transport")

KEEPALIVE_S: Final = 10.0
WATCH_S: Final = 1.0
SILENT_S: Final = 5.0
"""Of silence on all paths, while they are probed, after which a client connects anew. A restarted server does not know
the old session and says nothing to it."""


class Exhausted(ConnectionLost):
    """The connection carries no further kind of request; what is under way on it goes on."""


class PathEstimates:
    """What a connection knows of its paths now."""

    _sender: Sender | None

    @property
    def sender(self) -> Sender:
        """The sans-I/O half."""
        assert self._sender is not None, "made by connect"
        return self._sender

    def loss(self) -> LossEstimate:
        """What the paths lose, as far as is known."""
        return self.sender.loss(monotonic())

    def rtt_s(self) -> float | None:
        """The best living path's round trip, smoothed unless it has just grown."""
        return self.sender.channel.best(monotonic()).rate.latest_rtt_s

    def repair_s(self) -> float:
        """How long it may take over the best living path until what is asked for again is there."""
        return self.sender.channel.best(monotonic()).rate.repair_s()

    @property
    def behind(self) -> bool:
        """Whether reports are late on every path: the link may have become slower than it was measured to be."""
        now = monotonic()
        return all(path.behind(now) for path in self.sender.channel.paths.values())

    def silent_s(self) -> float:
        """For how long datagrams have gone unanswered on every path; 0 if nothing is waited for on one of them."""
        since = [path.waiting_since for path in self.sender.channel.paths.values()]
        waiting = [at for at in since if at is not None]
        return monotonic() - max(waiting) if len(waiting) == len(since) else 0.0

    def spare_s(self, size: int) -> float:
        """How long that many bytes take."""
        return self.sender.spare_s(size, monotonic())

    @property
    def queued_bytes(self) -> int:
        """What has not left yet."""
        return self.sender.queued_bytes


class DatagramClient(PathEstimates):
    """A connection to a `DatagramListener`. Made by `connect`; of no use once `lost` is set."""

    def __init__(self, congestion: CongestionFactory = LossTolerant) -> None:
        self._congestion = congestion
        self._loop = asyncio.get_running_loop()
        self._sockets: list[PathSocket] = []
        self._sender = None
        self._protocol: ClientProtocol | None = None
        self._ready: asyncio.Future[Welcome] = self._loop.create_future()
        self._pending = PendingResponses()
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._quic_socket = 0
        self._api_key: str | None = None
        self._keepalive: asyncio.Task[None] | None = None
        self.lost: str | None = None
        """Why the connection ended."""
        self.unauthorized = False
        self.useful_side = 65535
        self.sent_bytes = 0
        """Of UDP payloads, QUIC's included."""

    @classmethod
    async def connect(
        cls,
        port: int,
        certificate: str,
        name: str,
        *,
        routes: Sequence[Route],
        api_key: str | None = None,
        congestion: CongestionFactory = LossTolerant,
        timeout_s: float = 5.0,
    ) -> DatagramClient:
        """Connect over the first route and open a session that uses all of them.

        Args:
            port: the server's UDP port.
            certificate: PEM, whose first certificate the server must show, bit for bit. Dates do not matter.
            name: what is asked for in the handshake.
            routes: pairs of addresses to spread fragments over, at most `MAX_PATHS`.
            api_key: if the server asks for one. It is proved, never sent.
            congestion: makes each path's congestion controller.
            timeout_s: for all of it.

        Raises:
            Unauthorized: if the server wants another key.
            ConnectionLost: if no session came about.
        """
        client = cls(congestion)
        try:
            async with asyncio.timeout(timeout_s):
                await client._open(port, certificate, name, routes, api_key)
        except (TimeoutError, OSError, ConnectionError) as error:
            why = client.lost or f"no session with UDP {routes[0].host}:{port} within {timeout_s:g} s ({error})"
            await client.close()
            raise ConnectionLost(why) from None
        except BaseException:
            await client.close()
            if client.unauthorized:
                raise Unauthorized(f"datagrams of UDP {routes[0].host}:{port}: {client.lost}") from None
            raise
        return client

    async def _open(self, port: int, certificate: str, name: str, routes: Sequence[Route], api_key: str | None) -> None:
        for route in routes:
            self._sockets.append(await open_path(self._loop, route, port, self.datagram))
        try:
            pin = pin_of(certificate)
        except ValueError as error:
            raise ConnectionLost(f"the certificate that was told of is no PEM certificate: {error}") from None
        quic = QuicConnection(configuration=client_configuration(name))
        self._protocol = ClientProtocol(quic, self, pin)
        self._protocol.connection_made(QuicWay(self.send_quic))  # type: ignore[arg-type]
        self._api_key = api_key
        self._protocol.connect(self._sockets[0].remote)
        # Not `wait_connected`: its future outlives whoever gives up waiting, and complains when the connection ends.
        welcome = await self._ready
        now = monotonic()
        channel = Channel[Any](
            welcome.session,
            Secret.from_bytes(welcome.client_secret),
            Secret.from_bytes(welcome.server_secret),
            now,
            self._congestion,
        )
        for number in range(len(self._sockets)):
            channel.path(number, now, proven=True)
        self._sender = Sender(channel)
        self.useful_side = welcome.useful_side
        self._keepalive = asyncio.create_task(self._keep_alive())
        self._sender.ping(now)
        self._schedule_flush()

    # ----------------------------------------------------------------------------------------- asking

    def probe(self) -> None:
        """Send one small datagram on every path that asks for a report: losses and round trips stay known by it."""
        if self.lost is None:
            self.sender.ping(monotonic())
            self._schedule_flush()

    async def ask(
        self,
        template: bytes,
        coded: Coded,
        *,
        meta: bytes = b"",
        deadline_s: float | None = None,
        timeout_s: float = 30.0,
        on_interim: Callable[[bytes], None] = ignore_interim,
        late_s: float = 0.0,
    ) -> tuple[Status, bytes]:
        """Send an image, and wait for its answer.

        Args:
            template: the request; equal ones are sent once per connection.
            coded: the image; its `format.tables` must be what `tables_number` gave, where it has tables.
            meta: what belongs to this image alone, at most `MAX_META` bytes.
            deadline_s: from now; what would arrive later is not sent.
            timeout_s: how long to wait at most.
            on_interim: called with what the server says before the answer, if it does.
            late_s: for how long after its deadline it is worth sending.

        Raises:
            TimeoutError: if no answer came.
            Exhausted: if the peer has been told of as many requests as there are numbers, and this is another.
            ConnectionLost: if the connection ended meanwhile.
            BadField: if the request is longer than `MAX_TEMPLATE`.
        """
        if self.lost is not None:
            raise ConnectionLost(self.lost)
        if len(template) > MAX_TEMPLATE:
            raise BadField(f"the request's fields take {len(template)} bytes; by datagrams at most {MAX_TEMPLATE} go")
        sender, number = self.sender, None
        started = monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while sender.full:
                    await self._pending.fewer()
                    if self.lost is not None:
                        raise ConnectionLost(self.lost)
                now = monotonic()
                deadline = None if deadline_s is None else Deadline.after_s(deadline_s, started)
                number = sender.submit(self._template(template), coded, deadline, meta, now, late_s)
                future = self._pending.add(number, on_interim)
                self._flush()
                return await future
        finally:
            if number is not None and self._pending.remove(number) and self.lost is None:
                sender.cancel(number)
                self._schedule_flush()

    def tables_number(self, header: bytes) -> int | None:
        """The number under which the server knows a JPEG header; None when there are too many."""
        assert self._protocol is not None
        return self._protocol.tables_number(header)

    def _template(self, request: bytes) -> int:
        assert self._protocol is not None
        number = self._protocol.template_number(request)
        if number is None:
            raise Exhausted("more kinds of requests than one connection carries")
        return number

    async def decided(self) -> None:
        """Return when nobody waits for an answer."""
        await self._pending.all_ended()

    # ----------------------------------------------------------------------------------------- sockets

    def datagram(self, data: bytes) -> None:
        """Take a datagram in."""
        if not is_sealed(data):
            if self._protocol is not None:
                self._protocol.datagram_received(data, self._sockets[0].remote)
            return
        if self._sender is None or self.lost is not None:
            return
        try:
            header = peek(data)
        except WireError:
            return
        if header.path < len(self._sockets) and self._sender.receive(header, data, monotonic()):
            self._pending.deliver(self._sender)
            self._schedule_flush()

    def send_quic(self, data: bytes) -> None:
        """Over the socket QUIC uses now: another one when its path is dead; the server follows (RFC 9000 §9)."""
        if self._sender is not None:
            now, paths = monotonic(), self._sender.channel.paths
            if paths[self._quic_socket].dead(now):
                self._quic_socket = self._sender.channel.best(now).number
        if not self._sockets[self._quic_socket].transport.is_closing():
            self.sent_bytes += len(data)
            self._sockets[self._quic_socket].transport.sendto(data)

    def _follow(self, now: float) -> None:
        """When the path under QUIC has died, send on another: the server's answers by the stream follow there."""
        channel = self.sender.channel
        if channel.paths[self._quic_socket].dead(now) and not channel.best(now).dead(now):
            assert self._protocol is not None
            self._protocol.nudge()

    def on_message(self, message: Message) -> None:
        """Take a control message in."""
        match message:
            case Welcome():
                if not self._ready.done():
                    self._ready.set_result(message)
            case StreamAnswer(image, status, body):
                if self._sender is not None:
                    self._sender.answer(image, status, body)
                    self._pending.deliver(self._sender)
            case _:
                raise WireError(f"a {type(message).__name__} message is out of place here")

    def on_secured(self) -> None:
        """The handshake with the server that was expected is over: nobody else hears what is said now."""
        assert self._protocol is not None
        proof = None
        if self._api_key is not None:
            proof = prove(self._api_key.rstrip(), self._protocol.exporter.export(KEY_PROOF))
        self._protocol.send_message(Hello(VERSION, proof))

    def on_closed(self, code: int, reason: str) -> None:
        """QUIC is over."""
        self.unauthorized = code == CloseCode.UNAUTHORIZED
        self._end(reason or f"the connection was closed with code {code}")

    def _schedule_flush(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._sender is None or self.lost is not None:
            return
        now = monotonic()
        for path, burst in bursts(self._sender.poll(now)):
            self.sent_bytes += sum(map(len, burst))
            self._sockets[path].send(burst)
        self._follow(now)
        if self._sender.channel.key_exhausted:
            self._close(CloseCode.KEY_EXHAUSTED, "the key has sealed all it may")
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._sender.next_timer(now)
        if at < math.inf:
            self._timer = self._loop.call_later(max(at - now, TICK_S), self._flush)

    def _close(self, code: int, why: str) -> None:
        """Tell the server, which would wait for the connection to go idle, and end."""
        if self._protocol is not None and self.lost is None:
            self._protocol.close(code, why)
        self._end(why)

    def _end(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = why
        if self._timer is not None:
            self._timer.cancel()
        if not self._ready.done():
            self._ready.set_exception(ConnectionLost(why))
            self._ready.exception()  # nobody may be waiting any more
        self._pending.fail(why)

    async def _keep_alive(self) -> None:
        """Keep addresses and QUIC alive, and notice when nobody is there any more, long before QUIC does."""
        assert self._protocol is not None
        greet_at, opened_at = 0.0, monotonic()
        while self.lost is None:
            await asyncio.sleep(WATCH_S)
            now, channel = monotonic(), self.sender.channel
            heard = max(opened_at, *(path.heard_at for path in channel.paths.values()))
            if all(path.dead(now) for path in channel.paths.values()) and heard < now - SILENT_S:
                self._close(CloseCode.NONE, f"nothing was heard from the server for {SILENT_S:g} s")
            elif now >= greet_at:
                greet_at = now + KEEPALIVE_S
                self.sender.ping(now)
                self._schedule_flush()
                self._protocol.nudge()

    async def close(self) -> None:
        """End the session; what is still waited for is told so."""
        if self._keepalive is not None:
            self._keepalive.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keepalive
        self._close(CloseCode.NONE, "the connection was closed at this end")
        await asyncio.sleep(0)
        for each in self._sockets:
            each.transport.close()
