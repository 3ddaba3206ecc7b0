"""Encodes and decodes the frames between a host and a device; `fpga/device/FRAMING.md` is the specification.

Numbers are unsigned and big-endian unless stated otherwise.

 0       2         3      4        6             10                 18                 18+length
 +-------+---------+------+--------+-------------+------------------+------------------+--------+
 | "HV"  | version | type | length | session     | sequence         | payload          | CRC-32 |
 +-------+---------+------+--------+-------------+------------------+------------------+--------+

The CRC is that of IEEE 802.3 over everything before it. It protects from transmission errors, not from attackers.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError

VERSION: Final = 1
MAGIC: Final = b"HV"
MAX_FRAME: Final = 1200
"""Bytes: fits into 1,280 with headers, the minimum that IPv6 carries in one packet."""
_HEAD: Final = struct.Struct("!2sBBHIQ")
_CRC: Final = struct.Struct("!I")
MAX_PAYLOAD: Final = MAX_FRAME - _HEAD.size - _CRC.size
MAX_CLASSES: Final = (MAX_PAYLOAD - 4) // 4
"""The logits of an image fit into one frame."""
MAX_TEXT: Final = 200
SPAN: Final = 64
"""Sequence numbers between the oldest unanswered image and the newest; a device keeps as many replies."""
MAX_WINDOW: Final = SPAN - 1
"""Images that a device holds at most."""


class RefusalReason(IntEnum):
    """Why a device refuses."""

    MODEL = 1
    """The device was built from another graph."""
    VERSION = 2
    BUSY = 3
    """The device's queue is full."""
    MALFORMED = 4
    SESSION = 5
    """The device has no such session; the host must greet it first."""
    FAILED = 6


@dataclass(frozen=True, slots=True)
class HostHello:
    """Host: open a session for the graph of this SHA-256."""

    model: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PixelRun:
    """Host: pixels of an image, in row order.

    `behind`: this frame's sequence number minus that of the oldest image that the host waits for.
    """

    start: int
    """Index of the first pixel in the image."""
    pixels: NDArray[np.uint8]
    """(count, channels)"""
    behind: int = 0


@dataclass(frozen=True, slots=True)
class DeviceWelcome:
    """Device: its description."""

    height: int
    width: int
    channels: int
    classes: int
    window: int
    """Images that the device holds, the current one included."""
    emulated: bool
    """Whether the device is an emulator, whose times are modelled."""
    clock_hz: int
    cycles: int
    """Cycles from one image to the next; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class DeviceRefusal:
    """Device: refusal of a session."""

    reason: int
    model: bytes
    """SHA-256 of the graph that it was built from."""
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class LogitsReply:
    """Device: the reply to an image."""

    cycles: int
    """Clock cycles that the image took; 0 if not counted."""
    logits: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ImageTrouble:
    """Device: there will be no reply to this sequence number."""

    reason: int
    text: str


FrameMessage = HostHello | PixelRun | DeviceWelcome | DeviceRefusal | LogitsReply | ImageTrouble


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """A message with its session and the image's sequence number (0 for none)."""

    session: int
    sequence: int
    message: FrameMessage


_WELCOME: Final = struct.Struct("!HHBHBBII")
_RUN: Final = struct.Struct("!IHBBB")
_MODEL_BYTES: Final = 32


def pixels_of_a_run(channels: int) -> int:
    """Pixels of these channels that fit into one frame."""
    return (MAX_PAYLOAD - _RUN.size) // channels


def encode(frame: DeviceFrame) -> bytes:
    """Encode a frame.

    Raises:
        BackendError: if a value does not fit its field.
    """
    kind, payload = _encode_message(frame.message)
    if len(payload) > MAX_PAYLOAD:
        raise BackendError(f"frame: a payload of at most {MAX_PAYLOAD} bytes fits, got {len(payload)}")
    try:
        head = _HEAD.pack(MAGIC, VERSION, kind, len(payload), frame.session, frame.sequence)
    except struct.error as error:
        raise BackendError(f"frame: {error}") from None
    return head + payload + _CRC.pack(zlib.crc32(payload, zlib.crc32(head)))


def _encode_message(message: FrameMessage) -> tuple[int, bytes]:
    try:
        match message:
            case HostHello(model):
                return 1, model
            case PixelRun(start, pixels, behind):
                return 2, _RUN.pack(start, *pixels.shape, 0, behind) + pixels.tobytes()
            case DeviceWelcome():
                flags = int(message.emulated)
                sizes = message.height, message.width, message.channels, message.classes, message.window
                return 3, _WELCOME.pack(*sizes, flags, message.clock_hz, message.cycles)
            case DeviceRefusal(reason, model, text):
                return 4, bytes((reason,)) + model + _cut(text)
            case LogitsReply(cycles, logits):
                return 5, _CRC.pack(cycles) + logits.astype(">i4").tobytes()
            case ImageTrouble(reason, text):
                return 6, bytes((reason,)) + _cut(text)
    except (struct.error, ValueError) as error:
        raise BackendError(f"frame: {type(message).__name__}: {error}") from None


def _cut(text: str) -> bytes:
    return text.encode()[:MAX_TEXT]


def decode(data: bytes) -> DeviceFrame | None:
    """The frame that fills a datagram; None if it is none."""
    if len(data) < _HEAD.size + _CRC.size:
        return None
    magic, version, kind, length, session, sequence = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    if magic != MAGIC or version != VERSION or len(data) != end + _CRC.size or length > MAX_PAYLOAD:
        return None
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        return None
    message = _decode_message(kind, data[_HEAD.size : end])
    return None if message is None else DeviceFrame(session, sequence, message)


def session_of(frame: bytes) -> int:
    """The session that an encoded frame belongs to."""
    return int(_HEAD.unpack_from(frame)[4])


def _decode_message(kind: int, payload: bytes) -> FrameMessage | None:
    match kind:
        case 1 if len(payload) == _MODEL_BYTES:
            return HostHello(payload)
        case 2 if len(payload) > _RUN.size:
            return _decode_run(payload)
        case 3 if len(payload) == _WELCOME.size:
            height, width, channels, classes, window, flags, clock_hz, cycles = _WELCOME.unpack(payload)
            return DeviceWelcome(height, width, channels, classes, window, bool(flags & 1), clock_hz, cycles)
        case 4 if 1 + _MODEL_BYTES <= len(payload) <= 1 + _MODEL_BYTES + MAX_TEXT:
            text = payload[1 + _MODEL_BYTES :].decode(errors="replace")
            return DeviceRefusal(payload[0], payload[1 : 1 + _MODEL_BYTES], text)
        case 5 if len(payload) >= 8 and not len(payload) % 4:
            return LogitsReply(_CRC.unpack_from(payload)[0], np.frombuffer(payload, ">i4", offset=4).astype(np.int32))
        case 6 if 1 <= len(payload) <= 1 + MAX_TEXT:
            return ImageTrouble(payload[0], payload[1:].decode(errors="replace"))
    return None


def _decode_run(payload: bytes) -> PixelRun | None:
    start, count, channels, reserved, behind = _RUN.unpack_from(payload)
    if reserved or not count or not channels or len(payload) != _RUN.size + count * channels:
        return None
    return PixelRun(start, np.frombuffer(payload, np.uint8, offset=_RUN.size).reshape(count, channels), behind)
