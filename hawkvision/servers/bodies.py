"""Receives request bodies within bounds.

A body has at most `max_body_bytes` and must arrive at least at `UploadPace`. All bodies of a node together have at most
`Bodies.limit_bytes`. When that is reached, the body that has gone longest without progress is dropped, so that slow
callers cannot keep out others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Receive

from hawkvision.core.errors import BadImage, Overloaded, RequestTimeout, TooLarge
from hawkvision.system.memory import MemoryParts

MAX_BUFFERED_BYTES: Final = 256 * 1024 * 1024
"""Most bytes of all request bodies in memory together."""


@dataclass(frozen=True)
class UploadPace:
    """The slowest pace at which a body may arrive."""

    step_s: float = 30.0
    """Seconds in which `step_bytes` must arrive; longer than a cellular handover or a modem's redial."""
    step_bytes: int = 15_000
    """Bytes that must arrive in every `step_s` before the body ends: 500 bytes/s, as in Apache's `RequestReadTimeout`.
    """
    grace_s: float = 2.0
    """A body that began, or completed a step, less than this ago is not dropped for others."""


_LONGEST_LENGTH: Final = 20
"""Most digits of a body's length: llhttp reads 64 bits."""
COPIES: Final = 2
"""Copies of a body in memory: its pieces, and the joined body."""


def bodies_limit(parts: MemoryParts) -> int:
    """Most bytes of all bodies together under a memory budget."""
    return min(MAX_BUFFERED_BYTES, parts.bodies // COPIES)


class CallerGone(Exception):
    """The caller closed the connection."""


class MemoryFull(Overloaded):
    """All request bodies together reached their limit."""


class Bodies:
    """The limits and the total size of all request bodies of a node."""

    def __init__(self, max_body_bytes: int, pace: UploadPace | None = None) -> None:
        """Start without bodies.

        Args:
            max_body_bytes: the largest body that is accepted.
            pace: the slowest pace of a body.
        """
        self.pace = pace or UploadPace()
        self.max_body_bytes = max_body_bytes
        self.limit_bytes = MAX_BUFFERED_BYTES
        """Most bytes of all bodies together; the node lowers it to its memory budget."""
        self._buffered_bytes = 0
        self.coming: OrderedDict[Body, float] = OrderedDict()
        """Bodies being received, with the loop time of their last step, oldest first."""

    @property
    def held(self) -> int:
        """Bytes of all bodies in memory."""
        return self._buffered_bytes

    def hold(self, size: int) -> None:
        """Count bytes that are held in memory; `give_back` undoes it.

        Raises:
            Overloaded: if all bodies together would exceed `limit_bytes`.
        """
        while self._buffered_bytes + size > self.limit_bytes and self._sheds_one():
            pass
        if self._buffered_bytes + size > self.limit_bytes:
            raise MemoryFull(self.full(), 1.0)
        self._buffered_bytes += size

    def full(self) -> str:
        """The message when the limit is reached."""
        return f"{self.limit_bytes} bytes of images are already being received"

    def _sheds_one(self) -> bool:
        """Drop the slowest body, if it may be. Returns whether one was dropped."""
        for slowest, stepped in self.coming.items():
            if asyncio.get_running_loop().time() - stepped < self.pace.grace_s:
                return False
            slowest.shed()
            return True
        return False

    def give_back(self, size: int) -> None:
        """Undo `reserve`."""
        self._buffered_bytes -= size


class Body:
    """Receives one body within its bounds. Call `release` when its memory is free."""

    def __init__(self, bodies: Bodies, receive: Receive) -> None:
        self._bodies = bodies
        self.hang_up: Callable[[], Awaitable[Any]] = receive
        """After the body has been read, returns when the caller is gone."""
        self._size = 0
        self._until: asyncio.Timeout | None = None
        """The timeout of the next step, while the body is received."""
        self._shed = False

    def count_in(self, bodies: Bodies) -> None:
        """Count the bytes of this body, those so far included, among other bodies.

        Raises:
            Overloaded: as `Bodies.hold`; they then count where they did before.
        """
        if bodies is not self._bodies:
            bodies.hold(self._size)
            self._bodies.give_back(self._size)
            self._bodies = bodies

    async def read(self, declared: str | None) -> bytes:
        """The whole body.

        Raises:
            BadImage: if it is empty.
            TooLarge: as soon as it is known to exceed the limit.
            RequestTimeout: if it stops or arrives too slowly.
            Overloaded: if all bodies together reach their limit.
        """
        limit, pace = self._bodies.max_body_bytes, self._bodies.pace
        declared = (declared or "").lstrip("0")  # any number of zeros may precede, and Python reads 4300 digits
        if declared.isascii() and declared.isdigit() and (len(declared) > _LONGEST_LENGTH or int(declared) > limit):
            raise TooLarge(f"the body has {declared[:40]} bytes; at most {limit} are accepted")
        try:
            async with asyncio.timeout(pace.step_s) as self._until:
                chunk, more = await self._chunk(limit)
                data = await self._rest(chunk, limit) if more else chunk
        except TimeoutError:
            if self._shed:
                raise self._made_room() from None
            raise RequestTimeout(
                f"the body arrived too slowly: expected its end or {pace.step_bytes} bytes in every {pace.step_s:g} s, "
                f"{pace.step_bytes / pace.step_s:g} bytes a second"
            ) from None
        if not data:
            raise BadImage("the body is empty; expected a JPEG, PNG or WebP image")
        return data

    async def _rest(self, chunk: bytes, limit: int) -> bytes:
        """The whole body, which begins with `chunk`."""
        loop, coming, pace = asyncio.get_running_loop(), self._bodies.coming, self._bodies.pace
        parts, step, more = [chunk], len(chunk), True
        coming[self] = loop.time()
        try:
            while more:
                if step >= pace.step_bytes:
                    assert self._until is not None, "it is set while this runs"
                    step, now = 0, loop.time()
                    self._until.reschedule(now + pace.step_s)
                    coming[self] = now
                    coming.move_to_end(self)
                chunk, more = await self._chunk(limit)
                if self._shed:
                    raise self._made_room()
                parts.append(chunk)
                step += len(chunk)
        finally:
            coming.pop(self, None)
        return b"".join(parts)

    def shed(self) -> None:
        """Drop what has been received, and end `read`."""
        assert self._until is not None, "it is being received"
        self._bodies.coming.pop(self, None)
        self._shed = True
        self._until.reschedule(asyncio.get_running_loop().time())
        self.release()

    def _made_room(self) -> MemoryFull:
        return MemoryFull(f"{self._bodies.full()}, and this one arrived more slowly than others", 1.0)

    async def _chunk(self, limit: int) -> tuple[bytes, bool]:
        message = await self.hang_up()
        if message["type"] == "http.disconnect":
            raise CallerGone
        chunk: bytes = message.get("body", b"")
        self._bodies.hold(len(chunk))
        self._size += len(chunk)
        if self._size > limit:
            raise TooLarge(f"the body has more than the {limit} bytes that are accepted")
        return chunk, bool(message.get("more_body", False))

    def hold(self, size: int) -> None:
        """Count bytes made from this body until `release`.

        Raises:
            Overloaded: as `Bodies.hold`.
        """
        self._bodies.hold(size)
        self._size += size

    def release(self) -> None:
        """Give back all bytes of this body."""
        self._bodies.give_back(self._size)
        self._size = 0
