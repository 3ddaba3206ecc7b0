"""UDP sockets of both ends of the datagram transport.

    server.listener     one port for all clients: `bind`
    client.connection   one socket per path: `open_path`

Each carries sealed datagrams and QUIC.
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
"""4 MB are 1.6 s of 20 Mbit/s; a busy event loop may not read for 100 ms. The kernel may grant less."""
UDP_SEGMENT: Final = 103
"""From include/uapi/linux/udp.h; Python's socket module does not name it."""
MAX_SEGMENTS: Final = 8
"""Datagrams per system call. The kernel takes 64; with fewer, the first leave while others are still made, and a full
queue drops fewer at once."""
CANNOT_SEGMENT: Final = (errno.EINVAL, errno.EIO, errno.EMSGSIZE, errno.ENOPROTOOPT, errno.EOPNOTSUPP)
"""The kernel's errors if it, the device or a path with small packets does not support segmentation."""
TICK_S: Final = 0.001
"""The least wait of a timer. uvloop rounds to milliseconds, so half of one would spin."""


@dataclass(frozen=True, slots=True)
class UdpRoute:
    """A pair of addresses: the local one (None: any) and the server's host."""

    local: str | None
    host: str


def runs(datagrams: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The datagrams in order, in runs of at most `MAX_SEGMENTS` of one size; the last of a run may be shorter."""
    start = 0
    for end, datagram in enumerate(datagrams):
        size = len(datagrams[start])
        if end > start and (end - start == MAX_SEGMENTS or len(datagrams[end - 1]) < size or len(datagram) > size):
            yield datagrams[start:end]
            start = end
    if start < len(datagrams):
        yield datagrams[start:]


def bursts(datagrams: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, list[bytes]]]:
    """Datagrams with their paths, in bursts of at most `MAX_SEGMENTS` for one socket."""
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

    Several datagrams of one size leave by one system call if the kernel can segment them, as Linux can since 4.18
    (UDP_SEGMENT, udp(7)); the last may be shorter. Otherwise each leaves by a call of its own.
    """

    def __init__(self, take: Callable[[bytes], None], remote: Any) -> None:
        self._take = take
        self.remote = remote
        self.transport: asyncio.DatagramTransport
        self._socket: socket.socket | None = None
        """A second descriptor of the socket, because event loops do not expose `sendmsg`; None without segmentation."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.DatagramProtocol`."""
        self.transport = cast(asyncio.DatagramTransport, transport)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # no descriptor is left; datagrams leave one by one
                self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                self._socket.setblocking(False)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Close the second descriptor."""
        self._stop_segmenting()

    def send(self, datagrams: Sequence[bytes]) -> None:
        """Send in order; what exceeds a socket's buffer is lost."""
        transport: Any = self.transport
        for run in runs(datagrams):
            # Datagrams that wait in the transport must leave first.
            if len(run) == 1 or transport.get_write_buffer_size() or not self.send_segmented(run):
                for datagram in run:
                    send(transport, datagram)

    def send_segmented(self, run: Sequence[bytes]) -> bool:
        """Send a run by one system call; False if that is not possible."""
        if self._socket is None:
            return False
        try:
            self._socket.sendmsg(run, [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", len(run[0])))])
        except OSError as error:
            if error.errno in CANNOT_SEGMENT:
                self._stop_segmenting()
            return False  # the buffer is full, or the peer unreachable; single datagrams get the same error
        return True

    def _stop_segmenting(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def datagram_received(self, data: bytes, addr: Any) -> None:  # noqa: ARG002 - asyncio's signature
        """See `asyncio.DatagramProtocol`."""
        self._take(data)

    def error_received(self, exc: Exception) -> None:
        """Treat an unreachable port or network as loss."""
        log.debug("socket: %s", exc)


async def open_path(
    loop: asyncio.AbstractEventLoop, route: UdpRoute, port: int, take: Callable[[bytes], None]
) -> PathSocket:
    """A socket on a route to a server's port; `take` gets the datagrams from there.

    Raises:
        OSError: if the host is unknown, or the local address cannot be bound.
    """
    remote = await _resolve(loop, route.host, port)
    local = None if route.local is None else (route.local, 0)
    _, protocol = await loop.create_datagram_endpoint(
        partial(PathSocket, take, remote), local_addr=local, remote_addr=remote
    )
    _grow_buffers(protocol.transport.get_extra_info("socket"))
    return protocol


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to a UDP port, where 0 takes a free one.

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
    """Send; what exceeds a socket's buffer is lost, because asyncio's own queue has no bound."""
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
