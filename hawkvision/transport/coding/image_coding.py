"""Images to fragments that survive loss, and received fragments back to images.

    pixels ── JPEG, restart every few MCUs ── header stripped ── segments dispersed over k symbols ── n − k parity
                                                                                                          │  loss
    an ordinary JPEG ◄── header written anew ◄── holes filled with other segments ◄── any k of n, or what there is

One image becomes n ≤ 255 symbols, each the payload of one datagram. With any k of them the body is exact, bit for
bit. With fewer, the data symbols that came are used as they are: a lost segment is replaced by a copy of the nearest
one that came (or by one of an enlarged base image), still in the compressed domain, so that whatever comes after the
transport sees an ordinary JPEG. Copied texture keeps a network's features alive, where smooth filling looks better
and classifies worse.

`WIRE.md` beside this file specifies the bytes.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import TooLarge
from hawkvision.core.types import Pixels
from hawkvision.transport.coding.concealment import blocks, copied, decoded, redrawn
from hawkvision.transport.coding.fec import parity_count, protect, recover
from hawkvision.transport.coding.interleaving import MAX_COUNT, deinterleave, interleave
from hawkvision.transport.coding.jpeg import Layout, assemble, compress, standard_header, standard_layout
from hawkvision.transport.coding.jpeg_splitting import MAX_HEADER_BYTES, cut, parse_header
from hawkvision.transport.protocol.image_format import (
    MAX_PIXELS,
    MAX_REDRAWN_PIXELS,
    MAX_SIDE,
    MAX_SYMBOLS,
    Kind,
    WireImageFormat,
)
from hawkvision.transport.protocol.wire import MAX_DATAGRAM, WireError

INTERVALS: Final = (4, 5, 3, 6, 2, 7, 8)
"""MCUs per segment in the order in which they are tried: the first that divides a row. Else 4, across rows."""

BASE_SIDE: Final = 128
"""Pixels of the base image's shorter side."""
BASE_QUALITY: Final = 30
"""Many pixels in few bytes: 128 of them at quality 30 take what 96 take at 60, and holes filled from them cost 1.6 to 2
points less top-1 at 25 to 50 % loss. That are 1.8 KB for an image of 227 to 256 pixels."""
BASE_PORTION: Final = 0.4
"""Fragments that give the base image, over those that there would be without it. The fewer, the surer it comes and
the more bytes it takes; this is near the best over links that lose 10 to 50 % in runs."""

_SHARE: Final = struct.Struct(">H")


@dataclass(frozen=True, slots=True)
class Plan:
    """How to send an image: a JPEG quality, parity symbols per data symbol, and whether with a base image."""

    quality: int
    parity: float
    base: bool = False


@dataclass(frozen=True, slots=True)
class Coded:
    """An image ready to be sent: n symbols, none longer than the room that was given. The first k are data."""

    format: WireImageFormat
    symbols: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """The body as it was sent. `quality` is None if the coding lost nothing."""

    body: bytes
    quality: int | None


@dataclass(frozen=True, slots=True)
class Partial:
    """An ordinary JPEG with filled holes.

    `received_fraction` is the share of MCUs that came, 0 if only a base image did. `mask` (rows, columns) says which
    blocks of 16×16 pixels are true.
    """

    body: bytes
    quality: int | None
    received_fraction: float
    mask: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Expired:
    """Nothing that can be decoded has arrived."""


Arrived: TypeAlias = Complete | Partial | Expired


def encode(pixels: Pixels, plan: Plan, room: int) -> Coded:
    """Transcode an image (height, width, 3), RGB, into symbols of at most `room` bytes.

    Raises:
        TooLarge: if the image has more than `MAX_PIXELS`, or more bytes at this quality than `MAX_SYMBOLS` hold.
    """
    height, width = pixels.shape[:2]
    if height * width > MAX_PIXELS or max(height, width) > MAX_SIDE:
        raise TooLarge(
            f"the image has {width}x{height} pixels; at most {MAX_PIXELS} and {MAX_SIDE} on a side cross a lossy link"
        )
    bgr: Pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    small = _base_body(bgr) if plan.base and height * width <= MAX_REDRAWN_PIXELS else b""
    base: list[bytes] = []
    for interval in _intervals(width):
        segments = compress(bgr, plan.quality, interval)
        left = room
        if small:
            fragments = sum(map(len, segments)) / room * (1 + plan.parity)
            base = _slices(small, max(math.ceil(fragments * BASE_PORTION), math.ceil(2 * len(small) / room)))
            left -= _SHARE.size + len(base[0])
        data = interleave(segments, standard_layout(width, height, interval), left)
        if data is not None:
            break
    else:
        raise TooLarge(
            f"the image of {width}x{height} pixels at quality {plan.quality} does not fit {MAX_SYMBOLS} datagrams of "
            f"{room} bytes; expected a smaller one"
        )
    k, base_k = len(data), len(base)
    n = max(k + parity_count(k, plan.parity), base_k)
    symbols = data + protect(data, n - k)
    if base:
        shares = [*base, *protect(base, n - base_k)]
        symbols = [_SHARE.pack(len(share)) + share + symbol for share, symbol in zip(shares, symbols, strict=True)]
    return Coded(WireImageFormat(Kind.SEGMENTS, width, height, plan.quality, interval, k, n, base_k), tuple(symbols))


def reframe(jpeg: bytes, parity: float, room: int) -> tuple[Coded, bytes] | None:
    """A caller's JPEG in symbols without quantising it again, with the header that the receiver must know.

    The header is empty if the quality implies it; else `Coded.format.tables` is 1, until the header is registered and
    its number goes there. It is brought into one form, so that the images of one camera share it.

    None where that cannot be: it is no baseline JPEG of one scan, it has no restart markers, a segment does not fit a
    datagram, all together do not fit `MAX_SYMBOLS`, or it must be turned upright first.
    """
    found = cut(jpeg)
    if found is None or found.layout.width * found.layout.height > MAX_PIXELS or len(found.header) > MAX_HEADER_BYTES:
        return None
    layout = found.layout
    data = interleave(found.segments, layout, room)
    if data is None:
        return None
    n = len(data) + parity_count(len(data), parity)
    format_ = WireImageFormat(
        Kind.SEGMENTS, layout.width, layout.height, found.quality, layout.interval, len(data), n,
        tables=int(bool(found.header)),
    )  # fmt: skip
    return Coded(format_, tuple(data + protect(data, n - len(data)))), found.header


def opaque(body: bytes, parity: float, room: int) -> Coded | None:
    """A body as symbols, any k of which restore its bytes. None if it is empty or too large for `MAX_SYMBOLS`."""
    k = -(-len(body) // room)
    if not 1 <= k <= MAX_SYMBOLS:
        return None
    size = -(-len(body) // k)
    data = [body[start : start + size] for start in range(0, len(body), size)]
    k = len(data)
    n = k + parity_count(k, parity)
    format_ = WireImageFormat(Kind.OPAQUE, *divmod(len(body), 65536), quality=0, interval=1, k=k, n=n)
    return Coded(format_, tuple(data + protect(data, n - k)))


def missing(format: WireImageFormat, have: Collection[int]) -> tuple[int, ...]:  # noqa: A002
    """The fewest fragments that complete the image, data symbols first."""
    wanted = (index for index in range(format.n) if index not in have)
    return tuple(itertools.islice(wanted, max(0, format.k - len(have))))


def decode(format: WireImageFormat, symbols: Mapping[int, bytes], tables: bytes = b"") -> Arrived:  # noqa: A002
    """The image as far as the received symbols give it.

    Args:
        format: of the image.
        symbols: by index, untrusted; at most `MAX_DATAGRAM` bytes each.
        tables: the registered header if `format.tables` is not 0.

    Returns:
        `Complete` if at least k symbols came and they are sound. Segments of unsound symbols count as lost.

    Raises:
        WireError: if indices or lengths contradict the format or one another, or the header is no JPEG's.
    """
    for index, symbol in symbols.items():
        if not 0 <= index < format.n:
            raise WireError(f"fragment {index} of an image of n = {format.n}")
        if not 0 < len(symbol) <= MAX_DATAGRAM:
            raise WireError(f"fragment {index} has {len(symbol)} bytes; expected 1 to {MAX_DATAGRAM}")
    if format.kind is Kind.OPAQUE:
        return _decode_opaque(format, symbols)
    header, layout = _header_of(format, tables)
    shares: dict[int, bytes] = {}
    if format.base_k:
        shares, symbols = _unshared(symbols)
    segments = deinterleave(recover(symbols, format.k, format.n), layout)
    quality = None if format.tables else format.quality
    came = np.fromiter((segment is not None for segment in segments), np.bool_, layout.segments)
    if came.all():
        return Complete(assemble(header, [segment for segment in segments if segment is not None]), quality)
    mcus = np.repeat(came, layout.interval)[: layout.mcus].reshape(layout.rows, layout.columns)
    filled = copied(segments, layout)
    drawn = None
    if len(shares) >= format.base_k > 0:
        drawn = _enlarged_base(format, shares)
    elif came.any() and quality is not None and layout.width * layout.height <= MAX_REDRAWN_PIXELS:
        drawn = redrawn(assemble(header, filled), mcus, layout, quality)
    if drawn is not None:
        filled = [segment or drawn[index] for index, segment in enumerate(segments)]
    elif not came.any():
        return Expired()
    return Partial(assemble(header, filled), quality, float(mcus.mean()), blocks(mcus, layout))


def _intervals(width: int) -> list[int]:
    """The interval for an image of this width, then shorter ones for when a segment fills more than a datagram."""
    columns = -(-width // 16)
    first = next((interval for interval in INTERVALS if columns % interval == 0), 4)
    shorter = [interval for interval in range(first - 1, 0, -1) if columns % interval == 0]
    return [first, *shorter] if shorter else [first, 1]


def _header_of(format_: WireImageFormat, tables: bytes) -> tuple[bytes, Layout]:
    if format_.tables:
        layout = parse_header(tables)
        if (layout.width, layout.height, layout.interval) != (format_.width, format_.height, format_.interval):
            raise WireError(
                f"the registered header is of {layout.width}x{layout.height} pixels with restart interval "
                f"{layout.interval}; the fragment says {format_.width}x{format_.height} and {format_.interval}"
            )
        header = tables
    else:
        layout = standard_layout(format_.width, format_.height, format_.interval)
        header = standard_header(format_.width, format_.height, format_.quality, format_.interval)
    if layout.segments > format_.k * MAX_COUNT:
        raise WireError(f"{layout.segments} segments in k = {format_.k} symbols; at most {MAX_COUNT} in each")
    return header, layout


def _decode_opaque(format_: WireImageFormat, symbols: Mapping[int, bytes]) -> Complete | Expired:
    size = -(-format_.body_bytes // format_.k)
    last = format_.body_bytes - (format_.k - 1) * size
    if last <= 0:
        raise WireError(f"a body of {format_.body_bytes} bytes cannot be in k = {format_.k} slices of {size}")
    for index, symbol in symbols.items():
        expected = last if index == format_.k - 1 else size
        if len(symbol) != expected:
            raise WireError(f"fragment {index} of an opaque body has {len(symbol)} bytes; expected {expected}")
    data = recover(symbols, format_.k, format_.n)
    if len(data) < format_.k:
        return Expired()
    return Complete(b"".join(data[index] for index in range(format_.k))[: format_.body_bytes], None)


def _base_size(width: int, height: int) -> tuple[int, int]:
    """Width and height of the base image: the shorter side is `BASE_SIDE`, or the image's own if that is less."""
    shorter = min(width, height)
    side = min(BASE_SIDE, shorter)
    return (width * side + shorter // 2) // shorter, (height * side + shorter // 2) // shorter


def _base_body(bgr: Pixels) -> bytes:
    """The base image's scan behind its length; nothing if the length does not fit, as of a strip 16 pixels high."""
    height, width = bgr.shape[:2]
    small: Pixels = cv2.resize(bgr, _base_size(width, height), interpolation=cv2.INTER_AREA)
    (scan,) = compress(small, BASE_QUALITY, 0)
    return _SHARE.pack(len(scan)) + scan if len(scan) < 1 << 16 else b""


def _slices(body: bytes, count: int) -> list[bytes]:
    """`count` slices of one length, the last ones padded with zeros."""
    size = -(-len(body) // count)
    return [body[start : start + size].ljust(size, b"\0") for start in range(0, count * size, size)]


def _unshared(symbols: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Fragments split into shares of the base image and symbols."""
    shares, rest = {}, {}
    size: int | None = None
    for index, fragment in symbols.items():
        length = int.from_bytes(fragment[: _SHARE.size], "big")
        size = length if size is None else size
        if length != size or len(fragment) <= _SHARE.size + length:
            raise WireError(
                f"fragment {index} has {len(fragment)} bytes and a share of {length}; others' are of {size}"
            )
        shares[index] = fragment[_SHARE.size : _SHARE.size + length]
        rest[index] = fragment[_SHARE.size + length :]
    return shares, rest


def _enlarged_base(format_: WireImageFormat, shares: Mapping[int, bytes]) -> list[bytes] | None:
    """Segments of the base image, enlarged and coded as the image is; None if it is damaged."""
    pieces = recover(shares, format_.base_k, format_.n)
    body = b"".join(pieces[index] for index in range(format_.base_k))
    length = int.from_bytes(body[: _SHARE.size], "big")
    width, height = _base_size(format_.width, format_.height)
    scan = body[_SHARE.size : _SHARE.size + length]
    small = decoded(assemble(standard_header(width, height, BASE_QUALITY, 0), [scan]), width, height)
    if small is None:
        return None
    large: Pixels = cv2.resize(small, (format_.width, format_.height), interpolation=cv2.INTER_CUBIC)
    return compress(large, format_.quality, format_.interval)
