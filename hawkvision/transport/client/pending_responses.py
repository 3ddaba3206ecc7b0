"""Images that wait for their response on a client's connection, and who is told what comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from hawkvision.core.errors import HawkVisionError
from hawkvision.transport.client.sender import Sender
from hawkvision.transport.protocol.status import Status

log = logging.getLogger("hawkvision.transport")


def ignore_interim(_: bytes) -> None:
    """For those who want the response only."""


class ConnectionLost(HawkVisionError):
    """The connection ended; the message says why. Whoever asked may connect again."""

    code = "unreachable"


@dataclass(frozen=True, slots=True)
class _Pending:
    future: asyncio.Future[tuple[Status, bytes]]
    on_interim: Callable[[bytes], None]


class PendingResponses:
    """At most as many as the sender takes images at once."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._fewer = asyncio.Event()

    def add(self, number: int, on_interim: Callable[[bytes], None]) -> asyncio.Future[tuple[Status, bytes]]:
        """Wait for the response to an image; `on_interim` is called with what comes before it."""
        future: asyncio.Future[tuple[Status, bytes]] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(future, on_interim)
        return future

    def remove(self, number: int) -> bool:
        """Nobody waits for it any more; whether it was still to come."""
        self._fewer.set()
        return self._pending.pop(number, None) is not None

    async def fewer(self) -> None:
        """Return when one of them has ended."""
        self._fewer.clear()
        await self._fewer.wait()

    async def all_ended(self) -> None:
        """Return when nobody waits."""
        while self._pending:
            await self.fewer()

    def deliver(self, sender: Sender) -> None:
        """Pass on what a sender has received."""
        while sender.interims:
            interim = sender.interims.popleft()
            pending = self._pending.get(interim.image)
            if pending is not None:
                try:
                    pending.on_interim(interim.body)
                except Exception:  # the next image's response must not wait for it
                    log.exception("an interim response could not be handled")
        while sender.answered:
            answer = sender.answered.popleft()
            pending = self._pending.pop(answer.image, None)
            if pending is not None and not pending.future.done():
                try:
                    pending.future.set_result((Status(answer.status), answer.body))
                except ValueError:
                    pending.future.set_exception(ConnectionLost(f"answer status {answer.status} is not known"))
            self._fewer.set()

    def fail(self, why: str) -> None:
        """The connection has ended."""
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(ConnectionLost(why))
                pending.future.exception()  # nobody may be waiting any more
        self._pending.clear()
        self._fewer.set()
