"""Request bodies, received within their bounds.

Bounds: a body has at most `max_body_bytes` and must come on, as `UploadPace` has it, however long it takes in
all; all bodies together have at most `Bodies.limit_bytes`, whichever server they come by. Where these are reached, the
body that has gone longest without progress makes room, so that callers who stall cannot keep out those who do not.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter
from starlette.types import Receive

from hawkvision.core.errors import BadImage, Overloaded, RequestTimeout, TooLarge
from hawkvision.system.memory import MemoryParts

MAX_BUFFERED_BYTES: Final = 256 * 1024 * 1024
"""All request bodies in memory together, so that many large uploads cannot exhaust a small device."""


@dataclass(frozen=True)
class UploadPace:
    """How slowly a body may come; tests are less patient."""

    step_s: float = 30.0
    """A handover between two cells, or a modem that dials again, takes less."""
    step_bytes: int = 15_000
    """In every `step_s`, unless the body ends: 500 bytes a second, as Apache's `RequestReadTimeout` has it; GPRS
    carries five times as much."""
    grace_s: float = 2.0
    """No body makes room for others that began, or took a step, so short a time ago."""


_LONGEST_LENGTH: Final = 20
"""Digits of a body's length: llhttp reads 64 bits."""
COPIES: Final = 2
"""Of a body at once: its pieces, and what is made of them."""


def bodies_limit(parts: MemoryParts) -> int:
    """Bytes that all bodies together may have, of a budget of memory."""
    return min(MAX_BUFFERED_BYTES, parts.bodies // COPIES)


class CallerGone(Exception):
    """The caller hung up; nobody waits for the answer."""


class MemoryFull(Overloaded):
    """All request bodies together reached their bound."""


class Bodies:
    """All request bodies of a node: how large one may be, and what they take up in memory together."""

    def __init__(self, max_body_bytes: int, received: Counter, pace: UploadPace | None = None) -> None:
        """Hold none yet.

        Args:
            max_body_bytes: the largest body accepted.
            received: where to count bytes.
            pace: how slowly one may come.
        """
        self.pace = pace or UploadPace()
        self.max_body_bytes = max_body_bytes
        self.limit_bytes = MAX_BUFFERED_BYTES
        """Of all bodies together; less where there is less memory."""
        self._received = received
        self._buffered_bytes = 0
        self.coming: OrderedDict[Body, float] = OrderedDict()
        """Bodies that are being received and when each took its last step (loop time), the longest ago first."""

    @property
    def held(self) -> int:
        """Bytes of all bodies in memory."""
        return self._buffered_bytes

    def reserve(self, size: int) -> None:
        """Account for body bytes received and held in memory; `give_back` undoes it.

        Raises:
            Overloaded: if all bodies together would exceed `limit_bytes`.
        """
        self.hold(size)
        self._received.inc(size)

    def hold(self, size: int) -> None:
        """As `reserve`, for bytes that were made here and not received."""
        while self._buffered_bytes + size > self.limit_bytes and self._sheds_one():
            pass
        if self._buffered_bytes + size > self.limit_bytes:
            raise MemoryFull(self.full(), 1.0)
        self._buffered_bytes += size

    def full(self) -> str:
        """What is said where they have reached their bound."""
        return f"{self.limit_bytes} bytes of images are already being received"

    def _sheds_one(self) -> bool:
        """Whether a body made room."""
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
    """Receives one body within its bounds; `release` gives its memory accounting back."""

    def __init__(self, bodies: Bodies, receive: Receive) -> None:
        self._bodies = bodies
        self.hang_up: Callable[[], Awaitable[Any]] = receive
        """Returns when the caller is gone, once the body has been read."""
        self._size = 0
        self._until: asyncio.Timeout | None = None
        """When the next step must have come, while it is received."""
        self._shed = False

    async def read(self, declared: str | None) -> bytes:
        """The whole body.

        Raises:
            BadImage: if it is empty.
            TooLarge: as soon as it is known to exceed the limit.
            RequestTimeout: if it stops coming, or comes too slowly (see the module).
            Overloaded: if all bodies together reach their bound.
        """
        limit, pace = self._bodies.max_body_bytes, self._bodies.pace
        declared = (declared or "").lstrip("0")  # of which any number may stand in front, and Python reads 4300 digits
        if declared.isdigit() and (len(declared) > _LONGEST_LENGTH or int(declared) > limit):
            raise TooLarge(f"the body has {declared[:40]} bytes; at most {limit} are accepted")
        try:
            async with asyncio.timeout(pace.step_s) as self._until:
                chunk, more = await self._chunk(limit)
                data = await self._rest(chunk, limit) if more else chunk
        except TimeoutError:
            if self._shed:
                raise self._made_room() from None
            raise RequestTimeout(
                f"the body came too slowly: expected its end or {pace.step_bytes} bytes in every {pace.step_s:g} s, "
                f"{pace.step_bytes / pace.step_s:g} bytes a second"
            ) from None
        return nonempty(data)

    async def _rest(self, chunk: bytes, limit: int) -> bytes:
        """The whole body, of which this was the first piece."""
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
        """Make room: give up what has been received, and have `read` end."""
        assert self._until is not None, "it is being received"
        self._bodies.coming.pop(self, None)
        self._shed = True
        self._until.reschedule(asyncio.get_running_loop().time())
        self.release()

    def _made_room(self) -> MemoryFull:
        return MemoryFull(f"{self._bodies.full()}, and this one came more slowly than others", 1.0)

    def begun(self) -> bytes:
        """What is there of it before it is read, or some of that."""
        return b""

    async def arrived(self) -> bool:
        """Whether somebody waits for an answer; known once the body is there, where it comes whole."""
        return True

    async def _chunk(self, limit: int) -> tuple[bytes, bool]:
        message = await self.hang_up()
        if message["type"] == "http.disconnect":
            raise CallerGone
        chunk: bytes = message.get("body", b"")
        self.take(len(chunk), limit)
        return chunk, bool(message.get("more_body", False))

    def take(self, size: int, limit: int) -> None:
        """Account for bytes received until `release`.

        Raises:
            Overloaded: as `Bodies.reserve`.
            TooLarge: if they are more than `limit` by now.
        """
        self._bodies.reserve(size)
        self._size += size
        if self._size > limit:
            raise TooLarge(f"the body has more than the {limit} bytes that are accepted")

    def hold(self, size: int) -> None:
        """Account for bytes made of this body until `release`.

        Raises:
            Overloaded: as `Bodies.hold`.
        """
        self._bodies.hold(size)
        self._size += size

    def release(self) -> None:
        """Give the memory accounting back."""
        self._bodies.give_back(self._size)
        self._size = 0


def nonempty(data: bytes) -> bytes:
    """The body, if there is any.

    Raises:
        BadImage: else.
    """
    if not data:
        raise BadImage("the body is empty; expected a JPEG, PNG or WebP image")
    return data
