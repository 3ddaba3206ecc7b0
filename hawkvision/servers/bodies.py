"""Request bodies, received within their bounds.

Bounds: a body has at most `max_body_bytes` and must arrive within `BODY_TIMEOUT_S`; all bodies together have at most
`MAX_BUFFERED_BYTES`, whichever door they come by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from prometheus_client import Counter
from starlette.types import Receive

from hawkvision.errors import BadImage, Overloaded, RequestTimeout, TooLarge

BODY_TIMEOUT_S: Final = 30.0
"""A 10 MiB picture at 3 Mbit/s; slower senders hold a connection for nothing."""
MAX_BUFFERED_BYTES: Final = 256 * 1024 * 1024
"""All request bodies in memory together, so that many large uploads cannot exhaust a small device."""


class CallerGone(Exception):
    """The caller hung up; nobody waits for the answer."""


class MemoryFull(Overloaded):
    """All request bodies together reached their bound."""


class Bodies:
    """All request bodies of a node: how large one may be, and what they take up in memory together."""

    def __init__(self, max_body_bytes: int, received: Counter) -> None:
        """Hold none yet.

        Args:
            max_body_bytes: the largest body accepted.
            received: where to count bytes.
        """
        self.max_body_bytes = max_body_bytes
        self._received = received
        self._buffered_bytes = 0

    def reserve(self, size: int) -> None:
        """Account for body bytes received and held in memory; `give_back` undoes it.

        Raises:
            Overloaded: if all bodies together would exceed `MAX_BUFFERED_BYTES`.
        """
        self.hold(size)
        self._received.inc(size)

    def hold(self, size: int) -> None:
        """As `reserve`, for bytes that were made here and not received."""
        if self._buffered_bytes + size > MAX_BUFFERED_BYTES:
            raise MemoryFull(f"{MAX_BUFFERED_BYTES} bytes of pictures are already being received", 1.0)
        self._buffered_bytes += size

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

    async def read(self, declared: str | None) -> bytes:
        """The whole body.

        Raises:
            BadImage: if it is empty.
            TooLarge: as soon as it is known to exceed the limit.
            RequestTimeout: if it takes longer than `BODY_TIMEOUT_S`.
        """
        limit = self._bodies.max_body_bytes
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise TooLarge(f"the body has {declared} bytes; at most {limit} are accepted")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                chunk, more = await self._chunk(limit)
                if not more:
                    data = chunk
                else:
                    parts = [chunk]
                    while more:
                        chunk, more = await self._chunk(limit)
                        parts.append(chunk)
                    data = b"".join(parts)
        except TimeoutError:
            raise RequestTimeout(f"the body had not arrived after {BODY_TIMEOUT_S:g} s") from None
        return some(data)

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


def some(data: bytes) -> bytes:
    """The body, if there is any.

    Raises:
        BadImage: else.
    """
    if not data:
        raise BadImage("the body is empty; expected a JPEG, PNG or WebP picture")
    return data
