"""A bad link for UDP on this machine: a relay that treats packets as `loadgen.network.link_model` says.

It needs no privileges; `loadgen.network.tun_link` does the same to real kernel TCP and needs root.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeAlias

from hawkvision.core.errors import ConfigError
from loadgen.clients.timer import Timer
from loadgen.network.link_model import BATCH, LinkPipe, PacketCounts
from loadgen.network.link_spec import LinkSpec

UDP_OVERHEAD_BYTES: Final = 28
"""IPv4 and UDP headers, which the relay does not see and the link would carry."""


Address: TypeAlias = tuple[str, int]
Entering: TypeAlias = Callable[[], AbstractContextManager[object]]
_SocketAddress: TypeAlias = tuple[str, int] | tuple[str, int, int, int]


@dataclass(slots=True, eq=False)
class _Client:
    """One client and the socket that stands for it before the upstream."""

    address: _SocketAddress
    upstream: socket.socket
    active_at: float


class UdpRelay:
    """A UDP relay on loopback that treats what passes as a link would. Use it as an async context manager.

    Clients send to `address`; each gets a socket of its own towards `upstream`, so the upstream sees one address per
    client. All share one bottleneck per direction. Specs may be set, and the path cut, while packets are under way.

    Args:
        upstream: where packets go.
        up: the link from clients to the upstream; `down` is the way back, the same spec if None.
        listen: where clients send; port 0 takes a free one.
        max_clients: sockets towards the upstream; beyond that, packets of new clients are dropped (`refused`).
        idle_s: silence after which a client's socket is closed.
        listens_in: enters the network namespace in which clients send here; none is entered by default.
        sends_in: that in which the upstream is; likewise.
    """

    def __init__(
        self,
        upstream: Address,
        up: LinkSpec,
        down: LinkSpec | None = None,
        *,
        listen: Address = ("127.0.0.1", 0),
        max_clients: int = 64,
        idle_s: float = 60.0,
        listens_in: Entering = contextlib.nullcontext,
        sends_in: Entering = contextlib.nullcontext,
    ) -> None:
        self.refused = 0
        """Packets of clients beyond the bound."""
        self._upstream = upstream
        self._listen = listen
        self._max_clients = max_clients
        self._idle_s = idle_s
        self._listens_in = listens_in
        self._sends_in = sends_in
        self._up: LinkPipe[tuple[_Client, bytes]] = LinkPipe(up, "up")
        self._down: LinkPipe[tuple[_Client, bytes]] = LinkPipe(up if down is None else down, "down")
        self._clients: OrderedDict[_SocketAddress, _Client] = OrderedDict()
        """By address, the longest silent first."""
        self._listener: socket.socket | None = None

    @property
    def address(self) -> Address:
        """Where clients send to."""
        assert self._listener is not None, "the relay has not been entered"
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def clients(self) -> int:
        """Clients with a socket."""
        return len(self._clients)

    @property
    def up(self) -> LinkSpec:
        """The link from clients to the upstream."""
        return self._up.direction.spec

    @up.setter
    def up(self, spec: LinkSpec) -> None:
        self._up.direction.spec = spec

    @property
    def down(self) -> LinkSpec:
        """The link from the upstream to clients."""
        return self._down.direction.spec

    @down.setter
    def down(self, spec: LinkSpec) -> None:
        self._down.direction.spec = spec

    @property
    def counts(self) -> tuple[PacketCounts, PacketCounts]:
        """What happened (up, down)."""
        return self._up.counts, self._down.counts

    def blackhole(self, dead: bool) -> None:
        """Cut both directions, or restore them. All packets disappear without an error, those under way included."""
        self._up.dead = self._down.dead = dead
        self._pump()

    def forget(self) -> None:
        """Be a NAT that was started anew: the next packet of every client leaves from another port."""
        while self._clients:
            self._forget(next(iter(self._clients.values())))

    async def __aenter__(self) -> UdpRelay:
        self._loop = asyncio.get_running_loop()
        family, self._target = await self._resolve(self._upstream)
        listen_family, listen = await self._resolve(self._listen)
        if family != listen_family:
            raise ConfigError(f"relay: {self._listen[0]} and {self._upstream[0]} are not of one IP version")
        self._family = family
        with self._listens_in():
            self._listener = _udp_socket(family)
        try:
            self._listener.bind(listen)
        except OSError as error:
            self._listener.close()
            where = f"{self._listen[0]}:{self._listen[1]}"
            raise ConfigError(f"relay: cannot listen on {where}: {error.strerror}") from None
        self._alarm = Timer(self._loop, self._pump)
        self._loop.add_reader(self._listener, self._from_clients, self._listener)
        self._sweep()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._sweeping.cancel()
        self._alarm.close()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self.forget()

    async def _resolve(self, address: Address) -> tuple[int, _SocketAddress]:
        try:
            found = await self._loop.getaddrinfo(*address, type=socket.SOCK_DGRAM)
        except OSError as error:
            raise ConfigError(f"relay: {address[0]}:{address[1]}: {error.strerror}") from None
        family, _, _, _, resolved = found[0]
        return family, (str(resolved[0]), int(resolved[1]))

    def _from_clients(self, listener: socket.socket) -> None:
        for _ in range(BATCH):
            try:
                data, address = listener.recvfrom(65535)
            except OSError:  # nothing more, or an earlier answer found no client
                break
            now = time.monotonic()
            client = self._client(address, now)
            if client is None:
                self.refused += 1
            else:
                self._up.put(len(data) + UDP_OVERHEAD_BYTES, (client, data), now)
        self._pump()

    def _from_upstream(self, client: _Client) -> None:
        for _ in range(BATCH):
            try:
                data = client.upstream.recv(65535)
            except OSError:  # nothing more, or an earlier packet found no upstream
                break
            now = time.monotonic()
            self._touch(client, now)
            self._down.put(len(data) + UDP_OVERHEAD_BYTES, (client, data), now)
        self._pump()

    def _pump(self) -> None:
        """Send on what has arrived, and wake for what arrives next."""
        assert self._listener is not None
        now = time.monotonic()
        for client, data in self._up.due(now):
            self._send(self._up, client.upstream, data, None)
        for client, data in self._down.due(now):
            self._send(self._down, self._listener, data, client.address)
        self._alarm.set(min((at for at in (self._up.next_at, self._down.next_at) if at is not None), default=None))

    @staticmethod
    def _send(
        pipe: LinkPipe[tuple[_Client, bytes]], way: socket.socket, data: bytes, to: _SocketAddress | None
    ) -> None:
        for _ in range(2):
            try:
                if to is None:
                    way.send(data)
                else:
                    way.sendto(data, to)
            except ConnectionRefusedError:  # about an earlier packet; this one has not been sent yet
                continue
            except OSError:  # a full buffer, or the socket of a client that fell silent meanwhile
                pipe.lost_relay += 1
            return

    def _client(self, address: _SocketAddress, now: float) -> _Client | None:
        client = self._clients.get(address)
        if client is None:
            if len(self._clients) >= self._max_clients:
                self._expire(now)
            if len(self._clients) >= self._max_clients:
                return None
            with self._sends_in():
                client = _Client(address, _udp_socket(self._family), now)
            client.upstream.connect(self._target)
            self._clients[address] = client
            self._loop.add_reader(client.upstream, self._from_upstream, client)
        self._touch(client, now)
        return client

    def _touch(self, client: _Client, now: float) -> None:
        client.active_at = now
        self._clients.move_to_end(client.address)

    def _expire(self, now: float) -> None:
        while self._clients:
            client = next(iter(self._clients.values()))
            if now - client.active_at < self._idle_s:
                return
            self._forget(client)

    def _forget(self, client: _Client) -> None:
        del self._clients[client.address]
        self._loop.remove_reader(client.upstream)
        client.upstream.close()

    def _sweep(self) -> None:
        self._expire(time.monotonic())
        self._sweeping = self._loop.call_later(self._idle_s, self._sweep)


def _udp_socket(family: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_DGRAM)
    made.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, 4 * 1024 * 1024)  # the kernel caps it silently
    return made
