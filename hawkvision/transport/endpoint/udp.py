"""UDP sockets, as both ends of the datagram transport use them.

    server.py   one port for all clients: `bind`
    client.py   one socket per path: `open_path`

Sealed datagrams and QUIC go side by side over each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

log = logging.getLogger("hawkvision.transport")

SOCKET_BUFFER: Final = 4 * 1024 * 1024
"""A busy loop may look away for 100 ms; 4 MB are 1.6 s of 20 Mbit/s. The kernel may grant less."""
UDP_SEGMENT: Final = 103
"""Linux's (include/uapi/linux/udp.h); Python's socket module has no name for it."""
MAX_SEGMENTS: Final = 8
"""Datagrams of one system call. The kernel takes 64; but the first is on its way while others are still made, and a
queue on this machine that is full may drop all of one call."""
CANNOT_SEGMENT: Final = (errno.EINVAL, errno.EIO, errno.EMSGSIZE, errno.ENOPROTOOPT, errno.EOPNOTSUPP)
"""What the kernel says where it, the device, or a way with small packets does not let datagrams be cut."""
TICK_S: Final = 0.001
"""Of timers. uvloop rounds to milliseconds, and half of one to none: it would spin."""


@dataclass(frozen=True, slots=True)
class Route:
    """A pair of addresses: the local one (None: any) and the server's host."""

    local: str | None
    host: str


def runs(datagrams: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The same datagrams in order, in runs of at most `MAX_SEGMENTS` that are of one size, or shorter at the end."""
    start = 0
    for end, datagram in enumerate(datagrams):
        size = len(datagrams[start])
        if end > start and (end - start == MAX_SEGMENTS or len(datagrams[end - 1]) < size or len(datagram) > size):
            yield datagrams[start:end]
            start = end
    if start < len(datagrams):
        yield datagrams[start:]


def bursts(datagrams: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, list[bytes]]]:
    """Datagrams that leave now, each with its path, as a socket is given at once: `MAX_SEGMENTS` at most."""
    path, burst = -1, list[bytes]()
    for over, datagram in datagrams:
        if burst and (over != path or len(burst) == MAX_SEGMENTS):
            yield path, burst
            burst = []
        path = over
        burst.append(datagram)
    if burst:
        yield path, burst


class PathSocket(asyncio.DatagramProtocol):
    """A client's socket of one path.

    Several datagrams leave by one system call where the kernel can cut them apart. Linux can, since 4.18 (UDP_SEGMENT,
    udp(7)): those of one size, of which the last may be shorter. Where it or the device does not, each goes by itself.
    """

    def __init__(self, take: Callable[[bytes], None], remote: Any) -> None:
        self._take = take
        self.remote = remote
        self.transport: asyncio.DatagramTransport
        self._socket: socket.socket | None = None
        """A second descriptor of the same socket, for event loops let nobody call `sendmsg` on theirs; None where there
        is none, or where the kernel does not cut."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.DatagramTransport, transport)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # no descriptor is left; each datagram goes by itself
                self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                self._socket.setblocking(False)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Let go of the socket."""
        self._stop_segmenting()

    def send(self, datagrams: Sequence[bytes]) -> None:
        """Send in order, or lose what waits behind more than a socket's buffer."""
        transport: Any = self.transport
        for run in runs(datagrams):
            # What waits in the transport must go before.
            if len(run) == 1 or transport.get_write_buffer_size() or not self.send_segmented(run):
                for datagram in run:
                    send(transport, datagram)

    def send_segmented(self, run: Sequence[bytes]) -> bool:
        """Send a run by one system call, if that is possible."""
        if self._socket is None:
            return False
        try:
            self._socket.sendmsg(run, [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", len(run[0])))])
        except OSError as error:
            if error.errno in CANNOT_SEGMENT:
                self._stop_segmenting()
            return False  # no room, or no way there: single ones are told so, too
        return True

    def _stop_segmenting(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def datagram_received(self, data: bytes, addr: Any) -> None:  # noqa: ARG002 - asyncio's signature
        """Hand it on."""
        self._take(data)

    def error_received(self, exc: Exception) -> None:
        """An unreachable port or network looks like loss, and is treated so."""
        log.debug("socket: %s", exc)


async def open_path(
    loop: asyncio.AbstractEventLoop, route: Route, port: int, take: Callable[[bytes], None]
) -> PathSocket:
    """A socket on a route to a server's port; `take` is given what comes from there.

    Raises:
        OSError: if the host is not known, or the local address cannot be bound.
    """
    remote = await _resolve(loop, route.host, port)
    local = None if route.local is None else (route.local, 0)
    _, protocol = await loop.create_datagram_endpoint(
        partial(PathSocket, take, remote), local_addr=local, remote_addr=remote
    )
    _grow_buffers(protocol.transport.get_extra_info("socket"))
    return protocol


def bind(host: str, port: int) -> socket.socket:
    """A socket on a UDP port; 0 takes a free one.

    Raises:
        OSError: if the address cannot be bound.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    _grow_buffers(bound)
    return bound


def send(transport: Any, datagram: bytes, address: Any = None) -> None:
    """Send, or lose what waits behind more than a socket's buffer: asyncio's own queue has no bound."""
    if transport.get_write_buffer_size() < SOCKET_BUFFER:
        transport.sendto(datagram, address)


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
