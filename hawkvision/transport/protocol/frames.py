"""What a sealed datagram holds: frames. `WIRE.md` §3 specifies them.

Values in, bytes out, and back. A frame that breaks its format is a `WireError`; the datagram it came in is dropped.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from hawkvision.transport.protocol.image_format import Kind, WireImageFormat
from hawkvision.transport.protocol.wire import FRAGMENT_HEADER_BYTES, FRAGMENT_ROOM, WireError

MAX_META: Final = 64
"""Bytes that a caller may attach to each fragment of an image."""
MAX_REPORTED: Final = 128
"""Sequences that one report speaks of: five images' worth, 270 bytes."""
NOT_RECEIVED: Final = 0xFFFF
ARRIVAL_UNIT_S: Final = 64e-6
LONGEST_OFFSET: Final = 0xFFFE
"""In units of 64 µs: 4.2 s. What arrived even earlier before the last is told as this."""
MAX_ANSWER_PARTS: Final = 64
"""A reply with 1,000 classes is 45 KB, in parts of 1.1 KB."""


class Type(IntEnum):
    """The frame types; numbers are never given twice."""

    FRAGMENT = 1
    REPORT = 2
    NACK = 3
    ANSWER = 4
    PING = 5
    CANCEL = 6
    CHALLENGE = 7
    RESPONSE = 8
    INTERIM = 9


@dataclass(frozen=True, slots=True)
class Fragment:
    """One of an image's n symbols."""

    image: int
    template: int
    """Which registered request this image asks, 0..255."""
    format: WireImageFormat
    index: int
    left_ms: int
    """Time left before the deadline when this was sent; 0 for none. Clipped to 65,535."""
    rest_ms: int
    """How long after this one the last fragment of the image is expected to pass the link."""
    meta: bytes
    symbol: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """Which sequences of a path arrived, and when: offsets before the last arrival, None for what did not come."""

    path: int
    first: int
    """The sequence that `offsets_s` begins with."""
    clock_us: int
    """The receiver's clock at the last arrival, modulo 2^32."""
    delay_us: int
    """How long the report waited after it."""
    offsets_s: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Nack:
    """Fragments that would complete an image."""

    image: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of the answer to an image; `status` is a number of `WIRE.md` §6."""

    image: int
    status: int
    part: int
    parts: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Interim:
    """What can be said of an image before its answer is there."""

    image: int
    number: int
    """0..255: counts an image's interims; each replaces those before."""
    body: bytes
    """At most `INTERIM_ROOM` bytes."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a report."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for the answer to this image any more."""

    image: int


@dataclass(frozen=True, slots=True)
class Challenge:
    """Proves that an address receives: the same eight bytes come back in a `Response` (RFC 9000 §8.2)."""

    token: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """The echo of a `Challenge`."""

    token: bytes


Frame: TypeAlias = Fragment | Report | Nack | AnswerPart | Interim | Ping | Cancel | Challenge | Response

#   type template image  j k n kind quality interval width height base_k tables left rest = 22 bytes, then meta
_FRAGMENT: Final = struct.Struct("!BBIBBBBBBHHBBHH")
_META_FLAG: Final = 0x80
_REPORT: Final = struct.Struct("!BBHIIIB")
_NACK: Final = struct.Struct("!BIB")
_ANSWER: Final = struct.Struct("!BIBBBH")
_INTERIM: Final = struct.Struct("!BIBH")
_CANCEL: Final = struct.Struct("!BI")
ANSWER_ROOM: Final = FRAGMENT_ROOM + FRAGMENT_HEADER_BYTES - _ANSWER.size
"""Bytes of an answer in one datagram."""
INTERIM_ROOM: Final = ANSWER_ROOM
"""Bytes of an interim, which is one datagram's."""
REPORT_BYTES: Final = _REPORT.size + 2 * MAX_REPORTED


def fragment_room(meta: bytes) -> int:
    """Bytes of a symbol beside this meta."""
    return FRAGMENT_ROOM - (1 + len(meta) if meta else 0)


def encode(frame: Frame) -> bytes:
    """A frame's bytes. A fragment must be the last of its datagram: its symbol reaches to the end."""
    match frame:
        case Fragment():
            return _encode_fragment(frame)
        case Report():
            return _encode_report(frame)
        case Nack(image, missing):
            return _NACK.pack(Type.NACK, image, len(missing)) + bytes(missing)
        case AnswerPart(image, status, part, parts, body):
            return _ANSWER.pack(Type.ANSWER, image, status, part, parts, len(body)) + body
        case Interim(image, number, body):
            return _INTERIM.pack(Type.INTERIM, image, number, len(body)) + body
        case Ping():
            return bytes([Type.PING])
        case Cancel(image):
            return _CANCEL.pack(Type.CANCEL, image)
        case Challenge(token):
            return bytes([Type.CHALLENGE]) + token
        case Response(token):
            return bytes([Type.RESPONSE]) + token


def decode(data: bytes) -> Iterator[Frame]:
    """The frames of a datagram, in order.

    Raises:
        WireError: at the first that breaks its format; those before it stand.
    """
    at = 0
    while at < len(data):
        try:
            kind = Type(data[at])
        except ValueError:
            raise WireError(f"frame type {data[at]} at byte {at} is not known") from None
        try:
            frame, at = _decode_one(kind, data, at)
        except (struct.error, IndexError):
            raise WireError(f"the datagram ends inside the {kind.name} frame at byte {at}") from None
        yield frame


def _decode_one(kind: Type, data: bytes, at: int) -> tuple[Frame, int]:
    match kind:
        case Type.FRAGMENT:
            return _decode_fragment(data, at), len(data)
        case Type.REPORT:
            return _decode_report(data, at)
        case Type.NACK:
            _, image, count = _NACK.unpack_from(data, at)
            end = at + _NACK.size + count
            _need(count >= 1, "a NACK names at least one fragment")
            return Nack(image, tuple(_bytes(data, at + _NACK.size, end))), end
        case Type.ANSWER:
            _, image, status, part, parts, size = _ANSWER.unpack_from(data, at)
            _need(part < parts <= MAX_ANSWER_PARTS, f"part {part} of {parts} answer parts, of at most 64")
            end = at + _ANSWER.size + size
            return AnswerPart(image, status, part, parts, _bytes(data, at + _ANSWER.size, end)), end
        case Type.INTERIM:
            _, image, number, size = _INTERIM.unpack_from(data, at)
            end = at + _INTERIM.size + size
            return Interim(image, number, _bytes(data, at + _INTERIM.size, end)), end
        case Type.PING:
            return Ping(), at + 1
        case Type.CANCEL:
            return Cancel(_CANCEL.unpack_from(data, at)[1]), at + _CANCEL.size
        case Type.CHALLENGE:
            return Challenge(_bytes(data, at + 1, at + 9)), at + 9
        case Type.RESPONSE:
            return Response(_bytes(data, at + 1, at + 9)), at + 9


def _encode_fragment(fragment: Fragment) -> bytes:
    f = fragment.format
    kind = int(f.kind) | (_META_FLAG if fragment.meta else 0)
    head = _FRAGMENT.pack(
        Type.FRAGMENT, fragment.template, fragment.image, fragment.index, f.k, f.n, kind, f.quality, f.interval,
        f.width, f.height, f.base_k, f.tables, min(fragment.left_ms, 0xFFFF), min(fragment.rest_ms, 0xFFFF),
    )  # fmt: skip
    meta = bytes([len(fragment.meta)]) + fragment.meta if fragment.meta else b""
    return head + meta + fragment.symbol


def _decode_fragment(data: bytes, at: int) -> Fragment:
    (_, template, image, index, k, n, kind, quality, interval, width, height, base_k, tables, left, rest) = (
        _FRAGMENT.unpack_from(data, at)
    )
    at += _FRAGMENT.size
    meta = b""
    if kind & _META_FLAG:
        size = data[at]
        _need(1 <= size <= MAX_META, f"a fragment's meta has {size} bytes; expected 1 to {MAX_META}")
        meta = _bytes(data, at + 1, at + 1 + size)
        at += 1 + size
    _need(index < n, f"fragment {index} of {n}")
    _need(at < len(data), "a fragment without a symbol")
    format_ = _format(kind & ~_META_FLAG, width, height, quality, interval, k, n, base_k, tables)
    return Fragment(image, template, format_, index, left, rest, meta, data[at:])


@functools.lru_cache(maxsize=256)
def _format(
    kind: int, width: int, height: int, quality: int, interval: int, k: int, n: int, base_k: int, tables: int
) -> WireImageFormat:
    """Checked once for all fragments of an image, of as many as eight full sessions are sending."""
    try:
        return WireImageFormat(Kind(kind), width, height, quality, interval, k, n, base_k, tables)
    except ValueError:
        raise WireError(f"image kind {kind} is not known") from None


def _encode_report(report: Report) -> bytes:
    head = _REPORT.pack(
        Type.REPORT, report.path, report.first >> 32, report.first & 0xFFFFFFFF, report.clock_us & 0xFFFFFFFF,
        min(report.delay_us, 0xFFFFFFFF), len(report.offsets_s),
    )  # fmt: skip
    units = (
        NOT_RECEIVED if offset is None else min(round(offset / ARRIVAL_UNIT_S), LONGEST_OFFSET)
        for offset in report.offsets_s
    )
    return head + struct.pack(f"!{len(report.offsets_s)}H", *units)


def _decode_report(data: bytes, at: int) -> tuple[Report, int]:
    _, path, high, low, clock_us, delay_us, count = _REPORT.unpack_from(data, at)
    _need(1 <= count <= MAX_REPORTED, f"a report of {count} sequences; expected 1 to {MAX_REPORTED}")
    units = struct.unpack_from(f"!{count}H", data, at + _REPORT.size)
    offsets = tuple(None if unit == NOT_RECEIVED else unit * ARRIVAL_UNIT_S for unit in units)
    return Report(path, high << 32 | low, clock_us, delay_us, offsets), at + _REPORT.size + 2 * count


def _bytes(data: bytes, start: int, end: int) -> bytes:
    if end > len(data):
        raise IndexError
    return data[start:end]


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise WireError(otherwise)
