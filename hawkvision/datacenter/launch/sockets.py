"""The tier's public sockets: the launcher opens them once and hands them to the processes that serve.

A socket that is handed over (SCM_RIGHTS, unix(7)) stays the same: it keeps its port and its waiting connections,
whatever network the process is in and however often the process is replaced.
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
"""Connections that wait for `accept`; the kernel may allow fewer (net.core.somaxconn)."""


@dataclass(frozen=True, slots=True)
class PublicSockets:
    """The sockets where callers reach the tier."""

    http: socket.socket
    datagrams: socket.socket | None

    @property
    def all(self) -> tuple[socket.socket, ...]:
        """The open ones, HTTP's first."""
        return (self.http,) if self.datagrams is None else (self.http, self.datagrams)

    @property
    def inodes(self) -> frozenset[int]:
        """Their inode numbers in /proc/net."""
        return frozenset(os.fstat(its.fileno()).st_ino for its in self.all)

    @property
    def shown_host(self) -> str:
        """The address as in a URL."""
        host = str(self.http.getsockname()[0])
        return f"[{host}]" if ":" in host else host

    def close(self) -> None:
        """Close them in this process; they stay open in others."""
        for its in self.all:
            its.close()


def open_sockets(config: DatacenterConfig) -> PublicSockets:
    """Listen at the addresses of the settings; port 0 takes a free one.

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
