"""UDP sockets, as both ends of the lossy transport use them.

    server.py   one port for all clients: `bind`
    client.py   one socket per path: `open_path`

Sealed datagrams and QUIC go side by side over each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

log = logging.getLogger("hawkvision.transport")

SOCKET_BUFFER: Final = 4 * 1024 * 1024
"""A busy loop may look away for 100 ms; 4 MB are 1.6 s of 20 Mbit/s. The kernel may grant less."""
TICK_S: Final = 0.001
"""Of timers. uvloop rounds to milliseconds, and half of one to none: it would spin."""


@dataclass(frozen=True, slots=True)
class Route:
    """A pair of addresses: the local one (None: any) and the server's host."""

    local: str | None
    host: str


class PathSocket(asyncio.DatagramProtocol):
    """A client's socket of one path."""

    def __init__(self, take: Callable[[bytes], None], remote: Any) -> None:
        self._take = take
        self.remote = remote
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.DatagramTransport, transport)

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
