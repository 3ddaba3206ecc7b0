"""Request bodies, received within their bounds, and the pictures that come in forms.

Bounds: a body has at most `max_body_bytes` and must arrive within `BODY_TIMEOUT_S`; all bodies together have at most
`Bodies.limit_bytes`, whichever door they come by.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from prometheus_client import Counter
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Receive

from edge.call import CallerGone
from edge.fields import Source
from hawkvision.errors import BadField, BadImage, Overloaded, RequestTimeout, TooLarge
from hawkvision.memory import Parts

BODY_TIMEOUT_S: Final = 30.0
"""A 10 MiB picture at 3 Mbit/s; slower senders hold a connection for nothing."""
MAX_BUFFERED_BYTES: Final = 256 * 1024 * 1024
"""All request bodies in memory together, so that many large uploads cannot exhaust a small device."""


COPIES: Final = 2
"""Of a body at once: its pieces, and what is made of them."""


def bodies_limit(parts: Parts) -> int:
    """Bytes that all bodies together may have, of a budget of memory."""
    return min(MAX_BUFFERED_BYTES, parts.bodies // COPIES)


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
        self.limit_bytes = MAX_BUFFERED_BYTES
        """Of all bodies together; less where there is less memory."""
        self._received = received
        self._buffered_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What all bodies take up now."""
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
        if self._buffered_bytes + size > self.limit_bytes:
            raise MemoryFull(f"{self.limit_bytes} bytes of pictures are already being received", 1.0)
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
        return _some(data)

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
        self._take(len(chunk), limit)
        return chunk, bool(message.get("more_body", False))

    def _take(self, size: int, limit: int) -> None:
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


class WholeBody(Body):
    """A body that comes whole, or not at all (`edge.express`)."""

    def __init__(
        self,
        bodies: Bodies,
        coming: asyncio.Future[bytes | None],
        begun: Callable[[], bytes],
        hang_up: Callable[[], Awaitable[Any]],
    ) -> None:
        super().__init__(bodies, hang_up)
        self._coming = coming
        self._begun = begun

    def begun(self) -> bytes:
        """See `Body.begun`."""
        return self._begun()

    async def read(self, declared: str | None) -> bytes:  # noqa: ARG002 - it is bounded by who gives it
        """See `Body.read`."""
        data = await self._coming
        if data is None:
            raise CallerGone
        self._take(len(data), self._bodies.max_body_bytes)
        return _some(data)

    async def arrived(self) -> bool:
        """See `Body.arrived`."""
        return await self._coming is not None


def _some(data: bytes) -> bytes:
    if not data:
        raise BadImage("the body is empty; expected a JPEG, PNG or WebP picture")
    return data


async def read_multipart(raw_headers: list[tuple[bytes, bytes]], data: bytes) -> tuple[bytes, list[Source]]:
    """The picture in `image` and the other fields of a multipart form."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield data

    try:
        parser = MultiPartParser(Headers(raw=raw_headers), stream(), max_files=1, max_fields=16)
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, AttributeError) as error:
        # The parser raises bare KeyError or AttributeError for a missing boundary or disposition.
        raise BadField(f"multipart body: {getattr(error, 'message', None) or error!r}") from None
    picture: bytes | None = None
    fields: list[Source] = []
    async with _closing(form):
        for name, value in form.multi_items():
            if name == "image":
                if picture is not None:
                    raise BadField("multipart: expected one 'image', got several")
                picture = await value.read() if isinstance(value, UploadFile) else value.encode("latin-1", "replace")
            elif isinstance(value, UploadFile):
                raise BadField(f"multipart: the file must be named 'image', got {name[:40]!r}")
            else:
                fields.append(("multipart", name, value))
    if not picture:
        raise BadField("multipart: expected the picture in a part named 'image'")
    return picture, fields


class _closing:  # noqa: N801 - used like contextlib.aclosing, which calls aclose
    def __init__(self, form: Any) -> None:
        self._form = form

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        await self._form.close()
