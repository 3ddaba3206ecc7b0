"""The client's connection: one socket per path, and `ask`, which sends an image and waits for its response.

    ask ─► Sender ─► sealed datagrams ───┬─► one socket per path ◄─► server
           ClientProtocol ─► QuicWay ────┘   (QUIC: over a living path)

All decisions are in `endpoint.channel` and `sender`, which know neither sockets nor clocks.
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
from hawkvision.transport.endpoint.udp import TICK_S, PathSocket, UdpRoute, bursts, open_path
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
from hawkvision.transport.protocol.packet_protection import Secret, is_sealed, peek
from hawkvision.transport.protocol.server_certificate import pin_of
from hawkvision.transport.protocol.wire import Status, WireError


class PathEstimates:
    """Loss, round trips and silence of a connection's paths."""

    _sender: Sender | None

    @property
    def sender(self) -> Sender:
        """The part without sockets."""
        assert self._sender is not None, "made by connect"
        return self._sender

    def loss(self) -> LossEstimate:
        """The worst loss of the living paths, as far as it is known."""
        return self.sender.loss(monotonic())

    def rtt_s(self) -> float | None:
        """The best living path's round trip: smoothed, unless it has just grown."""
        return self.sender.channel.best(monotonic()).rate.latest_rtt_s

    def least_rtt_s(self) -> float | None:
        """The best living path's round trip without queues."""
        return self.sender.channel.best(monotonic()).rate.least_rtt_s

    def repair_s(self) -> float:
        """The time from a request for a fragment to its arrival, over the best living path."""
        return self.sender.channel.best(monotonic()).rate.repair_s()

    @property
    def behind(self) -> bool:
        """Whether reports are late on every path: the link may have become slower than measured."""
        now = monotonic()
        return all(path.behind(now) for path in self.sender.channel.paths.values())

    def silent_s(self) -> float:
        """How long datagrams have gone unanswered on every path; 0 if one of them waits for nothing."""
        since = [path.waiting_since for path in self.sender.channel.paths.values()]
        waiting = [at for at in since if at is not None]
        return monotonic() - max(waiting) if len(waiting) == len(since) else 0.0

    def spare_s(self, size: int) -> float:
        """How long the link takes to carry `size` bytes."""
        return self.sender.spare_s(size, monotonic())

    @property
    def queued_bytes(self) -> int:
        """The bytes that have not left yet."""
        return self.sender.queued_bytes


log = logging.getLogger("hawkvision.transport")

KEEPALIVE_S: Final = 10.0
WATCH_S: Final = 1.0
SILENT_S: Final = 5.0
"""After this silence on all paths, while they are probed, the connection ends. A restarted server does not know the old
session and never replies to it."""


class Exhausted(ConnectionLost):
    """The connection takes no further kind of request; its images in progress go on."""


class ClientConnection(PathEstimates):
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
        """Why the connection ended; None while it is alive."""
        self.unauthorized = False
        self.useful_side = 65535
        self.sent_bytes = 0
        """Bytes of UDP payloads, QUIC included."""

    @classmethod
    async def connect(
        cls,
        port: int,
        certificate: str,
        name: str,
        *,
        routes: Sequence[UdpRoute],
        api_key: str | None = None,
        congestion: CongestionFactory = LossTolerant,
        timeout_s: float = 5.0,
    ) -> ClientConnection:
        """Connect over the first route and open a session that uses all of them.

        Args:
            port: the server's UDP port.
            certificate: PEM; the server must show its first certificate, bit for bit. Dates do not matter.
            name: for the handshake.
            routes: at most `MAX_PATHS` pairs of addresses that share the fragments.
            api_key: if the server asks for one. The client proves that it has the key and never sends it.
            congestion: makes each path's congestion controller.
            timeout_s: in all.

        Raises:
            Unauthorized: if the server wants another key.
            ConnectionLost: if no session was opened.
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

    async def _open(
        self, port: int, certificate: str, name: str, routes: Sequence[UdpRoute], api_key: str | None
    ) -> None:
        for route in routes:
            self._sockets.append(await open_path(self._loop, route, port, self.datagram))
        try:
            pin = pin_of(certificate)
        except ValueError as error:
            raise ConnectionLost(f"the advertised certificate is not PEM: {error}") from None
        quic = QuicConnection(configuration=client_configuration(name))
        self._protocol = ClientProtocol(quic, self, pin)
        self._protocol.connection_made(QuicWay(self.send_quic))  # type: ignore[arg-type]
        self._api_key = api_key
        self._protocol.connect(self._sockets[0].remote)
        # Not `wait_connected`: its future outlives a cancelled wait, and logs an error when the connection ends.
        welcome = await self._ready
        now = monotonic()
        channel = Channel[Any](
            welcome.session,
            Secret.from_bytes(welcome.client_secret),
            Secret.from_bytes(welcome.server_secret),
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
        """Send a small datagram on every path; its report keeps losses and round trips known."""
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
        """Send an image, and wait for its response.

        Args:
            template: the request; equal ones are sent once per connection.
            coded: the image; `format.tables`, if it has any, is from `tables_number`.
            meta: what belongs to this image alone, at most `MAX_META` bytes.
            deadline_s: from now; a fragment that would arrive later is not sent.
            timeout_s: the longest wait.
            on_interim: takes what the server sends before the response.
            late_s: how long after its deadline the image is still sent.

        Raises:
            TimeoutError: if no response came.
            Exhausted: if all request numbers are in use and this request has none.
            ConnectionLost: if the connection ended.
            BadField: if the request is longer than `MAX_TEMPLATE`.
        """
        if self.lost is not None:
            raise ConnectionLost(self.lost)
        if len(template) > MAX_TEMPLATE:
            raise BadField(f"the request's fields take {len(template)} bytes; datagrams carry at most {MAX_TEMPLATE}")
        sender, number = self.sender, None
        started = monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while sender.full:
                    await self._pending.wait_for_one()
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
        """The number by which the server knows a JPEG header; None if there are too many."""
        assert self._protocol is not None
        return self._protocol.tables_number(header)

    def _template(self, request: bytes) -> int:
        assert self._protocol is not None
        number = self._protocol.template_number(request)
        if number is None:
            raise Exhausted("the connection takes no further kind of request")
        return number

    async def wait_until_idle(self) -> None:
        """Return when no image waits for a response."""
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
        """Send over QUIC's socket; if its path is dead, over another one, and the server follows (RFC 9000 §9)."""
        if self._sender is not None:
            now, paths = monotonic(), self._sender.channel.paths
            if paths[self._quic_socket].dead(now):
                self._quic_socket = self._sender.channel.best(now).number
        if not self._sockets[self._quic_socket].transport.is_closing():
            self.sent_bytes += len(data)
            self._sockets[self._quic_socket].transport.sendto(data)

    def _follow(self, now: float) -> None:
        """If QUIC's path has died, send on another one, and the server's stream responses follow."""
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
        """The handshake with the expected server is complete."""
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
            self._close(CloseCode.KEY_EXHAUSTED, "the key has protected as many datagrams as it may")
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._sender.next_timer(now)
        if at < math.inf:
            self._timer = self._loop.call_later(max(at - now, TICK_S), self._flush)

    def _close(self, code: int, why: str) -> None:
        """End the connection and tell the server, which would otherwise wait for it to go idle."""
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
            self._ready.exception()  # taken, in case that nobody waits
        self._pending.fail(why)

    async def _keep_alive(self) -> None:
        """Keep addresses and QUIC alive, and notice a gone server long before QUIC does."""
        assert self._protocol is not None
        greet_at, opened_at = 0.0, monotonic()
        while self.lost is None:
            await asyncio.sleep(WATCH_S)
            now, channel = monotonic(), self.sender.channel
            received = max(opened_at, *(path.received_at for path in channel.paths.values()))
            if all(path.dead(now) for path in channel.paths.values()) and received < now - SILENT_S:
                self._close(CloseCode.NONE, f"the server was silent for {SILENT_S:g} s")
            elif now >= greet_at:
                greet_at = now + KEEPALIVE_S
                self.sender.ping(now)
                self._schedule_flush()
                self._protocol.nudge()

    async def close(self) -> None:
        """End the session; pending calls of `ask` raise `ConnectionLost`."""
        if self._keepalive is not None:
            self._keepalive.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keepalive
        self._close(CloseCode.NONE, "the connection was closed at this end")
        await asyncio.sleep(0)
        for each in self._sockets:
            each.transport.close()
