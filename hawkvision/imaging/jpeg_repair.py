"""Reduces a JPEG to what decoding needs, so that a strict decoder accepts it if all samples are there.

    SOI  junk  APP0  APP1  APP2 (ICC)  DQT  SOF  DHT  SOS  data 00 RST0 data RST0 data 00 00  tag instead of EOI
    SOI        APP0                    DQT  SOF  DHT  SOS  data    RST0 data RST1 data  tag                 EOI

Tables, frame, scans and the two segments that define the colours (JFIF and Adobe) are kept. Colour profiles, other
metadata and stray bytes between segments are removed. Restart markers are renumbered, scan parameters of sequential
frames are corrected, and the end marker is written. Entropy-coded data stay unchanged, so a decoder that reads the
result without a warning has read all samples.

Every step is a search or a copy in C. Python code runs once per segment, at most `MAX_SEGMENTS` times.
Source: ITU-T T.81 annexes B (markers), A.2 (blocks of a scan) and G.1 (progressive scans).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from hawkvision.core.errors import BadImage

MAX_SEGMENTS: Final = 2048
"""Marker segments of one file: 512 before the first scan, as `probe` allows, and 100 scans with some tables each."""
MAX_MARKERS: Final = 1 << 20
"""Restart markers of one file: 50 megapixels with one behind every unit of 8 x 8 pixels have 781,250."""
TAIL_BYTES: Final = 64
"""Bytes that `JpegStream.body` appends to each piece of data on demand: more than decoders read ahead (eight)."""

MAX_TABLES_BYTES: Final = 1 << 14
"""Bytes before a scan whose pieces are decoded one by one; a full set of tables takes 3 KB."""

_TABLES: Final = frozenset((0xDB, 0xC4, 0xCC, 0xDD))
"""DQT, DHT, DAC and DRI."""
_FRAMES: Final = frozenset((0xC0, 0xC1, 0xC2, 0xC9, 0xCA))
_PROGRESSIVE: Final = frozenset((0xC2, 0xCA))
_ARITHMETIC: Final = frozenset((0xC9, 0xCA))
_ALONE: Final = frozenset((0x01, *range(0xD0, 0xD8)))
_SOI: Final = b"\xff\xd8"
_EOI: Final = b"\xff\xd9"
_JFIF: Final = b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0"


@dataclass(frozen=True, slots=True)
class JpegComponent:
    """A component of a frame: its name, and its blocks across and down in a coded unit (MCU)."""

    name: int
    across: int
    down: int


@dataclass(frozen=True, slots=True)
class JpegFrame:
    """The properties that all scans share."""

    marker: int
    payload: bytes
    """The frame's segment, with the true height."""
    width: int
    height: int
    components: tuple[JpegComponent, ...]

    @property
    def progressive(self) -> bool:
        """Whether later scans refine earlier ones."""
        return self.marker in _PROGRESSIVE

    @property
    def arithmetic(self) -> bool:
        """Whether the coding is arithmetic; decoders do not notice then that data end too early."""
        return self.marker in _ARITHMETIC

    @property
    def unit(self) -> tuple[int, int]:
        """Width and height in pixels of a unit of a scan with all components."""
        if len(self.components) == 1:
            return 8, 8
        return 8 * max(c.across for c in self.components), 8 * max(c.down for c in self.components)

    def units(self, components: tuple[JpegComponent, ...]) -> int:
        """Units of a scan of these components (T.81 A.2)."""
        most_across, most_down = max(c.across for c in self.components), max(c.down for c in self.components)
        if len(components) == 1:
            (only,) = components
            across = -(-self.width * only.across // most_across)
            down = -(-self.height * only.down // most_down)
            return -(-across // 8) * -(-down // 8)
        return -(-self.width // (8 * most_across)) * -(-self.height // (8 * most_down))

    def segment(self, width: int, height: int) -> bytes:
        """The frame's segment for an image of another size."""
        components = self.payload[5:]
        if len(self.components) == 1:  # a single component is coded block by block, whatever its factors
            components = bytes((1, components[1], 0x11, components[3]))
        return _segment(self.marker, self.payload[:1] + struct.pack(">HH", height, width) + components)


@dataclass(frozen=True, slots=True)
class JpegScan:
    """One scan with the tables that come before it."""

    tables: bytes
    header: bytes
    """The SOS segment."""
    pieces: tuple[bytes, ...]
    """Entropy-coded data between restart markers."""
    units: int
    interval: int
    """Units of each piece but the last; 0 if there is one piece."""

    def trimmed(self, spared: int) -> JpegScan:
        """The scan without zero bytes at the ends of its pieces, except for `spared` of each."""
        return replace(self, pieces=tuple(_without_zeros(piece, spared) for piece in self.pieces))

    def units_of(self, index: int) -> int:
        """Units of one piece."""
        return self.units - index * self.interval if index == len(self.pieces) - 1 else self.interval


@dataclass(frozen=True, slots=True)
class JpegStream:
    """A JPEG in parts."""

    head: bytes
    """SOI and the segments that define the colours."""
    frame: JpegFrame
    scans: tuple[JpegScan, ...]
    ended: bool
    """Whether the end marker follows."""

    @property
    def plain(self) -> bool:
        """Whether it has one scan of all components with Huffman codes."""
        return len(self.scans) == 1 and not self.frame.progressive and not self.frame.arithmetic

    def trimmed(self, spared: int = 0) -> JpegStream:
        """See `JpegScan.trimmed`."""
        return replace(self, scans=tuple(scan.trimmed(spared) for scan in self.scans))

    def body(self, tail: bytes = b"", *, end: bool = True) -> bytes:
        """The whole file, with `tail` behind each piece of data."""
        parts = [self.head]
        for index, scan in enumerate(self.scans):
            parts.append(scan.tables)
            if not index:
                parts.append(self.frame.segment(self.frame.width, self.frame.height))
            parts += (scan.header, *_joined(scan.pieces, tail))
        return b"".join((*parts, _EOI)) if end else b"".join(parts)

    def alone(self, index: int, tail: bytes = b"", *, end: bool = True) -> bytes | None:
        """One piece of a plain image as an image of its own.

        None if no image size has the same number of units, or if there are more tables than an image needs.
        """
        scan, (unit_width, unit_height) = self.scans[0], self.frame.unit
        units, columns = scan.units_of(index), -(-self.frame.width // unit_width)
        across = units if units * unit_width < 1 << 16 else columns
        if units % across or len(self.head) + len(scan.tables) > MAX_TABLES_BYTES:
            return None
        frame = self.frame.segment(across * unit_width, units // across * unit_height)
        none = _segment(0xDD, b"\0\0")
        parts = (self.head, scan.tables, none, frame, scan.header, scan.pieces[index], tail, _EOI if end else b"")
        return b"".join(parts)


def taken_apart(data: bytes, height: int) -> JpegStream:
    """Read a JPEG. `height` is the image's height, which the frame may leave open.

    Raises:
        BadImage: if scans, or pieces between restart markers, are missing.
    """
    markers = _Markers(data)
    reader = _SegmentReader(data, height, markers)
    for marker, payload, at in markers.segments():
        if marker != 0xDA:
            reader.take(marker, payload)
        else:
            stop, ends = markers.scan_end(at)
            if reader.take_scan(payload, at, stop, ends=ends):
                break
    return reader.stream()


def scans(data: bytes) -> int:
    """The number of scans of a JPEG.

    Raises:
        BadImage: if it has more than `MAX_SEGMENTS` segments.
    """
    return sum(marker == 0xDA for marker, _, _ in _Markers(data).segments())


class _Markers:
    """All positions of 0xff before a byte other than a stuffed zero or a fill byte."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        octets = np.frombuffer(data, np.uint8)
        code = octets[1:]
        found = (octets[:-1] == 0xFF) & (code != 0x00) & (code != 0xFF)
        if np.count_nonzero(found) > MAX_MARKERS:
            raise BadImage(f"JPEG: more than {MAX_MARKERS} markers")
        self._at = np.flatnonzero(found)
        self._code = code[self._at]
        restart = (self._code >= 0xD0) & (self._code <= 0xD7)
        self._ends = np.flatnonzero(~restart)

    def segments(self) -> Iterator[tuple[int, bytes, int]]:
        """Marker, payload and end of each segment, to the end marker or the end of the data.

        Stray bytes, markers without a length and the data of scans are skipped, as decoders do.
        """
        at = 2
        for _ in range(MAX_SEGMENTS):
            index = int(np.searchsorted(self._at, at))
            if index == len(self._at):
                return
            marker, at = int(self._code[index]), int(self._at[index]) + 2
            if marker in _ALONE:
                continue
            if marker == 0xD9:
                yield marker, b"", at
                return
            end = at + max(2, int.from_bytes(self._data[at : at + 2], "big"))
            if end > len(self._data):
                return
            yield marker, self._data[at + 2 : end], end
            at = self.scan_end(end)[0] if marker == 0xDA else end
        raise BadImage(f"JPEG: more than {MAX_SEGMENTS} segments")

    def scan_end(self, at: int) -> tuple[int, bool]:
        """The position of the first marker that is no restart marker, or else of the end; and whether the end marker is
        there.
        """
        index = int(np.searchsorted(self._ends, np.searchsorted(self._at, at)))
        if index == len(self._ends):
            return len(self._data), False
        found = self._ends[index]
        return int(self._at[found]), bool(self._code[found] == 0xD9)

    def between(self, start: int, stop: int, most: int) -> list[int]:
        """The limits of the pieces of data: the start, each marker, the stop. Each but the stop has two bytes.

        Of more than `most` markers, only so many are given; the last takes the place of the stop.
        """
        first, last = (int(index) for index in np.searchsorted(self._at, (start, stop)))
        bounds = [start - 2, *self._at[first : min(last, first + most)].tolist()]
        return bounds if last - first > most else [*bounds, stop]


class _SegmentReader:
    """The parts that were read so far."""

    def __init__(self, data: bytes, height: int, markers: _Markers) -> None:
        self._data = data
        self._height = height
        self._markers = markers
        self._head = [_SOI]
        self._tables: list[bytes] = []
        self._scans: list[JpegScan] = []
        self._adobe = b""
        self._frame: JpegFrame | None = None
        self._interval = 0
        self.ended = False
        self._missing: dict[tuple[int, int], int] = {}
        """Of the coefficients of each component, the number of low bits that are still missing."""

    def take(self, marker: int, payload: bytes) -> None:
        """Read one segment that belongs to no scan."""
        if marker in _TABLES:
            self._tables.append(_segment(marker, payload))
            if marker == 0xDD and len(payload) == 2:
                self._interval = int.from_bytes(payload, "big")
        elif marker in _FRAMES and self._frame is None:
            self._frame = _frame(marker, payload, self._height)
        elif marker == 0xE0 and payload.startswith(b"JFIF\0") and len(payload) >= len(_JFIF):
            self._head.append(_segment(marker, _JFIF))
        elif marker == 0xEE and payload.startswith(b"Adobe") and len(payload) >= 12:
            self._adobe = payload[:12]
        elif marker == 0xD9:
            self.ended = True

    def take_scan(self, payload: bytes, start: int, stop: int, *, ends: bool) -> bool:
        """Read a scan with this header and the data behind it. Returns whether nothing relevant can follow.

        `ends` says whether the end marker follows.
        """
        frame = self._frame
        chosen = _chosen(frame, payload)
        if frame is None or not chosen:
            raise BadImage(f"JPEG: the scan at byte {start} is not one of the frame's components")
        units = frame.units(chosen)
        expected = -(-units // self._interval) if self._interval else 1
        bounds = self._markers.between(start, stop, 2 * expected)
        pieces = [self._data[before + 2 : behind].rstrip(b"\xff") for before, behind in pairwise(bounds)]
        if len(pieces) > expected:  # doubled restart markers, or bytes behind the last one that counts
            pieces = [piece for piece in pieces if piece][:expected]
        if len(pieces) < expected:
            raise BadImage(f"JPEG: the image is cut off: {len(pieces)} of {expected} restart intervals are there")
        if not frame.progressive:
            payload = payload[:-3] + b"\0\x3f\0"
        scan = JpegScan(b"".join(self._tables), _segment(0xDA, payload), tuple(pieces), units, self._interval)
        self._scans.append(scan)
        self._tables = []
        self._note(chosen, payload)
        self.ended |= ends
        return not frame.progressive and not self._missing

    def _note(self, chosen: tuple[JpegComponent, ...], payload: bytes) -> None:
        """Record the coefficients that a scan brings (T.81 G.1.1.1)."""
        assert self._frame is not None
        if not self._missing and len(self._scans) == 1:
            self._missing = {(c.name, k): 16 for c in self._frame.components for k in range(64)}
        first, last, low = payload[-3], payload[-2], payload[-1] & 15
        for component in chosen:
            for k in range(first, min(last, 63) + 1):
                if low:
                    self._missing[component.name, k] = low
                else:
                    self._missing.pop((component.name, k), None)

    def stream(self) -> JpegStream:
        """The complete stream.

        Raises:
            BadImage: if scans are missing.
        """
        if self._frame is None or not self._scans:
            raise BadImage("JPEG: the data end before any scan")
        absent = any(self._missing.get((c.name, 0), 0) == 16 for c in self._frame.components)
        if absent or (self._missing and not self.ended):
            raise BadImage(
                f"JPEG: the image is cut off: the data end in or behind scan {len(self._scans)}; more follow"
            )
        if self._frame.arithmetic and not self.ended:
            raise BadImage("JPEG: the image is cut off: an arithmetically coded image has no end marker")
        if self._adobe:
            self._head.append(_segment(0xEE, _known_transform(self._adobe, self._frame)))
        return JpegStream(b"".join(self._head), self._frame, tuple(self._scans), self.ended)


def _frame(marker: int, payload: bytes, height: int) -> JpegFrame:
    count = payload[5] if len(payload) > 5 else 0
    if not count or len(payload) != 6 + 3 * count:
        raise BadImage(f"JPEG: the frame header has {len(payload)} bytes; expected {6 + 3 * count}")
    stated, width = struct.unpack_from(">HH", payload, 1)
    components = tuple(
        JpegComponent(payload[at], payload[at + 1] >> 4, payload[at + 1] & 15) for at in range(6, 6 + 3 * count, 3)
    )
    if not all(1 <= c.across <= 4 and 1 <= c.down <= 4 for c in components):
        raise BadImage("JPEG: a component is sampled other than one to four times across and down")
    return JpegFrame(marker, payload, width, stated or height, components)


def _chosen(frame: JpegFrame | None, scan: bytes) -> tuple[JpegComponent, ...]:
    """A scan's components; none if it is not a scan of the frame."""
    count = scan[0] if scan else 0
    if frame is None or not 1 <= count <= 4 or len(scan) != 4 + 2 * count:
        return ()
    named = {component.name: component for component in frame.components}
    names = scan[1 : 1 + 2 * count : 2]
    return tuple(named[name] for name in names) if all(name in named for name in names) else ()


def _known_transform(adobe: bytes, frame: JpegFrame) -> bytes:
    """Adobe's segment with a known colour transform. Decoders take an unknown one for YCbCr or YCCK."""
    return adobe if adobe[11] <= 2 else adobe[:11] + (b"\2" if len(frame.components) == 4 else b"\1")


def _joined(pieces: tuple[bytes, ...], tail: bytes) -> Iterator[bytes]:
    for index, piece in enumerate(pieces):
        if index:
            yield bytes((0xFF, 0xD0 + (index - 1 & 7)))
        yield piece
        yield tail


def _without_zeros(piece: bytes, spared: int) -> bytes:
    stripped = piece.rstrip(b"\0")
    spared += stripped.endswith(b"\xff")  # the first of them belongs to this one
    return piece[: len(stripped) + spared]


def _segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload
