"""The control stream: messages on QUIC's first bidirectional stream, reliable and in order. `WIRE.md` §4.

Each message is its length (u32) and a MessagePack map whose `type` says what it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.core.errors import MALFORMED
from hawkvision.transport.protocol.wire import WireError

ALPN: Final = "hawkvision/1"
VERSION: Final = 2
SENT_KEY_VERSION: Final = 1
"""The one before, whose hello carries the key itself."""
MAX_HELLO: Final = 4096
"""Bytes of the first message, from somebody who has shown no key yet."""
MAX_PROOF: Final = 256
MAX_MESSAGE: Final = 256 * 1024
"""A JPEG header is at most 64 KiB here, an answer 70 KB."""

MAX_REGISTERED_BYTES: Final = 256 * 1024
"""Of a session's templates and JPEG headers; 255 headers of cameras that optimise their tables fit."""
MAX_TEMPLATE: Final = 4096
"""Bytes of a request: as HTTP servers allow a line."""

_LENGTH: Final = struct.Struct("!I")
Number: TypeAlias = Annotated[int, Meta(ge=0, le=255)]


class CloseCode:
    """Why a QUIC connection was closed, in its application error codes; numbers are never given twice."""

    NONE: Final = 0
    PROTOCOL: Final = 1
    UNAUTHORIZED: Final = 2
    VERSION: Final = 3
    TOO_MANY: Final = 4
    KEY_EXHAUSTED: Final = 5
    GOING_AWAY: Final = 6
    UNTRUSTED: Final = 7


class Hello(msgspec.Struct, frozen=True, tag="hello", omit_defaults=True):
    """The client's first message."""

    version: int
    proof: Annotated[bytes, Meta(max_length=MAX_PROOF)] | None = None
    """That the client has a key of the server's, see `hawkvision.servers.keys.prove`."""
    api_key: str | None = None
    """The key itself: only `SENT_KEY_VERSION` has it, which no client of ours speaks."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The server's first: the session of the sealed datagrams, and what is useful to know."""

    session: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
    client_secret: bytes
    server_secret: bytes
    useful_side: Annotated[int, Meta(ge=1, le=65535)]
    """Images whose shorter side is larger gain nothing by it."""


class Template(msgspec.Struct, frozen=True, tag="template"):
    """A request that images refer to by number."""

    number: Number
    request: Annotated[bytes, Meta(max_length=MAX_TEMPLATE)]


class Tables(msgspec.Struct, frozen=True, tag="tables"):
    """A JPEG header, SOI to SOS, that images refer to by number."""

    number: Annotated[int, Meta(ge=1, le=255)]
    header: Annotated[bytes, Meta(max_length=65536)]


class StreamAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """An answer whose datagrams no report confirmed."""

    image: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = msgspec.field(name="picture")
    status: Number
    body: bytes


Message: TypeAlias = Hello | Welcome | Template | Tables | StreamAnswer

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """A message as it travels."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """Cuts a stream into messages; holds at most one unfinished, of at most `most` bytes."""

    def __init__(self, most: int = MAX_MESSAGE) -> None:
        self.most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that this completes.

        Raises:
            WireError: if one is too long or none of ours; the connection is of no more use then.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > self.most:
                raise WireError(f"a control message of {size} bytes; at most {self.most} here")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                yield _decoder.decode(body)
            except MALFORMED as error:
                raise WireError(f"control message: {error}") from None
