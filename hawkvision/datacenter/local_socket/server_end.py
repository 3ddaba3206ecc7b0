"""The server's end of one connection of the local socket: requests by number, and pings."""

from __future__ import annotations

import asyncio
import hmac
import itertools
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol

from hawkvision.core.errors import HawkVisionError
from hawkvision.datacenter.local_socket.protocol import (
    PING_NUMBER,
    Failure,
    FrameProtocol,
    Part,
    PeerClosed,
    RegistrationFrame,
    ReplicaRequest,
    SocketPing,
)

PING_S: Final = 0.5
"""From a replica's reply to the next ping."""
SILENT_S: Final = 2.0
"""The longest that a live replica may take to reply to a ping. Its event loop does nothing that takes milliseconds, but
a full machine may delay its turn by some hundred."""


class ConnectionOwner(Protocol):
    """Gets to know what happens to a connection."""

    def connected(self, connection: ServerEnd) -> None:
        """A process has connected; it may be no replica."""
        ...

    def registered(self, connection: ServerEnd, group: str, statement: str) -> bool:
        """A replica has registered; False if the group is unknown."""
        ...

    def set_live(self, connection: ServerEnd, *, live: bool) -> None:
        """A registered replica answers pings, or does not."""
        ...

    def disconnected(self, connection: ServerEnd) -> None:
        """The connection has ended."""
        ...


class ServerEnd(FrameProtocol):
    """The server's end of a connection. Nothing is unpickled before the peer has sent the key."""

    def __init__(self, owner: ConnectionOwner, key: bytes) -> None:
        super().__init__()
        self._owner = owner
        self._expected_key = key
        """Empty once it was received."""
        self._received_key = b""
        self._group: str | None = None
        self._numbers = itertools.count(PING_NUMBER + 1)
        self._pending: dict[int, asyncio.Queue[Part | HawkVisionError | Failure | None]] = {}
        """The answers per request: at most a part per view, and the end."""
        self._timer: asyncio.TimerHandle | None = None
        self._received_at = self._pinged_at = self._due_at = 0.0
        self._silent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._owner.connected(self)
        if not self.closed:
            # Closes a connection over which nobody registers; the first ping's timer replaces this one.
            self._timer = asyncio.get_running_loop().call_later(SILENT_S, self.close)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._expected_key:
            self._received_key += data
            size = len(self._expected_key)
            if len(self._received_key) < size:
                return
            key, data = self._received_key[:size], self._received_key[size:]
            if not hmac.compare_digest(key, self._expected_key):
                self.close()
                return
            self._expected_key = self._received_key = b""
        self._received_at = asyncio.get_running_loop().time()
        self._silent = False
        if self._group is not None:
            self._owner.set_live(self, live=True)
        super().data_received(data)

    def frame(self, number: int, body: Any) -> None:
        """Handle one frame."""
        if isinstance(body, RegistrationFrame) and self._group is None:
            if self._owner.registered(self, body.group, body.statement):
                self._group = body.group
            self._restart_timer(PING_S)
            return
        answers = self._pending.get(number)
        if answers is None or isinstance(body, SocketPing):  # a cancelled request's
            return
        answers.put_nowait(body)
        if not isinstance(body, tuple):
            del self._pending[number]

    async def ask(self, request: ReplicaRequest) -> AsyncGenerator[Part]:
        """The parts of the answer; closing the generator cancels the request.

        Raises:
            HawkVisionError: the replica's own.
            PeerClosed: if the replica is gone, or silent.
        """
        if self.closed or self._silent:
            raise self._peer_closed()
        number = next(self._numbers) & 0xFFFFFFFF
        answers = self._pending[number] = asyncio.Queue()
        self.send(number, request)
        try:
            while (answer := await answers.get()) is not None:
                match answer:
                    case HawkVisionError():
                        raise answer
                    case Failure(text):
                        raise RuntimeError(f"{self._group or ''}: {text}")
                    case part:
                        yield part
        finally:
            if self._pending.pop(number, None) is not None:
                self.send(number, None)

    def connection_lost(self, *_: object) -> None:
        """See `asyncio.Protocol`."""
        if self._timer is not None:
            self._timer.cancel()
        if self._group is not None:
            self._owner.set_live(self, live=False)
        self._owner.disconnected(self)
        self._fail_pending()

    def _restart_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ping)

    def _ping(self) -> None:
        self._pinged_at = asyncio.get_running_loop().time()
        self.send(PING_NUMBER, SocketPing())
        self._check_in(SILENT_S)

    def _check_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._due_at = loop.time() + seconds
        self._timer = loop.call_at(self._due_at, self._check)

    def _check(self) -> None:
        """Judge the replica, unless this process was suspended itself: then its reply may not have been read yet."""
        loop = asyncio.get_running_loop()
        if self._received_at >= self._pinged_at:
            self._timer = loop.call_later(PING_S, self._ping)
            return
        if not self._silent and self._group is not None and loop.time() < self._due_at + PING_S:
            self._silent = True
            self._owner.set_live(self, live=False)
            self._fail_pending()
        self._check_in(PING_S)

    def _fail_pending(self) -> None:
        pending, self._pending = self._pending, {}
        for number, answers in pending.items():
            answers.put_nowait(self._peer_closed())
            self.send(number, None)

    def _peer_closed(self) -> PeerClosed:
        return PeerClosed(f"a replica of {self._group or ''!r} is gone, or does not respond")
