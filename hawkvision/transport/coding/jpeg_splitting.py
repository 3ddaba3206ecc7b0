"""Splits callers' own JPEGs into header and segments, and reads the headers that peers register.

Only what a transport can send in pieces is read: baseline, one scan, restart markers. Everything else is an error, and
work is bounded by the number of marker segments, never by what they claim.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hawkvision.core.errors import BadImage
from hawkvision.imaging.jpeg import EOI, RESTARTS, SOI, START_OF_SCAN, JpegFrame, segment, segments
from hawkvision.transport.coding.jpeg import (
    SAMPLING,
    SCAN,
    STANDARD_CODES,
    Layout,
    is_clean,
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
    """A caller's JPEG in pieces. `header` is empty if size, quality and interval imply it."""

    header: bytes
    layout: Layout
    quality: int
    segments: list[bytes]


def cut(body: bytes) -> Cut | None:
    """Cut a baseline JPEG with restart markers; None if it is anything else, damaged, or not upright."""
    try:
        header = _BaselineHeader(body)
    except WireError:
        return None
    end = body.find(EOI, header.scan_start)
    scan = body[header.scan_start : end]
    restarts = _RESTARTS.findall(scan)
    if end < 0 or header.turned or any(restart != RESTARTS[i & 7] for i, restart in enumerate(restarts)):
        return None
    pieces = split_scan(scan)
    if len(pieces) != header.layout.segments or not all(pieces) or not all(map(is_clean, pieces)):
        return None
    quality, exact = header.quality()
    return Cut(b"" if exact and header.standard else header.canonical, header.layout, quality, pieces)


def parse_header(header: bytes) -> Layout:
    """The layout of an image whose header a peer has registered.

    Raises:
        WireError: unless it is exactly what `cut` makes: SOI to SOS, nothing between that decoding does not need.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"the registered header has {len(header)} bytes; at most {MAX_HEADER_BYTES}")
    found = _BaselineHeader(header)
    if found.canonical != header:
        raise WireError("the registered header holds more than JFIF, Adobe, DQT, SOF0, DHT, DRI and SOS")
    return found.layout


class _BaselineHeader:
    """The header of a baseline JPEG with restart markers.

    Raises:
        WireError: if it is not that, saying why.
    """

    def __init__(self, body: bytes) -> None:
        self.turned = False
        self._kept: list[bytes] = [SOI]
        self._frame: JpegFrame | None = None
        self._tables: dict[int, bytes] = {}
        """Quantisation tables by place."""
        self._codes: dict[int, bytes] = {}
        """By class and place (0x00, 0x01, 0x10, 0x11): sixteen counts, then symbols."""
        self._interval = 0
        scan = self._read(body)
        self._kept.append(segment(START_OF_SCAN, scan))
        self.canonical = b"".join(self._kept)
        self.layout = self._finished(scan)

    @property
    def standard(self) -> bool:
        """Whether, but for its quantisation, `standard_header` would write it; JFIF is no matter."""
        assert self._frame is not None
        foreign = any(kept[1] == 0xEE for kept in self._kept)
        sampled = self._frame.payload[6:] == SAMPLING and self._kept[-1] == segment(START_OF_SCAN, SCAN)
        return not foreign and sampled and self._codes == STANDARD_CODES

    def quality(self) -> tuple[int, bool]:
        """The quality on libjpeg's scale of all components' quantisation tables, and whether it is exactly that."""
        assert self._frame is not None
        tables = [self._tables[component.table] for component in self._frame.components]
        for quality in range(1, 101):
            luminance, chrominance = quantisation(quality)
            if tables == [luminance, chrominance, chrominance][: len(tables)]:
                return quality, True
        steps = sum(tables[0])
        return min(range(100, 0, -1), key=lambda quality: abs(sum(quantisation(quality)[0]) - steps)), False

    def _read(self, body: bytes) -> bytes:
        """Read all segments to the first scan, whose header is returned."""
        at = 2
        if body[:2] != SOI:
            raise WireError("JPEG header: it does not begin with SOI")
        try:
            for marker, begin, start, end in segments(body, _MAX_MARKERS):
                if begin != at or end > len(body) or int.from_bytes(body[at + 2 : at + 4], "big") < 2:
                    raise WireError(f"JPEG header: no whole marker segment at byte {at}")
                at, payload = end, body[start:end]
                if marker == START_OF_SCAN:
                    self.scan_start = end
                    return payload
                if self._take(marker, payload):
                    self._kept.append(segment(marker, payload))
        except BadImage as error:
            raise WireError(f"JPEG header: {error.message}") from None
        raise WireError("JPEG header: it ends before a scan begins")

    def _take(self, marker: int, payload: bytes) -> bool:
        """Read a segment. Returns whether decoding needs it."""
        match marker:
            case 0xDB:
                self._read_quantisation(payload)
            case 0xC4:
                self._read_codes(payload)
            case 0xC0 if self._frame is None:
                self._read_frame(payload)
            case 0xDD if len(payload) == 2:
                self._interval = int.from_bytes(payload, "big")
            case 0xE0 if payload.startswith(b"JFIF\0") and len(payload) == 14:
                pass
            case 0xEE if payload.startswith(b"Adobe"):
                pass
            case 0xE1:
                self.turned |= payload.startswith(b"Exif") and _ORIENTATION.search(payload) is not None
                return False
            case _ if 0xE0 <= marker <= 0xEF or marker == 0xFE:
                return False
            case _:
                raise WireError(f"JPEG header: marker 0xff{marker:02x} has no place in a baseline image")
        return True

    def _read_quantisation(self, payload: bytes) -> None:
        for at in range(0, len(payload), 65):
            table = payload[at + 1 : at + 65]
            if payload[at] > 3 or len(table) != 64 or 0 in table:
                raise WireError("JPEG header: a quantisation table is not one of 64 bytes above zero at place 0 to 3")
            self._tables[payload[at]] = table

    def _read_codes(self, payload: bytes) -> None:
        at = 0
        while at < len(payload):
            counts = payload[at + 1 : at + 17]
            stop = at + 17 + sum(counts)
            room = sum(count << (16 - bits) for bits, count in enumerate(counts, 1))
            if payload[at] not in (0x00, 0x01, 0x10, 0x11) or len(counts) != 16 or stop > len(payload) or room > 0xFFFF:
                raise WireError("JPEG header: a Huffman table is cut off, overfull or at a place that baseline lacks")
            self._codes[payload[at]] = payload[at + 1 : stop]
            at = stop

    def _read_frame(self, payload: bytes) -> None:
        frame = JpegFrame.read(0xC0, payload)
        components = frame.components
        if payload[0] != 8 or len(components) not in (1, 3):
            raise WireError("JPEG header: expected a frame of 8-bit samples and 1 or 3 components")
        sampled = all(1 <= each.across <= 4 and 1 <= each.down <= 4 for each in components)
        if not frame.height or not frame.width or not sampled:
            raise WireError("JPEG header: the frame has no pixels, or samples more often than four times")
        self._frame = frame

    def _finished(self, scan: bytes) -> Layout:
        """The layout, from everything that the header says together."""
        frame, interval = self._frame, self._interval
        if frame is None or frame.scanned(scan) != frame.components:
            raise WireError("JPEG header: expected one scan of all components of its frame")
        if scan[-3:] != b"\0\x3f\0" or not 1 <= interval <= 255:
            raise WireError("JPEG header: expected a sequential scan with 1 to 255 MCUs between restart markers")
        components = frame.components
        if not all(component.table in self._tables for component in components):
            raise WireError("JPEG header: a component's quantisation table is missing")
        shapes = [(1, 1)] if len(components) == 1 else [(each.across, each.down) for each in components]
        selectors = scan[2 : 1 + 2 * len(components) : 2]
        nothing = "".join(
            (self._code_of_zero(each >> 4) + self._code_of_zero(0x10 | each & 15)) * (across * down)
            for each, (across, down) in zip(selectors, shapes, strict=True)
        )
        mcu_width, mcu_height = 8 * max(across for across, _ in shapes), 8 * max(down for _, down in shapes)
        return Layout(frame.width, frame.height, mcu_width, mcu_height, interval, nothing)

    def _code_of_zero(self, place: int) -> str:
        """The code of symbol 0 (no difference of DC; end of block), as 0s and 1s."""
        table = self._codes.get(place, b"")
        code, at = 0, 16
        for bits, count in enumerate(table[:16], 1):
            found = table[at : at + count].find(0)
            if found >= 0:
                return f"{code + found:0{bits}b}"
            code, at = (code + count) << 1, at + count
        raise WireError(f"JPEG header: Huffman table {place:#04x} is missing or has no code for nothing")
