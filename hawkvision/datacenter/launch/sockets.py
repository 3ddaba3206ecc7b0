"""The tier's public sockets: opened once, by the launcher, and handed to whichever process serves them.

A socket that is handed over (SCM_RIGHTS, unix(7)) is the same socket: it keeps its port and the connections that wait
at it, whatever network the process is in and however often that process is replaced.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Final

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.transport.endpoint.udp import bind
from hawkvision.transport.settings import DatagramSettings

BACKLOG: Final = 1024
"""Connections that wait to be accepted; the kernel may allow fewer (net.core.somaxconn)."""
MESSAGE_BYTES: Final = 256 * 1024
"""The longest message that goes with sockets: the settings, which are a few kB."""
_MOST_SOCKETS: Final = 2


@dataclass(frozen=True, slots=True)
class PublicSockets:
    """Where callers reach the tier."""

    http: socket.socket
    datagrams: socket.socket | None

    @property
    def all(self) -> tuple[socket.socket, ...]:
        """Those that there are, HTTP's first."""
        return (self.http,) if self.datagrams is None else (self.http, self.datagrams)

    @property
    def inodes(self) -> frozenset[int]:
        """What the kernel numbers them by in /proc/net."""
        return frozenset(os.fstat(its.fileno()).st_ino for its in self.all)

    @property
    def shown_host(self) -> str:
        """The address, as it stands in a URL."""
        host = str(self.http.getsockname()[0])
        return f"[{host}]" if ":" in host else host

    def close(self) -> None:
        """Close them here; they live on where they were handed to."""
        for its in self.all:
            its.close()


def open_sockets(config: DatacenterConfig) -> PublicSockets:
    """Listen where the settings say; port 0 takes a free one.

    Raises:
        ConfigError: if an address cannot be listened on.
    """
    try:
        http = _listen(config.host, config.port)
    except OSError as error:
        raise ConfigError(f"dc.host, dc.port: cannot listen on {config.host}:{config.port}: {error}") from None
    port = config.feature(DatagramSettings).port
    if port is None:
        return PublicSockets(http, None)
    try:
        return PublicSockets(http, bind(config.host, port))
    except OSError as error:
        http.close()
        raise ConfigError(f"dc.host, dc.datagram_port: cannot listen on UDP {config.host}:{port}: {error}") from None


def hand_over(connection: socket.socket, sockets: PublicSockets, message: bytes) -> None:
    """Send the sockets and a message over a Unix socket that keeps messages apart (SOCK_SEQPACKET).

    Raises:
        OSError: if the other end is gone.
    """
    assert len(message) <= MESSAGE_BYTES, "settings are small"
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
    socket.send_fds(connection, [message], [its.fileno() for its in sockets.all])


def take_over(connection: socket.socket) -> tuple[PublicSockets, bytes]:
    """What `hand_over` has sent.

    Raises:
        ConnectionError: if the other end is gone.
    """
    message, numbers, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, _MOST_SOCKETS)
    if not numbers:
        raise ConnectionError("the launcher is gone")
    # The protocol is named for `_listen`'s reason.
    http, *datagrams = [socket.socket(fileno=number) for number in numbers]
    return PublicSockets(http, datagrams[0] if datagrams else None), message


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket that names its protocol: asyncio turns Nagle's algorithm off only where it reads TCP there.

    With the protocol 0 of `socket.create_server`, every reply waited 40 ms for the caller's delayed acknowledgement.
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
