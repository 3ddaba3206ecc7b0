"""The control stream: messages on QUIC's first bidirectional stream, reliable and in order. `WIRE.md` §4.

Each message is its length (u32) and a MessagePack map with its `type`.
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
MAX_HELLO: Final = 4096
"""The most bytes of the first message, whose sender has not proved a key yet."""
MAX_PROOF: Final = 256
MAX_MESSAGE: Final = 256 * 1024
"""A JPEG header has at most 64 KiB here, a response 70 KB."""

MAX_REGISTERED_BYTES: Final = 256 * 1024
"""Of a session's templates and JPEG headers; 255 headers of cameras that optimise their tables fit."""
MAX_TEMPLATE: Final = 4096
"""The most bytes of a request; HTTP servers allow a line as much."""

_LENGTH: Final = struct.Struct("!I")
Number: TypeAlias = Annotated[int, Meta(ge=0, le=255)]


class CloseCode:
    """QUIC's application error codes; a number never gets another meaning."""

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
    """The proof that the client has a key, see `hawkvision.servers.keys.prove`."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The server's first message: the session of the sealed datagrams."""

    session: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
    client_secret: bytes
    server_secret: bytes
    useful_side: Annotated[int, Meta(ge=1, le=65535)]
    """The pixels of an image's shorter side that the server's models can use."""


class Template(msgspec.Struct, frozen=True, tag="template"):
    """A request that images refer to by number."""

    number: Number
    request: Annotated[bytes, Meta(max_length=MAX_TEMPLATE)]


class Tables(msgspec.Struct, frozen=True, tag="tables"):
    """A JPEG header, SOI to SOS, that images refer to by number."""

    number: Annotated[int, Meta(ge=1, le=255)]
    header: Annotated[bytes, Meta(max_length=65536)]


class StreamAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """A response whose datagrams no report has confirmed."""

    image: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = msgspec.field(name="picture")
    status: Number
    body: bytes


Message: TypeAlias = Hello | Welcome | Template | Tables | StreamAnswer

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """The bytes of a message."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """Splits a stream into messages; holds at most one incomplete message, of at most `most` bytes."""

    def __init__(self, most: int = MAX_MESSAGE) -> None:
        self.most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes.

        Raises:
            WireError: if one is too long or unknown; the connection must end.
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
