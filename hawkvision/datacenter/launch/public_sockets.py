"""The tier's public sockets: the launcher opens them once, and hands them to the ingress replicas that serve.

A socket that is handed over (SCM_RIGHTS, unix(7)) stays the same: it keeps its port and its waiting connections,
whatever network the process is in and however often the process is replaced. While no replica serves, because none is
connected or each is leaving or silent, the launcher itself answers callers: 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.core.escalation_api import Transports
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.ingress.launcher_socket import (
    BEAT_S,
    Acceptor,
    IngressState,
    Instruction,
    MessageSocket,
    accept_ingress,
    listen_for_ingress,
)
from hawkvision.transport.endpoint.udp import bind
from hawkvision.transport.settings import DatagramSettings

BACKLOG: Final = 1024
"""Connections that wait for `accept`; the kernel may allow fewer (net.core.somaxconn)."""


class PublicSockets:
    """The sockets where callers reach the tier. Close them."""

    def __init__(self, config: DatacenterConfig) -> None:
        """Listen at the addresses of the settings; port 0 takes a free one.

        Raises:
            ConfigError: if an address cannot be listened on.
        """
        try:
            self.http = _listen(config.host, config.port)
        except OSError as error:
            raise ConfigError(f"dc.host, dc.port: cannot listen on {config.host}:{config.port}: {error}") from None
        self.datagrams: socket.socket | None = None
        port = config.feature(DatagramSettings).port
        if port is None:
            return
        try:
            self.datagrams = bind(config.host, port)
        except OSError as error:
            self.http.close()
            raise ConfigError(
                f"dc.host, dc.datagram_port: cannot listen on UDP {config.host}:{port}: {error}"
            ) from None

    @property
    def inodes(self) -> frozenset[int]:
        """Their inode numbers in /proc/net."""
        return frozenset(os.fstat(its.fileno()).st_ino for its in (self.http, self.datagrams) if its is not None)

    @property
    def shown_host(self) -> str:
        """The address as in a URL."""
        host = str(self.http.getsockname()[0])
        return f"[{host}]" if ":" in host else host

    def close(self) -> None:
        """Close them in this process; they stay open in others."""
        self.http.close()
        if self.datagrams is not None:
            self.datagrams.close()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket that names its protocol.

    asyncio disables Nagle's algorithm only if the protocol is TCP, not the 0 of `socket.create_server`; otherwise each
    reply would wait for the caller's delayed acknowledgement.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


_CONNECTIONS: Final = 256
"""At once; more are closed."""
_ANSWER_S: Final = 2.0
"""The time for a caller to send its request and to disconnect."""
_TLS_HANDSHAKE: Final = 0x16
"""The first byte of a TLS record that begins one (RFC 8446 §5.1)."""


def _not_ready() -> bytes:
    error = NotReady("the datacenter tier is starting")
    body = msgspec.json.encode(error.body())
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_NOT_READY: Final = _not_ready()


class StandbyListener:
    """Answers 503 to all callers while no ingress replica does."""

    def __init__(self, listener: socket.socket) -> None:
        self._acceptor = Acceptor(listener, self._accepted)
        self._answering: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Accept callers from now on."""
        self._acceptor.open()

    def close(self) -> None:
        """Leave the socket to others; accepted callers still get their answer."""
        self._acceptor.close()

    def _accepted(self, caller: socket.socket) -> None:
        if len(self._answering) >= _CONNECTIONS:
            caller.close()
            return
        task = asyncio.create_task(self._answer(caller))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, caller: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        caller.setblocking(False)
        with caller, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                head = await loop.sock_recv(caller, 65536)
                if not head or head[0] == _TLS_HANDSHAKE:  # TLS has no such answer before a handshake
                    return
                await loop.sock_sendall(caller, _NOT_READY)
                caller.shutdown(socket.SHUT_WR)
                # Read and drop the rest, or the kernel would reset the connection and lose the answer.
                while await loop.sock_recv(caller, 65536):
                    pass


log = logging.getLogger("hawkvision.datacenter")

SILENT_S: Final = 3.0
"""An ingress replica that is silent for longer is suspended, or hangs."""
MAX_LINKS: Final = 256
"""Connections at once; the settings allow fewer ingress replicas."""
_CLOSING_S: Final = 1.0
"""What a drained replica may take to disconnect, beyond its time to drain."""


@dataclass(eq=False)
class _Link:
    """One connected ingress replica."""

    channel: MessageSocket[IngressState]
    received_at: float
    """When its last message came, in loop time."""
    serves: bool = False
    silent: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class IngressLinks:
    """The ingress replicas of one tier process. `open` first, within a running loop; then `close`."""

    def __init__(self, path: Path, sockets: PublicSockets, standby: StandbyListener, restarts: int) -> None:
        self.serving = asyncio.Event()
        """Set while a replica serves."""
        self._path = path
        self._sockets = sockets
        self._standby = standby
        self._restarts = restarts
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self._datagrams_at: _Link | None = None
        """The replica that has the UDP socket."""
        self._offer: Transports | None = None
        self._draining = False
        self._listener: socket.socket | None = None
        self._watching: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Let replicas connect.

        Raises:
            OSError: if the listening socket cannot be made.
        """
        self._listener = listen_for_ingress(self._path, MAX_LINKS)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
        self._watching = asyncio.create_task(self._watch())

    def reload(self) -> None:
        """Have all replicas read keys and certificates again."""
        for link in self._links:
            link.channel.send(Instruction("reload"))

    async def drain(self, within_s: float) -> None:
        """Leave new callers to the standby listener, and wait until the replicas have answered those inside."""
        self._draining = True
        links = list(self._links)
        for link in links:
            link.serves = False
            link.channel.send(Instruction("drain", within_s=within_s))
        self._update()
        waiting = [asyncio.create_task(link.gone.wait()) for link in links]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=within_s + _CLOSING_S)
            for task in late:
                task.cancel()

    async def close(self) -> None:
        """Disconnect all."""
        self._draining = True
        if self._watching is not None:
            self._watching.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
        tasks = tuple(self._links.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self) -> None:
        assert self._listener is not None, "open"
        channel = accept_ingress(self._listener)
        if channel is None:
            return
        if self._draining or len(self._links) >= MAX_LINKS:
            channel.close()
            return
        link = _Link(channel, asyncio.get_running_loop().time())
        self._links[link] = asyncio.create_task(self._attend(link))

    async def _attend(self, link: _Link) -> None:
        """Handle the messages of a replica until it disconnects."""
        try:
            if not link.channel.send(Instruction("accept", restarts=self._restarts), self._sockets.http):
                return
            if self._offer is not None:
                link.channel.send(Instruction("offer", transports=self._offer))
            while True:
                state, passed = await link.channel.receive()
                if passed is not None:
                    passed.close()
                self._handle(link, state)
        except ConnectionError:
            pass
        finally:
            del self._links[link]
            link.serves = False
            link.channel.close()
            link.gone.set()
            if self._datagrams_at is link:
                self._datagrams_at = None
            self._update()

    def _handle(self, link: _Link, state: IngressState) -> None:
        link.received_at = asyncio.get_running_loop().time()
        if link.silent:
            link.silent = False
            log.info("an ingress replica responds again")
        link.serves = state.serves and not self._draining
        if link is self._datagrams_at and state.transports not in (None, self._offer):
            self._offer = state.transports
            for other in self._links:
                if other is not link:
                    other.channel.send(Instruction("offer", transports=self._offer))
        self._update()

    def _update(self) -> None:
        """Open or close the standby listener, and see that a replica has the UDP socket."""
        serving = [link for link in self._links if link.serves and not link.silent]
        if not serving:
            self.serving.clear()
            self._standby.open()
            return
        self.serving.set()
        self._standby.close()
        # A silent replica keeps the socket: as soon as it goes on, it would read from it beside the next one.
        if self._datagrams_at is None and self._sockets.datagrams is not None:
            first = serving[0]
            if first.channel.send(Instruction("datagrams"), self._sockets.datagrams):
                self._datagrams_at = first

    async def _watch(self) -> None:
        """Notice silent replicas, unless this process was suspended itself: then their messages are still unread."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + BEAT_S
            await asyncio.sleep(BEAT_S)
            if loop.time() > due + BEAT_S:
                continue
            for link in self._links:
                if link.serves and not link.silent and loop.time() - link.received_at > SILENT_S:
                    link.silent = True
                    log.warning("an ingress replica has been silent for %g s", SILENT_S)
            self._update()
