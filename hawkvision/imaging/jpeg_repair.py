"""Reduces a JPEG to what decoding needs, so that a strict decoder accepts it if all samples are there.

    SOI  junk  APP0  APP1  APP2 (ICC)  DQT  SOF  DHT  SOS  data 00 RST0 data RST0 data 00 00  tag instead of EOI
    SOI        APP0                    DQT  SOF  DHT  SOS  data    RST0 data RST1 data  tag                 EOI

Tables, frame, scans and the two segments that define the colours (JFIF and Adobe) are kept. Colour profiles, other
metadata and stray bytes between segments are removed. Restart markers are renumbered, scan parameters of sequential
frames are corrected, and the end marker is written. Entropy-coded data stay unchanged, so a decoder that reads the
result without a warning has read all samples.

Every step is a search or a copy in C. Python code runs once per segment, at most `MAX_SEGMENTS` times, and once per
restart interval.
Source: ITU-T T.81 annexes B (markers), A.2 (blocks of a scan) and G.1 (progressive scans).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from hawkvision.core.errors import BadImage
from hawkvision.imaging.jpeg import (
    ARITHMETIC,
    END_OF_IMAGE,
    EOI,
    FRAMES,
    PROGRESSIVE,
    RESTARTS,
    SOI,
    START_OF_SCAN,
    JpegComponent,
    JpegFrame,
    restart_intervals,
    scan_end,
    segment,
    segments,
)

MAX_SEGMENTS: Final = 2048
"""Marker segments of one file: 512 before the first scan, as `probe` allows, and 100 scans with some tables each."""
TAIL_BYTES: Final = 64
"""Bytes that `JpegStream.body` appends to each piece of data on demand: more than decoders read ahead (eight)."""
MAX_TABLES_BYTES: Final = 1 << 14
"""Bytes before a scan whose pieces are decoded one by one; a full set of tables takes 3 KB."""

_TABLES: Final = frozenset((0xDB, 0xC4, 0xCC, 0xDD))
"""DQT, DHT, DAC and DRI."""
_RESTART_INTERVAL: Final = 0xDD
_JFIF: Final = b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0"


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


@dataclass(frozen=True, slots=True)
class JpegStream:
    """A JPEG in parts."""

    head: bytes
    """SOI and the segments that define the colours."""
    frame: JpegFrame
    """With the true height."""
    scans: tuple[JpegScan, ...]
    ended: bool
    """Whether the end marker follows."""

    @classmethod
    def read(cls, data: bytes, height: int) -> JpegStream:
        """The parts of a file. `height` is the image's height, which the frame may leave open.

        Raises:
            BadImage: if scans, or pieces between restart markers, are missing.
        """
        reader = _StreamReader(data, height)
        for marker, _, start, end in segments(data, MAX_SEGMENTS):
            if end > len(data):
                break
            if marker != START_OF_SCAN:
                reader.take(marker, data[start:end])
            elif reader.take_scan(data[start:end], end):
                break
        return reader.stream()

    @property
    def arithmetic(self) -> bool:
        """Whether the coding is arithmetic; decoders do not notice then that data end too early."""
        return self.frame.marker in ARITHMETIC

    @property
    def plain(self) -> bool:
        """Whether it has one scan of all components with Huffman codes."""
        return len(self.scans) == 1 and self.frame.marker not in PROGRESSIVE | ARITHMETIC

    def trimmed(self, spared: int = 0) -> JpegStream:
        """Without zero bytes at the ends of the pieces, except for `spared` of each."""
        scans = (
            replace(scan, pieces=tuple(_without_zeros(piece, spared) for piece in scan.pieces)) for scan in self.scans
        )
        return replace(self, scans=tuple(scans))

    def body(self, tail: bytes = b"", *, end: bool = True) -> bytes:
        """The whole file, with `tail` behind each piece of data."""
        parts = [self.head]
        for index, scan in enumerate(self.scans):
            parts.append(scan.tables)
            if not index:
                parts.append(_frame_segment(self.frame, self.frame.width, self.frame.height))
            parts += (scan.header, *_joined(scan.pieces, tail))
        return b"".join((*parts, EOI)) if end else b"".join(parts)

    def alone(self, index: int, tail: bytes = b"", *, end: bool = True) -> bytes | None:
        """One piece of a plain image as an image of its own.

        None if no image size has the same number of units, or if there are more tables than an image needs.
        """
        scan, components = self.scans[0], self.frame.components
        single = len(components) == 1
        unit_width = 8 if single else 8 * max(c.across for c in components)
        unit_height = 8 if single else 8 * max(c.down for c in components)
        last = index == len(scan.pieces) - 1
        units = scan.units - index * scan.interval if last else scan.interval
        across = units if units * unit_width < 1 << 16 else -(-self.frame.width // unit_width)
        if units % across or len(self.head) + len(scan.tables) > MAX_TABLES_BYTES:
            return None
        frame = _frame_segment(self.frame, across * unit_width, units // across * unit_height)
        none = segment(_RESTART_INTERVAL, b"\0\0")
        parts = (self.head, scan.tables, none, frame, scan.header, scan.pieces[index], tail, EOI if end else b"")
        return b"".join(parts)


def scans(data: bytes) -> int:
    """The number of scans of a JPEG.

    Raises:
        BadImage: if it has more than `MAX_SEGMENTS` segments.
    """
    found = segments(data, MAX_SEGMENTS)
    return sum(marker == START_OF_SCAN and end <= len(data) for marker, _, _, end in found)


class _StreamReader:
    """The parts that were read so far."""

    def __init__(self, data: bytes, height: int) -> None:
        self._data = data
        self._height = height
        self._head = [SOI]
        self._tables: list[bytes] = []
        self._scans: list[JpegScan] = []
        self._adobe = b""
        self._frame: JpegFrame | None = None
        self._interval = 0
        self._ended = False
        self._missing: dict[tuple[int, int], int] = {}
        """Of the coefficients of each component, the number of low bits that are still missing."""

    def take(self, marker: int, payload: bytes) -> None:
        """Read one segment that belongs to no scan."""
        if marker in _TABLES:
            self._tables.append(segment(marker, payload))
            if marker == _RESTART_INTERVAL and len(payload) == 2:
                self._interval = int.from_bytes(payload, "big")
        elif marker in FRAMES and self._frame is None:
            frame = JpegFrame.read(marker, payload)
            if not all(1 <= c.across <= 4 and 1 <= c.down <= 4 for c in frame.components):
                raise BadImage("JPEG: a component is sampled other than one to four times across and down")
            self._frame = replace(frame, height=frame.height or self._height)
        elif marker == 0xE0 and payload.startswith(b"JFIF\0") and len(payload) >= len(_JFIF):
            self._head.append(segment(marker, _JFIF))
        elif marker == 0xEE and payload.startswith(b"Adobe") and len(payload) >= 12:
            self._adobe = payload[:12]
        elif marker == END_OF_IMAGE:
            self._ended = True

    def take_scan(self, header: bytes, start: int) -> bool:
        """Read a scan with this header, whose data begin at `start`. Returns whether nothing relevant can follow."""
        frame = self._frame
        chosen = () if frame is None else frame.scanned(header)
        if frame is None or not chosen:
            raise BadImage(f"JPEG: the scan at byte {start} is not one of the frame's components")
        units = _units(frame, chosen)
        expected = -(-units // self._interval) if self._interval else 1
        stop = scan_end(self._data, start)
        pieces = [piece.rstrip(b"\xff") for piece in restart_intervals(self._data, start, stop, 2 * expected)]
        if len(pieces) > expected:  # doubled restart markers, or bytes behind the last one that counts
            pieces = [piece for piece in pieces if piece][:expected]
        if len(pieces) < expected:
            raise BadImage(f"JPEG: the image is cut off: {len(pieces)} of {expected} restart intervals are there")
        progressive = frame.marker in PROGRESSIVE
        if not progressive:
            header = header[:-3] + b"\0\x3f\0"
        tables = b"".join(self._tables)
        self._scans.append(JpegScan(tables, segment(START_OF_SCAN, header), tuple(pieces), units, self._interval))
        self._tables = []
        self._note(frame, chosen, header)
        self._ended |= self._data[stop : stop + 2] == EOI
        return not progressive and not self._missing

    def _note(self, frame: JpegFrame, chosen: tuple[JpegComponent, ...], header: bytes) -> None:
        """Record the coefficients that a scan brings (T.81 G.1.1.1)."""
        if not self._missing and len(self._scans) == 1:
            self._missing = {(c.name, k): 16 for c in frame.components for k in range(64)}
        first, last, low = header[-3], header[-2], header[-1] & 15
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
        frame = self._frame
        if frame is None or not self._scans:
            raise BadImage("JPEG: the data end before any scan")
        absent = any(self._missing.get((c.name, 0), 0) == 16 for c in frame.components)
        if absent or (self._missing and not self._ended):
            raise BadImage(
                f"JPEG: the image is cut off: the data end in or behind scan {len(self._scans)}; more follow"
            )
        if frame.marker in ARITHMETIC and not self._ended:
            raise BadImage("JPEG: the image is cut off: an arithmetically coded image has no end marker")
        if self._adobe:
            self._head.append(segment(0xEE, _known_transform(self._adobe, len(frame.components))))
        return JpegStream(b"".join(self._head), frame, tuple(self._scans), self._ended)


def _units(frame: JpegFrame, components: tuple[JpegComponent, ...]) -> int:
    """Units of a scan of these components (T.81 A.2)."""
    most_across, most_down = max(c.across for c in frame.components), max(c.down for c in frame.components)
    if len(components) == 1:
        (only,) = components
        across = -(-frame.width * only.across // most_across)
        down = -(-frame.height * only.down // most_down)
        return -(-across // 8) * -(-down // 8)
    return -(-frame.width // (8 * most_across)) * -(-frame.height // (8 * most_down))


def _frame_segment(frame: JpegFrame, width: int, height: int) -> bytes:
    """The frame's segment for an image of another size."""
    components = frame.payload[5:]
    if components[0] == 1:  # a single component is coded block by block, whatever its factors
        components = bytes((1, components[1], 0x11, components[3]))
    return segment(frame.marker, frame.payload[:1] + struct.pack(">HH", height, width) + components)


def _known_transform(adobe: bytes, components: int) -> bytes:
    """Adobe's segment with a known colour transform. Decoders take an unknown one for YCbCr or YCCK."""
    return adobe if adobe[11] <= 2 else adobe[:11] + (b"\2" if components == 4 else b"\1")


def _joined(pieces: tuple[bytes, ...], tail: bytes) -> Iterator[bytes]:
    for index, piece in enumerate(pieces):
        if index:
            yield RESTARTS[(index - 1) & 7]
        yield piece
        yield tail


def _without_zeros(piece: bytes, spared: int) -> bytes:
    stripped = piece.rstrip(b"\0")
    spared += stripped.endswith(b"\xff")  # the first of them belongs to this one
    return piece[: len(stripped) + spared]
