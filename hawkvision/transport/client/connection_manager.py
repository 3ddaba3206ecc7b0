"""The connection to one peer of the datagram transport: made on first use, and again after it ended or fell silent.

                ┌──────────── ended, or silent for `SILENCE_S` ────────────┐
                ▼                                                          │
    get ─► connecting ─► current ─┬────────────────────────────────────────┘
                                  └─ takes no further kind of request ─► retired ─► its last responses ─► closed

`datagram_client` sends images on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from hawkvision.core.errors import ConfigError, HawkVisionError
from hawkvision.core.escalation_api import DatagramEndpoint
from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.endpoint.udp import UdpRoute
from hawkvision.transport.protocol.control import VERSION

Discover: TypeAlias = Callable[[], Awaitable[DatagramEndpoint]]
"""Asks the peer by other means where it listens. Only after `ConnectionLost` does the link try again."""

CONNECT_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""The pauses between attempts to connect, doubling."""
MAX_CONNECTS: Final = 3
"""Attempts that one image waits for."""
SILENCE_S: Final = 1.0
SILENT_RTTS: Final = 3.0
"""The silence of the peer, the longer of the two, after which a second connection is tried. The first gives up only
later, because a radio link may return at any moment."""
MAX_RETIRED: Final = 4
RETIRED_S: Final = 30.0
"""Connections kept for their last responses, and how long each is kept."""
MAX_HEADERS: Final = 64
"""JPEG headers per connection; a camera has one, a collection of photographs any number."""


class NotConnectedInTime(ConnectionLost):
    """The caller's time is up before there is a connection; the attempt goes on."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection and the JPEG headers that were registered on it."""

    client: ClientConnection
    headers: set[bytes] = field(default_factory=set)

    def registered(self, header: bytes) -> int | None:
        """The number by which the peer knows a JPEG header; None if it is registered only now, or cannot be.

        The first image with a header is encoded anew, because loss may delay the registration.
        """
        if header in self.headers:
            return self.client.tables_number(header)
        if len(self.headers) < MAX_HEADERS:
            self.headers.add(header)
            self.client.tables_number(header)
        return None


class ConnectionManager:
    """The current connection to a peer, and earlier ones with pending responses. Belongs to one event loop."""

    def __init__(
        self, host: str, discover: Discover, local: Sequence[str], api_key: str | None, congestion: CongestionFactory
    ) -> None:
        """Prepare; nothing is sent yet. Arguments as for `DatagramLink`."""
        self._routes = [UdpRoute(address, host) for address in local] or [UdpRoute(None, host)]
        self._host = host
        self._discover = discover
        self._api_key = api_key
        self._congestion = congestion
        self._offer: DatagramEndpoint | None = None
        self._sent_before = 0
        self._current: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        self._retired: dict[ClientConnection, asyncio.Task[None]] = {}
        """The retired connections, and the tasks that wait for their last responses."""
        self.closed = False

    @property
    def alive(self) -> Connection | None:
        """The current connection, if it has not ended."""
        return self._current if self._current is not None and self._current.client.lost is None else None

    @property
    def sent_bytes(self) -> int:
        """The bytes of datagrams sent, over all connections."""
        return self._sent_before + sum(client.sent_bytes for client in self._clients())

    async def get(self, until: float) -> Connection:
        """The current connection; connects if there is none.

        Raises:
            ConnectionLost: if `MAX_CONNECTS` attempts failed; `NotConnectedInTime` if time is up.
            HawkVisionError: for what a retry does not mend.
        """
        loop = asyncio.get_running_loop()
        failed = "no attempt was made"
        for _ in range(MAX_CONNECTS):
            connection = self.alive
            if connection is not None:
                return connection
            connecting = self._begin()
            await asyncio.wait({connecting}, timeout=max(0.0, until - loop.time()))
            if not connecting.done():
                raise NotConnectedInTime(f"no connection to {self._host} in time")
            if connecting.cancelled():
                raise ConnectionLost("the link was closed at this end")
            error = connecting.exception()
            if error is not None and not isinstance(error, ConnectionLost):
                raise error
            failed = str(error)
        connection = self.alive
        if connection is None:
            raise ConnectionLost(failed)
        return connection

    def begin_anew_if_gone(self, connection: Connection) -> None:
        """Try another connection in the background if the peer has fallen silent on this, the current one."""
        client = connection.client
        if connection is self._current and is_gone(client.silent_s(), client.rtt_s()):
            self._begin()

    def retire(self, connection: Connection) -> None:
        """Send no more images on a connection; it is closed after its last response."""
        if self._current is not connection:
            return
        self._current = None
        while len(self._retired) >= MAX_RETIRED:
            oldest, draining = next(iter(self._retired.items()))
            draining.cancel()
            self._released(oldest)
        self._retired[connection.client] = asyncio.create_task(self._drained(connection.client))

    async def close(self) -> None:
        """End all connections; pending calls raise `ConnectionLost`. The second call does nothing."""
        self.closed = True
        clients = self._clients()
        background = [*self._retired.values(), *([] if self._connecting is None else [self._connecting])]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for client in clients:
            await client.close()

    def _clients(self) -> list[ClientConnection]:
        return [*self._retired, *([] if self._current is None else [self._current.client])]

    def _begin(self) -> asyncio.Task[None]:
        """The one attempt that all images wait for."""
        if self.closed:
            raise ConnectionLost("the link was closed at this end")
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(_retrieve_error)
        return self._connecting

    async def _connect(self) -> None:
        """Connect, and replace the current connection."""
        await asyncio.sleep(self._pause_s)
        try:
            offer = self._offer or await self._discover()
            if offer.version < VERSION:
                raise ConfigError(
                    f"{self._host} speaks version {offer.version} of the datagram transport, which needs the API key "
                    f"itself; expected version {VERSION}: update it first"
                )
            client = await ClientConnection.connect(
                offer.port,
                offer.certificate,
                offer.name,
                routes=self._routes,
                api_key=self._api_key,
                congestion=self._congestion,
                timeout_s=CONNECT_S,
            )
        except HawkVisionError:
            self._offer = None  # the peer may have restarted, elsewhere or with another certificate
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
            raise
        self._pause_s, self._offer = 0.0, offer
        old, self._current = self._current, Connection(client)
        if old is not None:
            self._sent_before += old.client.sent_bytes
            await old.client.close()

    async def _drained(self, client: ClientConnection) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETIRED_S):
                    await client.wait_until_idle()
        finally:
            self._released(client)
            await client.close()

    def _released(self, client: ClientConnection) -> None:
        if self._retired.pop(client, None) is not None:
            self._sent_before += client.sent_bytes


def is_gone(silent_s: float, rtt_s: float | None) -> bool:
    """Whether the silence is so long that the peer may have restarted."""
    return silent_s > max(SILENCE_S, SILENT_RTTS * (rtt_s or 0.0))


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Take an attempt's error, so that asyncio does not log it if nobody waits."""
    if not task.cancelled():
        task.exception()
