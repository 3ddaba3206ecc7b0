"""The images that wait for their response on a client's connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from hawkvision.core.errors import HawkVisionError
from hawkvision.transport.client.sender import Sender
from hawkvision.transport.protocol.wire import Status

log = logging.getLogger("hawkvision.transport")


def ignore_interim(_: bytes) -> None:
    """Does nothing with an interim response."""


class ConnectionLost(HawkVisionError):
    """The connection ended; the message says why. The caller may connect again."""

    code = "unreachable"


class PendingResponses:
    """The pending responses; the sender bounds their number."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[asyncio.Future[tuple[Status, bytes]], Callable[[bytes], None]]] = {}
        """By image: the future response, and what takes interim ones."""
        self._fewer = asyncio.Event()

    def add(self, number: int, on_interim: Callable[[bytes], None]) -> asyncio.Future[tuple[Status, bytes]]:
        """The future response to an image; `on_interim` takes what comes before it."""
        future: asyncio.Future[tuple[Status, bytes]] = asyncio.get_running_loop().create_future()
        self._pending[number] = (future, on_interim)
        return future

    def remove(self, number: int) -> bool:
        """Drop a pending response; whether it was still pending."""
        self._fewer.set()
        return self._pending.pop(number, None) is not None

    async def wait_for_one(self) -> None:
        """Return when a pending response has ended."""
        self._fewer.clear()
        await self._fewer.wait()

    async def all_ended(self) -> None:
        """Return when none is pending."""
        while self._pending:
            await self.wait_for_one()

    def deliver(self, sender: Sender) -> None:
        """Deliver the responses that a sender has received."""
        while sender.interims:
            number, body = sender.interims.popleft()
            pending = self._pending.get(number)
            if pending is not None:
                _, on_interim = pending
                try:
                    on_interim(body)
                except Exception:  # it must not hold up the next image's response
                    log.exception("an interim response could not be handled")
        while sender.answered:
            number, status, body = sender.answered.popleft()
            pending = self._pending.pop(number, None)
            if pending is not None and not pending[0].done():
                future, _ = pending
                try:
                    future.set_result((Status(status), body))
                except ValueError:
                    future.set_exception(ConnectionLost(f"answer status {status} is not known"))
            self._fewer.set()

    def fail(self, why: str) -> None:
        """Fail all pending responses, because the connection has ended."""
        for future, _ in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionLost(why))
                future.exception()  # taken, in case that nobody waits
        self._pending.clear()
        self._fewer.set()
