"""The connection to one peer of the datagram transport: made on first use, anew when it ended or fell silent.

                ┌──────────── ended, or silent for `SILENCE_S` ────────────┐
                ▼                                                          │
    asked ─► connecting ─► current ─┬──────────────────────────────────────┘
                                    └─ carries no further kind of question ─► retired ─► its last answers ─► closed

What is asked on it, `datagram_client` decides.
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
from hawkvision.transport.endpoint.udp import Route
from hawkvision.transport.protocol.control import VERSION

Discover: TypeAlias = Callable[[], Awaitable[DatagramEndpoint]]
"""Asks the peer, some other way, where it listens. `ConnectionLost` lets the link try again, other errors do not."""

CONNECT_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Between attempts to connect, doubling."""
MAX_CONNECTS: Final = 3
"""Attempts that one question waits for."""
SILENCE_S: Final = 1.0
SILENT_RTTS: Final = 3.0
"""Of the peer while datagrams are unanswered, whichever is more, before another connection is tried beside this one,
which itself gives up only later: a radio link may be back any moment."""
MAX_RETIRED: Final = 4
RETIRED_S: Final = 30.0
"""ConnectionManager that are kept for what was asked on them, and how long each is."""
MAX_HEADERS: Final = 64
"""JPEG headers registered on one connection; a camera has one, a collection of photographs any number."""


class NotConnectedInTime(ConnectionLost):
    """There is no connection yet, and the caller's time is up; it may come about all the same."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection, and the JPEG headers that were registered on it."""

    client: ClientConnection
    headers: set[bytes] = field(default_factory=set)

    def registered(self, header: bytes) -> int | None:
        """The number by which the peer knows a JPEG header, if it was told of it before; else it is told now.

        The first image with a header is coded anew instead of waiting for a stream that a lossy link delays.
        """
        if header in self.headers:
            return self.client.tables_number(header)
        if len(self.headers) < MAX_HEADERS:
            self.headers.add(header)
            self.client.tables_number(header)
        return None


class ConnectionManager:
    """The current connection to a peer, and those before it that still owe answers. Used on one event loop."""

    def __init__(
        self, host: str, discover: Discover, local: Sequence[str], api_key: str | None, congestion: CongestionFactory
    ) -> None:
        """Prepare; nothing is sent yet. Arguments as of `DatagramLink`."""
        self._routes = [Route(address, host) for address in local] or [Route(None, host)]
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
        """ConnectionManager that take no more questions, and what waits for their last answers."""
        self.closed = False

    @property
    def alive(self) -> Connection | None:
        """The current one, if it has not ended."""
        return self._current if self._current is not None and self._current.client.lost is None else None

    @property
    def sent_bytes(self) -> int:
        """Bytes of datagrams sent so far, over all connections."""
        return self._sent_before + sum(client.sent_bytes for client in self._clients())

    async def get(self, until: float) -> Connection:
        """The connection, made if there is none.

        Raises:
            ConnectionLost: if `MAX_CONNECTS` attempts failed; `NotConnectedInTime` if time is up.
            HawkVisionError: for what trying again does not mend.
        """
        loop = asyncio.get_running_loop()
        failed = "nothing was tried"
        for _ in range(MAX_CONNECTS):
            connection = self.alive
            if connection is not None:
                return connection
            connecting = self._begin()
            await asyncio.wait({connecting}, timeout=max(0.0, until - loop.time()))
            if not connecting.done():
                raise NotConnectedInTime(f"no connection to {self._host} came about in time")
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
        """Try another connection in the background if the peer is not heard any more on this, the current one."""
        client = connection.client
        if connection is self._current and is_gone(client.silent_s(), client.rtt_s()):
            self._begin()

    def retire(self, connection: Connection) -> None:
        """Ask no more on a connection; it is closed once what was asked on it is answered."""
        if self._current is not connection:
            return
        self._current = None
        while len(self._retired) >= MAX_RETIRED:
            oldest, draining = next(iter(self._retired.items()))
            draining.cancel()
            self._released(oldest)
        self._retired[connection.client] = asyncio.create_task(self._drained(connection.client))

    async def close(self) -> None:
        """End all connections; whoever still waits is told so. Closing twice does no harm."""
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
        """The one attempt that all questions wait for."""
        if self.closed:
            raise ConnectionLost("the link was closed at this end")
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(_retrieve_error)
        return self._connecting

    async def _connect(self) -> None:
        """Connect, and put the new connection in the place of the old one."""
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
            self._offer = None  # the peer may have been started anew, elsewhere or with another certificate
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
    """Whether nothing is heard for so long that the peer may be another one by now."""
    return silent_s > max(SILENCE_S, SILENT_RTTS * (rtt_s or 0.0))


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Nobody may be waiting for an attempt any more; its error is not to be logged as never retrieved."""
    if not task.cancelled():
        task.exception()
