"""The replicas on this machine that have registered, and requests to the least loaded of a group."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from hawkvision.core.errors import Overloaded
from hawkvision.datacenter.local_socket.protocol import (
    KEY_BYTES,
    Address,
    Part,
    PeerClosed,
    ReplicaRequest,
    no_replica,
)
from hawkvision.datacenter.local_socket.server_end import ServerEnd

_MAX_CONNECTIONS: Final = 4096
"""From replicas; the settings allow 1024 per group."""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How many requests one replica runs, and how many wait for it."""

    max_ongoing: int
    max_queued: int
    """-1 is any number."""
    retry_after_s: float = 1.0
    """What `Overloaded` tells the caller."""


class ReplicaRegistry:
    """The live replicas of each group. `listen` first."""

    def __init__(
        self,
        groups: Sequence[str],
        bounds: QueueBounds,
        *,
        on_change: Callable[[str, int], None] = lambda *_: None,
        on_statement: Callable[[str], None] = lambda _: None,
    ) -> None:
        """No replica is registered yet.

        Args:
            groups: the groups whose replicas may register.
            bounds: for each replica.
            on_change: takes a group and its number of live replicas, whenever that changes.
            on_statement: takes each registering replica's statement.
        """
        self._live: dict[str, list[_ReplicaQueue]] = {group: [] for group in groups}
        self._absent: dict[str, asyncio.Event] = {group: asyncio.Event() for group in groups}
        """Set while a group has no live replica, which includes the time before the first."""
        for event in self._absent.values():
            event.set()
        self._waiting: dict[str, set[asyncio.Timeout]] = {group: set() for group in groups}
        self._bounds = bounds
        self._on_change = on_change
        self._on_statement = on_statement
        self._server: asyncio.AbstractServer | None = None
        self._connections: dict[ServerEnd, _ReplicaQueue | None] = {}
        self._address: Address | None = None

    async def listen(self) -> None:
        """Accept registrations at `address`, a socket of a random name."""
        address = Address(f"\0hawkvision-{secrets.token_hex(16)}", secrets.token_bytes(KEY_BYTES))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.name)  # bound here, because uvloop refuses such a name
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: ServerEnd(self, address.key), sock=listener)
        self._address = address

    @property
    def address(self) -> Address:
        """Where replicas register."""
        assert self._address is not None, "listen first"
        return self._address

    @property
    def absent(self) -> tuple[str, ...]:
        """The groups without a live replica."""
        return tuple(group for group, live in self._live.items() if not live)

    def live(self, group: str) -> int:
        """The number of live replicas of a group."""
        return len(self._live[group])

    def is_absent(self, group: str) -> bool:
        """See `handles.ReplicaPresence`."""
        return not self._live[group]

    def waiting(self, group: str) -> set[asyncio.Timeout]:
        """See `handles.ReplicaPresence`."""
        return self._waiting[group]

    async def wait_until_absent(self, group: str) -> None:
        """Return once no replica of the group is live."""
        await self._absent[group].wait()

    def record_reply(self, group: str) -> None:
        """Nothing: connections tell more than a reply through Serve."""

    async def ask(self, group: str, request: ReplicaRequest) -> AsyncGenerator[Part]:
        """The parts of the answer of the least loaded replica; closing the generator cancels the request.

        The next replica takes the request if the first is gone before its first part.

        Raises:
            HawkVisionError: the replica's own.
            Overloaded: if the replica's places and its queue are full.
            NotReady: if no replica is live, or the replica is gone after its first part.
        """
        while live := self._live[group]:
            replied, replica = False, min(live, key=lambda each: each.load)
            try:
                async with aclosing(replica.ask(request)) as parts:
                    async for part in parts:
                        replied = True
                        yield part
            except PeerClosed:
                self._set_live(replica, live=False)
                if replied:
                    raise
            else:
                return
        raise no_replica(group)

    def close(self) -> None:
        """Close all connections, which cancels their requests, and accept no registration any more."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close()

    def connected(self, connection: ServerEnd) -> None:
        """See `ConnectionOwner`."""
        if len(self._connections) >= _MAX_CONNECTIONS:
            connection.close()
        self._connections[connection] = None

    def registered(self, connection: ServerEnd, group: str, statement: str) -> bool:
        """See `ConnectionOwner`."""
        if group not in self._live:
            return False
        self._on_statement(statement)
        replica = self._connections[connection] = _ReplicaQueue(connection, group, self._bounds)
        self._set_live(replica, live=True)
        return True

    def set_live(self, connection: ServerEnd, *, live: bool) -> None:
        """See `ConnectionOwner`."""
        replica = self._connections.get(connection)
        if replica is not None:
            self._set_live(replica, live=live)

    def disconnected(self, connection: ServerEnd) -> None:
        """See `ConnectionOwner`."""
        self._connections.pop(connection, None)

    def _set_live(self, replica: _ReplicaQueue, *, live: bool) -> None:
        group, replicas = replica.group, self._live[replica.group]
        if live == (replica in replicas):
            return
        if live:
            replicas.append(replica)
        else:
            replicas.remove(replica)
        if replicas:
            self._absent[group].clear()
        else:
            self._absent[group].set()
            now = asyncio.get_running_loop().time()
            for timer in self._waiting[group]:
                if not timer.expired():
                    timer.reschedule(now)
        self._on_change(group, len(replicas))


class _ReplicaQueue:
    """One replica and the requests that wait for it. Of no use once the replica is gone."""

    def __init__(self, connection: ServerEnd, group: str, bounds: QueueBounds) -> None:
        self._connection = connection
        self.group = group
        self._bounds = bounds
        self._places = asyncio.Semaphore(bounds.max_ongoing)
        self._queued = 0
        self._ongoing = 0

    @property
    def load(self) -> int:
        """Unanswered requests, queued ones included."""
        return self._ongoing + self._queued

    async def ask(self, request: ReplicaRequest) -> AsyncGenerator[Part]:
        """The parts of the answer; closing the generator cancels the request.

        Raises:
            HawkVisionError: the replica's own.
            PeerClosed: if the replica is gone.
            Overloaded: if its places and its queue are full.
        """
        async with self._place(), aclosing(self._connection.ask(request)) as parts:
            async for part in parts:
                yield part

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        if self._places.locked() and 0 <= self._bounds.max_queued <= self._queued:
            raise Overloaded(f"the queue of {self.group!r} is full", self._bounds.retry_after_s)
        self._queued += 1
        try:
            await self._places.acquire()
        finally:
            self._queued -= 1
        self._ongoing += 1
        try:
            yield
        finally:
            self._ongoing -= 1
            self._places.release()
