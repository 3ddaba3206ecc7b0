"""The connections of one server, counted and bounded, with the deadlines of those whose caller is late.

`ConnectionRegistry` keeps idle, late and closing connections in the order of their arrival, so that it finds the one to
close without a search. A request costs two dictionary operations. One timer per server checks the deadlines, and runs
only while there are any.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hawkvision.core.errors import HawkVisionError, NotReady, Overloaded

log = logging.getLogger("hawkvision.servers")

ARRIVED: Final = "hawkvision.arrived"
"""Key of a request's scope: when the newest bytes of its head reached the kernel, on the monotonic clock."""
PLACE: Final = "hawkvision.place"
"""Key of a request's scope: what a server's gate (`hawkvision.servers.protocol.Gate`) keeps for it."""
MAX_CONNECTIONS: Final = 4096
RESERVED_FILES: Final = 128
"""File descriptors kept from callers: 32 connections to the datacenter, `MAX_LEAVING`, models, logs and spares."""
MIN_CONNECTIONS: Final = 16
MAX_OPEN_FILES: Final = 65_536
PER_ADDRESS: Final = 512
"""Default of connections from one address: an eighth of all, enough for 16 edge nodes behind one translated address."""
KEEP_ALIVE_S: Final = 75
"""Most clients and proxies keep idle connections for 60 s. The server keeps them longer, so that the client closes
first and sends no request into a closing connection."""
MAX_LEAVING: Final = 16
"""Refused connections kept open until the caller has read the error; the oldest is aborted beyond this."""
DRAIN_STEP_BYTES: Final = 15_000
"""Of a refused body: each such piece within `Limits.drain_s` (500 bytes/s) extends the deadline."""


@dataclass(frozen=True)
class Limits:
    """How many connections a server accepts, and how long it waits for their callers."""

    connections: int
    per_address: int = PER_ADDRESS
    """Connections from one address other than loopback (IPv6: one /64 network), at most half of all; 0 for no bound."""
    head_s: float = 10.0
    """From connecting, or the first byte of a request, to the end of its head."""
    drain_s: float = 30.0
    """For the rest of a refused body and then for the next head; each `DRAIN_STEP_BYTES` that arrive extend it."""
    leave_s: float = 2.0
    """For a refused caller to read the response and close."""
    grace_s: float = 1.0
    """A caller has at least this long to send its head before a newer connection may take its place."""
    unread_s: float = 30.0
    """Seconds for a caller to read on while 64 KiB of a response are waiting."""


class BoundedConnection(Protocol):
    """What the registry uses of a connection."""

    client: tuple[str, int] | None
    """Address and port of the caller; None on a Unix socket."""
    address: str | None
    """The address that it counts for, set by the registry; None if it counts for none."""
    connections: set[Any]
    """All open connections of the server."""
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def expire(self) -> None:
        """Close, because the deadline has passed."""
        ...


class ConnectionRegistry:
    """The connections of one server: which can be closed for a newer one, and which are out of time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.per_address = min(limits.per_address, max(1, limits.connections // 2))
        """Connections from one address at most; 0 for no bound."""
        self._idle: OrderedDict[BoundedConnection, None] = OrderedDict()
        self._owing: OrderedDict[BoundedConnection, tuple[float, float]] = OrderedDict()
        """Begin and deadline of those whose caller has to act, in loop time."""
        self._leaving: OrderedDict[BoundedConnection, float] = OrderedDict()
        """Deadline of those that are closing, in loop time."""
        self._from: dict[str, int] = {}
        """Connections by `address_of`."""
        self._timer: asyncio.TimerHandle | None = None
        self._turned_away = 0
        self._of_one_address = 0

    def add(self, connection: BoundedConnection) -> HawkVisionError | None:
        """Register the newest connection. Returns why it is refused, or None."""
        address = address_of(connection.client)
        bound = self.per_address
        if address is not None and bound and self._from.get(address, 0) >= bound:
            self._of_one_address += 1
            return Overloaded(f"{bound} connections from {address} are open; no more are taken from one address", 1.0)
        if not self.make_room(len(connection.connections), connection.loop.time()):
            return NotReady(f"all {self.limits.connections} connections of this server are in use")
        if address is not None:
            connection.address = address
            self._from[address] = self._from.get(address, 0) + 1
        return None

    def mark_busy(self, connection: BoundedConnection) -> None:
        """Record that the connection has a request to answer."""
        self._idle.pop(connection, None)
        self._owing.pop(connection, None)

    def mark_idle(self, connection: BoundedConnection) -> None:
        """Record that the connection is kept alive with nothing outstanding."""
        self._idle[connection] = None

    def expect(self, connection: BoundedConnection, within_s: float) -> None:
        """Give the caller `within_s` to act. A second call changes nothing."""
        self._idle.pop(connection, None)
        if connection not in self._owing:
            now = connection.loop.time()
            self._owing[connection] = (now, now + within_s)
            self._watch(connection.loop)

    def extend(self, connection: BoundedConnection) -> None:
        """Extend the deadline by `drain_s` from now, because data keeps arriving."""
        if connection in self._owing:
            since, _ = self._owing[connection]
            self._owing[connection] = (since, connection.loop.time() + self.limits.drain_s)

    def mark_closing(self, connection: BoundedConnection) -> None:
        """Record that the connection was refused and waits for its caller to close."""
        self.mark_busy(connection)
        self._leaving[connection] = connection.loop.time() + self.limits.leave_s
        if len(self._leaving) > MAX_LEAVING:
            oldest, _ = self._leaving.popitem(last=False)
            oldest.transport.abort()
        self._watch(connection.loop)

    def remove(self, connection: BoundedConnection) -> None:
        """Forget a closed connection."""
        self.mark_busy(connection)
        self._leaving.pop(connection, None)
        address = connection.address
        if address is not None:
            self._from[address] -= 1
            if not self._from[address]:
                del self._from[address]

    def make_room(self, accepted: int, now: float) -> bool:
        """Whether there is room for the newest of `accepted` connections; closes another one if needed.

        The connection that has been idle longest is closed first. If none is idle, the one whose caller has been late
        longest is closed, so that callers who never finish a head cannot keep others out.
        """
        if accepted - len(self._leaving) <= self.limits.connections:
            return True
        if self._idle:
            oldest, _ = self._idle.popitem(last=False)
            oldest.transport.abort()
            return True
        if self._owing:
            oldest, (since, _) = next(iter(self._owing.items()))
            if now - since >= self.limits.grace_s:
                del self._owing[oldest]
                oldest.transport.abort()
                return True
        self._turned_away += 1
        return False

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(min(1.0, self.limits.leave_s), self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connections whose deadline has passed."""
        self._timer = None
        now = loop.time()
        for connection in [one for one, (_, until) in self._owing.items() if until <= now]:
            del self._owing[connection]
            connection.expire()
        for connection in [one for one, until in self._leaving.items() if until <= now]:
            del self._leaving[connection]
            connection.transport.abort()
        if self._turned_away:
            log.warning("turned away %d connections: %d are open", self._turned_away, self.limits.connections)
            self._turned_away = 0
        if self._of_one_address:
            log.warning(
                "turned away %d connections: %d were open from their address (connections_per_address)",
                self._of_one_address,
                self.per_address,
            )
            self._of_one_address = 0
        if self._owing or self._leaving:
            self._watch(loop)


def waited_s(scope: Mapping[str, Any]) -> float:
    """Seconds since a request's head reached the kernel; 0 if its server does not say."""
    arrived: float | None = scope.get(ARRIVED)
    return 0.0 if arrived is None else max(0.0, time.monotonic() - arrived)


def address_of(client: tuple[str, int] | None) -> str | None:
    """The address that a connection counts for: the IPv4 address, or the IPv6 /64 network.

    None for Unix sockets and loopback, where a reverse proxy or the operator's load test connects.
    """
    if client is None:  # a Unix socket
        return None
    address = ipaddress.ip_address(client[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return None
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, at most `MAX_OPEN_FILES`. Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connections_for(open_files: int) -> int:
    """How many connections fit into a limit of open files, after `RESERVED_FILES`."""
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, open_files - RESERVED_FILES))
