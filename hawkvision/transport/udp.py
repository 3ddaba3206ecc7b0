"""The sockets of the lossy transport: sealed datagrams and QUIC side by side on the same UDP ports.

    LossyServer    one port; per QUIC connection a session with its `Receiver`; calls a handler per picture
    LossyClient    one socket per path; a `Sender`; `ask` sends a picture and awaits its answer

Everything that decides is in `channel`, `sender` and `receiver`, which know neither sockets nor clocks. QUIC (aioquic)
does what must not be home-made: TLS 1.3, address validation by Retry tokens, and a reliable stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Final, cast

import msgspec
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import QuicServer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, QuicEvent, StreamDataReceived

from hawkvision.errors import ConfigError, HawkVisionError, InternalError, Unauthorized
from hawkvision.transport.channel import Channel
from hawkvision.transport.coding import Arrived, Coded
from hawkvision.transport.control import (
    ALPN,
    VERSION,
    CloseCode,
    Hello,
    Message,
    MessageReader,
    StreamAnswer,
    Tables,
    Template,
    Welcome,
    encode_message,
)
from hawkvision.transport.identity import Identity
from hawkvision.transport.pacing import LossEstimate
from hawkvision.transport.quic_pacing import ALGORITHM
from hawkvision.transport.receiver import MAX_REGISTERED_BYTES, Budget, Picture, Receiver, Status
from hawkvision.transport.seal import Header, Secret, is_sealed, peek
from hawkvision.transport.sender import Sender
from hawkvision.transport.wire import WireError

log = logging.getLogger("hawkvision.transport")

MAX_SESSIONS: Final = 1024
MAX_HALF_OPEN: Final = 256
"""QUIC connections that have not said hello yet; more are refused, so that a flood costs those inside nothing."""
HELLO_TIMEOUT_S: Final = 5.0
TOTAL_BYTES: Final = 128 * 1024 * 1024
"""Unfinished pictures of all sessions."""
IDLE_S: Final = 30.0
KEEPALIVE_S: Final = 10.0
WATCH_S: Final = 1.0
SILENT_S: Final = 5.0
"""Of silence on all paths, while they are probed, after which a client connects anew. A restarted server does not know
the old session and says nothing to it."""
SOCKET_BUFFER: Final = 4 * 1024 * 1024
"""A busy loop may look away for 100 ms; 4 MB are 1.6 s of 20 Mbit/s. The kernel may grant less."""
MAX_CLIENT_TEMPLATES: Final = 255
TICK_S: Final = 0.001
"""Of timers. uvloop rounds to milliseconds, and half of one to none: it would spin."""


class ConnectionLost(HawkVisionError):
    """The connection ended; the message says why. Whoever asked may connect again."""

    code = "unreachable"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A picture for the handler. Times are of `time.monotonic`, from which event loops take theirs, more coarsely."""

    template: bytes
    meta: bytes
    arrived: Arrived
    started: float
    deadline: float | None
    better: asyncio.Future[Incoming] | None = None
    """What the picture becomes once the missing fragments, which have been asked for, came or did not."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a server has received and sent so far; bytes of UDP payloads."""

    received_bytes: int
    """QUIC's included."""
    sent_bytes: int
    """Sealed datagrams."""
    dropped: int
    """Datagrams that were no session's, forged, damaged, replayed or malformed."""


Handler = Callable[[Incoming], Awaitable[tuple[Status, bytes]]]


# ------------------------------------------------------------------------------------------------- server


class _Session:
    """One client: its receiver, its addresses, and the tasks that answer its pictures."""

    def __init__(self, server: LossyServer, number: int, protocol: _ServerProtocol, now: float) -> None:
        self.number = number
        self.secrets = (Secret.random(), Secret.random())  # the client's, ours
        channel = Channel[Any](number, self.secrets[1], self.secrets[0], now)
        self.receiver = Receiver(channel, server.budget)
        self.receiver.reserve_s = server.reserve_s
        self._server = server
        self._protocol = protocol
        self._addresses: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._better: dict[int, asyncio.Future[Incoming]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._closed = False

    def datagram(self, header: Header, data: bytes, address: Any) -> None:
        """Take a sealed datagram in."""
        if not self.receiver.receive(header, data, monotonic()):
            return
        known = self._addresses.get(header.path)
        if known != address:
            # Only authentic datagrams come here; the newest address counts once it has proven that it receives.
            if known is not None:
                self.receiver.channel.moved(header.path, len(data), monotonic())
            self._addresses[header.path] = address
        self.soon()

    @property
    def answering(self) -> bool:
        """Whether a handler is at work."""
        return bool(self._tasks)

    def soon(self) -> None:
        """Pump once, after all datagrams that are there."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self._closed:  # what was scheduled before must not set the timer again, which nobody would stop
            return
        now = monotonic()
        receiver, transport = self.receiver, self._server.transport
        self._send(transport, now)
        while receiver.events:
            self._start(receiver.events.popleft())
        while receiver.cancelled:
            self._cancel(receiver.cancelled.popleft())
        while receiver.unheard:
            number, status, body = receiver.unheard.popleft()
            self._protocol.tell(StreamAnswer(number, status, body))
        if receiver.channel.worn_out:
            self._protocol.close(CloseCode.WORN_OUT, "the key has sealed all it may")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = receiver.next_timer(now)
        if at < math.inf:
            self._timer = self._loop.call_later(max(at - now, TICK_S), self._pump)
        self._server.stirred.set()

    def _send(self, transport: asyncio.DatagramTransport, now: float) -> None:
        for path, datagram in self.receiver.poll(now):
            if (address := self._addresses.get(path)) is not None:
                self._server.sent_bytes += len(datagram)
                _send(transport, datagram, address)

    def _start(self, picture: Picture) -> None:
        better = self._better.pop(picture.number, None)
        incoming = Incoming(picture.template, picture.meta, picture.arrived, picture.started, picture.deadline)
        if better is not None:
            if not better.done():
                better.set_result(incoming)
            return
        if not picture.final:
            self._better[picture.number] = future = self._loop.create_future()
            incoming = Incoming(
                picture.template, picture.meta, picture.arrived, picture.started, picture.deadline, future
            )
        task = self._loop.create_task(self._answer(picture.number, incoming))
        self._tasks[picture.number] = task

    async def _answer(self, number: int, incoming: Incoming) -> None:
        try:
            status, body = await self._server.handler(incoming)
        except HawkVisionError as error:
            status, body = Status.REFUSED, _refusal(error)
        except Exception:  # process boundary: one picture's defect must not reach the next
            log.exception("a picture's handler failed")
            status, body = Status.REFUSED, _refusal(InternalError("the node failed on this request; its log says why"))
        finally:
            self._tasks.pop(number, None)
            self._better.pop(number, None)
        self.receiver.answer(number, status, body, monotonic())
        self.soon()

    def _cancel(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        if task is not None:
            task.cancel()
        self._better.pop(number, None)

    def close(self) -> None:
        """Stop everything that was begun."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for number in list(self._tasks):
            self._cancel(number)
        self.receiver.close()


def _refusal(error: HawkVisionError) -> bytes:
    return msgspec.json.encode({**error.body(), "status": error.status})


class _ServerProtocol(QuicConnectionProtocol):
    """The QUIC connection of one client: hello, templates, and answers that datagrams could not deliver."""

    def __init__(self, quic: QuicConnection, server: LossyServer) -> None:
        super().__init__(quic)
        self._server = server
        self._reader = MessageReader()
        self.session: _Session | None = None
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

    def tell(self, message: Message) -> None:
        """Send a message."""
        self._quic.send_stream_data(0, encode_message(message))
        self.transmit()

    def _refuse(self, code: int, why: str) -> None:
        self._refused = True
        self.close(code, why)

    def _take(self, message: Message) -> None:
        match message, self.session:
            case Hello(version, api_key), None:
                self._welcome(version, api_key)
            case Template(number, request), _Session() as session:
                session.receiver.register_template(number, request)
                session.soon()
            case Tables(number, header), _Session() as session:
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


class _Demultiplexer(QuicServer):
    """Gives sealed datagrams to their sessions and all others to QUIC."""

    lossy: LossyServer

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        """Route one datagram; what cannot be is dropped, for its sender may be forged."""
        assert isinstance(data, bytes)
        self.lossy.received_bytes += len(data)
        if not is_sealed(data):
            # Long headers carry connection ids with their length. Those half open already may finish.
            full = self.lossy.half_open >= MAX_HALF_OPEN
            if full and len(data) > 5 and data[0] & 0x80 and data[6 : 6 + data[5]] not in self._protocols:
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

    def __init__(self, handler: Handler, *, api_key: str | None, useful_side: int, reserve_s: float) -> None:
        self.handler = handler
        self.api_key = api_key
        self.useful_side = useful_side
        self.reserve_s = reserve_s
        self.budget = Budget(TOTAL_BYTES)
        self.sessions: dict[int, _Session] = {}
        self.received_bytes = self.sent_bytes = self.dropped = 0
        self.stirred = asyncio.Event()
        """Set by every session that did something: what `drain` waits for."""
        self._protocols: set[_ServerProtocol] = set()
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
        reserve_s: float = 0.01,
    ) -> LossyServer:
        """Listen on a UDP port; 0 takes a free one.

        Args:
            host: address to bind.
            port: UDP port.
            identity: the certificate.
            handler: answers pictures; its errors (`HawkVisionError`) become the caller's.
            api_key: asked of every client, if given.
            useful_side: told to clients.
            reserve_s: how long before a picture's deadline it must be handed over at the latest.

        Raises:
            ConfigError: if the address cannot be bound.
        """
        server = cls(handler, api_key=api_key, useful_side=useful_side, reserve_s=reserve_s)
        configuration = QuicConfiguration(
            is_client=False,
            alpn_protocols=[ALPN],
            congestion_control_algorithm=ALGORITHM,
            idle_timeout=IDLE_S,
            certificate=identity.chain[0],
            certificate_chain=list(identity.chain[1:]),
            private_key=identity.key,
        )
        loop = asyncio.get_running_loop()

        def endpoint() -> _Demultiplexer:
            made = _Demultiplexer(
                configuration=configuration,
                create_protocol=lambda quic, **_: server.connect(quic),
                retry=True,
            )
            made.lossy = server
            return made

        try:
            bound = _bind(host, port)
            transport, protocol = await loop.create_datagram_endpoint(endpoint, sock=bound)
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

    def connect(self, quic: QuicConnection) -> _ServerProtocol:
        """A new QUIC connection, not heard yet."""
        protocol = _ServerProtocol(quic, self)
        self._protocols.add(protocol)
        closed = asyncio.ensure_future(protocol.wait_closed())
        closed.add_done_callback(lambda _: self._protocols.discard(protocol))
        return protocol

    def open(self, protocol: _ServerProtocol) -> _Session | None:
        """A session for a client that said hello; None if there are too many."""
        if len(self.sessions) >= MAX_SESSIONS:
            return None
        number = int.from_bytes(os.urandom(4))
        while number in self.sessions:
            number = int.from_bytes(os.urandom(4))
        session = self.sessions[number] = _Session(self, number, protocol, monotonic())
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

    def forget(self, session: _Session) -> None:
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


# ------------------------------------------------------------------------------------------------- client


class _ClientSocket(asyncio.DatagramProtocol):
    """One path's socket."""

    def __init__(self, client: LossyClient, remote: Any) -> None:
        self.client = client
        self.remote = remote
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:  # noqa: ARG002 - asyncio's signature
        """Sealed datagrams to the sender, all others to QUIC."""
        self.client.datagram(data)

    def error_received(self, exc: Exception) -> None:
        """An unreachable port or network looks like loss, and is treated so."""
        log.debug("socket: %s", exc)


class _QuicWay:
    """What QUIC sends through: whichever path's socket is best now."""

    def __init__(self, client: LossyClient) -> None:
        self._client = client

    def sendto(self, data: bytes, addr: Any = None) -> None:  # noqa: ARG002 - asyncio's signature
        """Send to the server."""
        self._client.send_quic(data)


class _ClientProtocol(QuicConnectionProtocol):
    def __init__(self, quic: QuicConnection, client: LossyClient) -> None:
        super().__init__(quic)
        self._client = client
        self._reader = MessageReader()

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

    def tell(self, message: Message) -> None:
        """Send a message."""
        self._quic.send_stream_data(0, encode_message(message))
        self.transmit()

    def nudge(self) -> None:
        """Keep the connection from going idle; unlike `ping`, without waiting for what may never come."""
        self._quic.send_ping(0)
        self.transmit()


@dataclass(frozen=True, slots=True)
class Route:
    """A pair of addresses: the local one (None: any) and the server's host."""

    local: str | None
    host: str


class LossyClient:
    """A connection to a `LossyServer`. Made by `connect`; of no use once `lost` is set."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets: list[_ClientSocket] = []
        self._sender: Sender | None = None
        self._protocol: _ClientProtocol | None = None
        self._ready: asyncio.Future[Welcome] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[tuple[Status, bytes]]] = {}
        self._templates: dict[bytes, int] = {}
        self._tables: dict[bytes, int] = {}
        self._registered_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._room = asyncio.Event()
        self._quic_socket = 0
        self._hello: Hello | None = None
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
        timeout_s: float = 5.0,
    ) -> LossyClient:
        """Connect over the first route and open a session that uses all of them.

        Args:
            port: the server's UDP port.
            certificate: PEM of what the server's certificate must be or be signed by.
            name: what the certificate must be made out to.
            routes: pairs of addresses to spread fragments over, at most `MAX_PATHS`.
            api_key: if the server asks for one.
            timeout_s: for all of it.

        Raises:
            Unauthorized: if the server wants another key.
            ConnectionLost: if no session came about.
        """
        client = cls()
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
                raise Unauthorized("the node's lossy door: missing or wrong API key") from None
            raise
        return client

    async def _open(self, port: int, certificate: str, name: str, routes: Sequence[Route], api_key: str | None) -> None:
        for route in routes:
            remote = await _resolve(self._loop, route.host, port)
            local = None if route.local is None else (route.local, 0)
            _, protocol = await self._loop.create_datagram_endpoint(
                partial(_ClientSocket, self, remote), local_addr=local, remote_addr=remote
            )
            raw = protocol.transport.get_extra_info("socket")
            _grow_buffers(raw)
            self._sockets.append(protocol)
        configuration = QuicConfiguration(
            is_client=True,
            alpn_protocols=[ALPN],
            congestion_control_algorithm=ALGORITHM,
            idle_timeout=IDLE_S,
            server_name=name,
            cadata=certificate.encode(),
        )
        quic = QuicConnection(configuration=configuration)
        self._protocol = _ClientProtocol(quic, self)
        self._protocol.connection_made(_QuicWay(self))  # type: ignore[arg-type]
        self._hello = Hello(VERSION, api_key)
        self._protocol.connect(self._sockets[0].remote)
        # Not `wait_connected`: its future outlives whoever gives up waiting, and complains when the connection ends.
        welcome = await self._ready
        now = monotonic()
        channel = Channel[Any](
            welcome.session, Secret.from_bytes(welcome.client_secret), Secret.from_bytes(welcome.server_secret), now
        )
        for number in range(len(self._sockets)):
            channel.path(number, now, proven=True)
        self._sender = Sender(channel)
        self.useful_side = welcome.useful_side
        self._keepalive = asyncio.create_task(self._keep_alive())
        self._sender.greet(now)
        self._soon()

    # ----------------------------------------------------------------------------------------- asking

    @property
    def sender(self) -> Sender:
        """The sans-I/O half."""
        assert self._sender is not None, "made by connect"
        return self._sender

    def loss(self) -> LossEstimate:
        """What the paths lose, as far as is known."""
        return self.sender.loss(monotonic())

    def rtt_s(self) -> float | None:
        """The best living path's smoothed round trip."""
        return self.sender.channel.best(monotonic()).rate.rtt_s

    def silent_s(self) -> float:
        """For how long datagrams have gone unanswered on every path; 0 if nothing is waited for on one of them."""
        since = [path.waiting_since for path in self.sender.channel.paths.values()]
        waiting = [at for at in since if at is not None]
        return monotonic() - max(waiting) if len(waiting) == len(since) else 0.0

    def probe(self) -> None:
        """Send one small datagram on every path that asks for a report: losses and round trips stay known by it."""
        if self.lost is None:
            self.sender.greet(monotonic())
            self._soon()

    def spare_s(self, size: int) -> float:
        """How long that many bytes take."""
        return self.sender.spare_s(size, monotonic())

    @property
    def queued_bytes(self) -> int:
        """What has not left yet."""
        return self.sender.queued_bytes

    async def ask(
        self,
        template: bytes,
        coded: Coded,
        *,
        meta: bytes = b"",
        deadline_s: float | None = None,
        timeout_s: float = 30.0,
    ) -> tuple[Status, bytes]:
        """Send a picture, and wait for its answer.

        Args:
            template: the request; equal ones are sent once per connection.
            coded: the picture; its `format.tables` must be what `tables_number` gave, where it has tables.
            meta: what belongs to this picture alone, at most `MAX_META` bytes.
            deadline_s: from now; what would arrive later is not sent.
            timeout_s: how long to wait at most.

        Raises:
            TimeoutError: if no answer came.
            ConnectionLost: if the connection ended meanwhile.
        """
        if self.lost is not None:
            raise ConnectionLost(self.lost)
        sender, number = self.sender, None
        started = monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while sender.full:
                    self._room.clear()
                    await self._room.wait()
                    if self.lost is not None:
                        raise ConnectionLost(self.lost)
                now = monotonic()
                deadline = None if deadline_s is None else started + deadline_s
                number = sender.submit(self._template(template), coded, deadline, meta, now)
                future: asyncio.Future[tuple[Status, bytes]] = self._loop.create_future()
                self._waiting[number] = future
                self._pump()
                return await future
        finally:
            if number is not None and self._waiting.pop(number, None) is not None and self.lost is None:
                sender.cancel(number)
                self._soon()
            self._room.set()

    def tables_number(self, header: bytes) -> int | None:
        """The number under which the server knows a JPEG header; None when there are too many."""
        return self._number(self._tables, header, 1, lambda number: Tables(number, header))

    def _template(self, request: bytes) -> int:
        number = self._number(self._templates, request, 0, lambda number: Template(number, request))
        if number is None:
            self._end("more kinds of requests than one connection carries")
            raise ConnectionLost(self.lost or "")
        return number

    def _number(
        self, known: dict[bytes, int], content: bytes, first: int, message: Callable[[int], Message]
    ) -> int | None:
        number = known.get(content)
        if number is None:
            if len(known) >= MAX_CLIENT_TEMPLATES or self._registered_bytes + len(content) > MAX_REGISTERED_BYTES:
                return None
            self._registered_bytes += len(content)
            number = known[content] = len(known) + first
            assert self._protocol is not None
            self._protocol.tell(message(number))
        return number

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
            self._deliver()
            self._soon()

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

    def message(self, message: Message) -> None:
        """Take a control message in."""
        match message:
            case Welcome():
                if not self._ready.done():
                    self._ready.set_result(message)
            case StreamAnswer(picture, status, body):
                if self._sender is not None:
                    self._sender.answer(picture, status, body)
                    self._deliver()
            case _:
                raise WireError(f"a {type(message).__name__} message is out of place here")

    def secured(self) -> None:
        """The handshake is over: nobody else hears what is said now."""
        assert self._protocol is not None
        assert self._hello is not None
        self._protocol.tell(self._hello)

    def ended(self, code: int, reason: str) -> None:
        """QUIC is over."""
        self.unauthorized = code == CloseCode.UNAUTHORIZED
        self._end(reason or f"the connection was closed with code {code}")

    def _soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self._sender is None or self.lost is not None:
            return
        now = monotonic()
        for path, datagram in self._sender.poll(now):
            self.sent_bytes += len(datagram)
            _send(self._sockets[path].transport, datagram)
        self._follow(now)
        if self._sender.channel.worn_out:
            self._end("the key has sealed all it may")
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._sender.next_timer(now)
        if at < math.inf:
            self._timer = self._loop.call_later(max(at - now, TICK_S), self._pump)

    def _deliver(self) -> None:
        while self.sender.answered:
            answer = self.sender.answered.popleft()
            future = self._waiting.pop(answer.picture, None)
            if future is not None and not future.done():
                try:
                    future.set_result((Status(answer.status), answer.body))
                except ValueError:
                    future.set_exception(ConnectionLost(f"answer status {answer.status} is not known"))
            self._room.set()

    def _end(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = why
        if self._timer is not None:
            self._timer.cancel()
        waiting: list[asyncio.Future[Any]] = [*self._waiting.values(), self._ready]
        for future in waiting:
            if not future.done():
                future.set_exception(ConnectionLost(why))
                future.exception()  # nobody may be waiting any more
        self._waiting.clear()
        self._room.set()

    async def _keep_alive(self) -> None:
        """Keep addresses and QUIC alive, and notice when nobody is there any more, long before QUIC does."""
        assert self._protocol is not None
        greet_at, opened_at = 0.0, monotonic()
        while self.lost is None:
            await asyncio.sleep(WATCH_S)
            now, channel = monotonic(), self.sender.channel
            heard = max(opened_at, *(path.heard_at for path in channel.paths.values()))
            if all(path.dead(now) for path in channel.paths.values()) and heard < now - SILENT_S:
                self._protocol.close(CloseCode.NONE, "silent")
                self._end(f"nothing was heard from the server for {SILENT_S:g} s")
            elif now >= greet_at:
                greet_at = now + KEEPALIVE_S
                self.sender.greet(now)
                self._soon()
                self._protocol.nudge()

    async def close(self) -> None:
        """End the session; what is still waited for is told so."""
        if self._keepalive is not None:
            self._keepalive.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keepalive
        if self._protocol is not None and self.lost is None:
            self._protocol.close(CloseCode.NONE, "done")
        self._end("the connection was closed at this end")
        await asyncio.sleep(0)
        for each in self._sockets:
            each.transport.close()


def _send(transport: Any, datagram: bytes, address: Any = None) -> None:
    """Send, or lose what waits behind more than a socket's buffer: asyncio's own queue has no bound."""
    if transport.get_write_buffer_size() < SOCKET_BUFFER:
        transport.sendto(datagram, address)


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    _grow_buffers(bound)
    return bound


def _grow_buffers(bound: Any) -> None:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with contextlib.suppress(OSError):
            bound.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> Any:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        return found[0][4]
    return (host, port)
