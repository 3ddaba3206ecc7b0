"""Splits callers' own JPEGs into header and segments, and reads the headers that peers register.

Only what a transport can send in pieces is read: baseline, one scan, restart markers. Everything else is an error, and
work is bounded by the number of marker segments, never by what they claim.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from hawkvision.transport.coding.jpeg import (
    EOI,
    MARKERS,
    SAMPLING,
    SCAN,
    SOI,
    STANDARD_CODES,
    Layout,
    is_clean,
    marker,
    quantisation,
    split_scan,
)
from hawkvision.transport.protocol.wire import WireError

MAX_HEADER_BYTES: Final = 4096
"""Of a header that is kept for a peer: four quantisation and four Huffman tables of full size take 1.2 KB."""

_RESTARTS: Final = re.compile(rb"\xff[\xd0-\xd7]")
_MAX_MARKERS: Final = 256
_ORIENTATION: Final = re.compile(rb"\x12\x01\x03\0\x01\0\0\0([^\x01])\0|\x01\x12\0\x03\0\0\0\x01\0([^\x01])")
"""An EXIF entry of tag 0x0112, one short, in either byte order, that says anything but upright."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A caller's JPEG taken apart. `header` is empty if size, quality and interval imply it."""

    header: bytes
    layout: Layout
    quality: int
    segments: list[bytes]


def cut(body: bytes) -> Cut | None:
    """Take a baseline JPEG with restart markers apart; None if it is anything else, damaged, or not upright."""
    try:
        found = _read(body)
    except WireError:
        return None
    end = body.find(EOI, found.scan_start)
    scan = body[found.scan_start : end]
    restarts = _RESTARTS.findall(scan)
    if end < 0 or found.turned or any(restart != MARKERS[i & 7] for i, restart in enumerate(restarts)):
        return None
    segments = split_scan(scan)
    if len(segments) != found.layout.segments or not all(segments) or not all(map(is_clean, segments)):
        return None
    return Cut(b"" if found.standard else found.canonical, found.layout, found.quality, segments)


def parse_header(header: bytes) -> Layout:
    """The layout of an image whose header a peer has registered.

    Raises:
        WireError: unless it is exactly what `cut` makes: SOI to SOS, nothing between that decoding does not need.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"the registered header has {len(header)} bytes; at most {MAX_HEADER_BYTES}")
    found = _read(header)
    if found.canonical != header:
        raise WireError("the registered header holds more than JFIF, Adobe, DQT, SOF0, DHT, DRI and SOS")
    return found.layout


@dataclass(slots=True)
class _Header:
    """What has been read of a header so far."""

    kept: list[bytes] = field(default_factory=list)
    quantisation: dict[int, bytes] = field(default_factory=dict)
    codes: dict[int, bytes] = field(default_factory=dict)
    """By class and place (0x00, 0x01, 0x10, 0x11): sixteen counts, then symbols."""
    frame: bytes = b""
    interval: int = 0
    turned: bool = False


@dataclass(frozen=True, slots=True)
class _Read:
    canonical: bytes
    layout: Layout
    quality: int
    standard: bool
    turned: bool
    scan_start: int


def _read(body: bytes) -> _Read:
    """Read the header of a baseline JPEG with restart markers.

    Raises:
        WireError: if it is not that, saying why.
    """
    header = _Header()
    for code, payload, end in _markers(body):
        match code:
            case 0xDA:
                return _finished(header, payload, end)
            case 0xDB:
                _read_quantisation(header, payload)
            case 0xC4:
                _read_codes(header, payload)
            case 0xC0 if not header.frame:
                _check_frame(payload)
                header.frame = payload
            case 0xDD if len(payload) == 2:
                header.interval = int.from_bytes(payload, "big")
            case 0xE0 if payload.startswith(b"JFIF\0") and len(payload) == 14:
                pass
            case 0xEE if payload.startswith(b"Adobe"):
                pass
            case 0xE1:
                header.turned |= payload.startswith(b"Exif") and _ORIENTATION.search(payload) is not None
                continue
            case _ if 0xE0 <= code <= 0xEF or code == 0xFE:
                continue
            case _:
                raise WireError(f"JPEG header: marker 0xff{code:02x} has no place in a baseline image")
        header.kept.append(marker(code, payload))
    raise WireError("JPEG header: it ends before a scan begins")


def _markers(body: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Code, payload and end of each marker segment behind SOI, `_MAX_MARKERS` at most."""
    at = 2
    if body[:2] != SOI:
        raise WireError("JPEG header: it does not begin with SOI")
    for _ in range(_MAX_MARKERS):
        length = int.from_bytes(body[at + 2 : at + 4], "big")
        end = at + 2 + length
        if body[at : at + 1] != b"\xff" or length < 2 or end > len(body):
            raise WireError(f"JPEG header: no whole marker segment at byte {at}")
        yield body[at + 1], body[at + 4 : end], end
        at = end


def _read_quantisation(header: _Header, payload: bytes) -> None:
    at = 0
    while at < len(payload):
        table = payload[at + 1 : at + 65]
        if payload[at] > 3 or len(table) != 64 or 0 in table:
            raise WireError("JPEG header: a quantisation table is not one of 64 bytes above zero at place 0 to 3")
        header.quantisation[payload[at]] = table
        at += 65


def _read_codes(header: _Header, payload: bytes) -> None:
    at = 0
    while at < len(payload):
        counts = payload[at + 1 : at + 17]
        stop = at + 17 + sum(counts)
        room = sum(count << (16 - bits) for bits, count in enumerate(counts, 1))
        if payload[at] not in (0x00, 0x01, 0x10, 0x11) or len(counts) != 16 or stop > len(payload) or room > 0xFFFF:
            raise WireError("JPEG header: a Huffman table is cut off, overfull or at a place that baseline lacks")
        header.codes[payload[at]] = payload[at + 1 : stop]
        at = stop


def _check_frame(frame: bytes) -> None:
    if len(frame) < 6 or frame[0] != 8 or frame[5] not in (1, 3) or len(frame) != 6 + 3 * frame[5]:
        raise WireError("JPEG header: expected a frame of 8-bit samples and 1 or 3 components")
    samplings = frame[7::3]
    if not any(frame[1:3]) or not any(frame[3:5]) or not all(0x11 <= s <= 0x44 and 1 <= s & 15 <= 4 for s in samplings):
        raise WireError("JPEG header: the frame has no pixels, or samples more often than four times")


def _finished(header: _Header, scan: bytes, scan_start: int) -> _Read:
    """Everything that the header says together, when its scan begins."""
    frame, interval = header.frame, header.interval
    components = frame[5] if frame else 0
    selectors = scan[2 : 1 + 2 * components : 2]
    if (
        not components
        or len(scan) != 4 + 2 * components
        or scan[0] != components
        or scan[1::2][:components] != frame[6::3]
    ):
        raise WireError("JPEG header: expected one scan of all components of its frame")
    if scan[-3:] != b"\0\x3f\0" or not 1 <= interval <= 255:
        raise WireError("JPEG header: expected a sequential scan with 1 to 255 MCUs between restart markers")
    if not all(place in header.quantisation for place in frame[8::3]):
        raise WireError("JPEG header: a component's quantisation table is missing")
    height, width = struct.unpack_from(">HH", frame, 1)
    shapes = [(1, 1)] if components == 1 else [(s >> 4, s & 15) for s in frame[7::3]]
    nothing = "".join(
        (_code_of_zero(header, s >> 4) + _code_of_zero(header, 0x10 | s & 15)) * (across * down)
        for s, (across, down) in zip(selectors, shapes, strict=True)
    )
    mcu_width, mcu_height = 8 * max(across for across, _ in shapes), 8 * max(down for _, down in shapes)
    layout = Layout(width, height, mcu_width, mcu_height, interval, nothing)
    tables = [header.quantisation[place] for place in frame[8::3]]
    quality, exact = _quality(tables)
    standard = exact and components == 3 and _is_standard(header, scan)
    canonical = SOI + b"".join(header.kept) + marker(0xDA, scan)
    return _Read(canonical, layout, quality, standard, header.turned, scan_start)


def _code_of_zero(header: _Header, place: int) -> str:
    """The code of symbol 0 (no difference of DC; end of block), as 0s and 1s."""
    table = header.codes.get(place, b"")
    code, at = 0, 16
    for bits, count in enumerate(table[:16], 1):
        found = table[at : at + count].find(0)
        if found >= 0:
            return f"{code + found:0{bits}b}"
        code, at = (code + count) << 1, at + count
    raise WireError(f"JPEG header: Huffman table {place:#04x} is missing or has no code for nothing")


def _quality(tables: list[bytes]) -> tuple[int, bool]:
    """The quality on libjpeg's scale of all components' quantisation tables, and whether it is exactly that."""
    for quality in range(1, 101):
        luminance, chrominance = quantisation(quality)
        if tables == [luminance, chrominance, chrominance][: len(tables)]:
            return quality, True
    steps = sum(tables[0])
    return min(range(100, 0, -1), key=lambda quality: abs(sum(quantisation(quality)[0]) - steps)), False


def _is_standard(header: _Header, scan: bytes) -> bool:
    """Whether, but for its quantisation, this `standard_header` would write it; JFIF is no matter."""
    foreign = any(kept[1] == 0xEE for kept in header.kept)
    sampled = header.frame[6:] == SAMPLING and scan == SCAN
    return not foreign and sampled and header.codes == STANDARD_CODES
