"""JPEG's marker segments, frames and scans: read here for headers, for repair and for sending in pieces.

    FFD8  { FF marker, length:2, payload }*  FFDA scan header, data { FFD0..7 data }*  ...  FFD9
          └ SOFn: precision:1 height:2 width:2 count:1 { name:1 sampling:1 table:1 }*count

Source: ITU-T T.81 annexes B (markers) and A.2 (blocks of a scan).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from hawkvision.core.errors import BadImage

SOI: Final = b"\xff\xd8"
EOI: Final = b"\xff\xd9"
RESTARTS: Final = tuple(bytes((0xFF, 0xD0 + number)) for number in range(8))
START_OF_IMAGE: Final = 0xD8
END_OF_IMAGE: Final = 0xD9
START_OF_SCAN: Final = 0xDA
PROGRESSIVE: Final = frozenset((0xC2, 0xCA))
ARITHMETIC: Final = frozenset((0xC9, 0xCA))
FRAMES: Final = frozenset((0xC0, 0xC1, *PROGRESSIVE, *ARITHMETIC))
"""Frames that decoders here read: not lossless ones and hierarchical ones."""
MAX_STRAY_BYTES: Final = 1 << 18
"""Bytes between segments that are skipped in one file. The search is slow among fill bytes."""

_WITHOUT_LENGTH: Final = frozenset((0x01, *range(0xD0, 0xD8)))
_MARKER: Final = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
_RESTART: Final = re.compile(rb"\xff[\xd0-\xd7]")
_AFTER_SCAN: Final = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)


class JpegComponent(NamedTuple):
    """A component of a frame: its name, blocks across and down in a coded unit (MCU), and quantisation table."""

    name: int
    across: int
    down: int
    table: int


@dataclass(frozen=True, slots=True)
class JpegFrame:
    """A frame header. `height` is 0 if a DNL segment behind the first scan states it."""

    marker: int
    payload: bytes
    height: int
    width: int

    @classmethod
    def read(cls, marker: int, payload: bytes) -> JpegFrame:
        """The frame of a segment.

        Raises:
            BadImage: if the payload has another length than its number of components needs.
        """
        expected = 6 + 3 * payload[5] if len(payload) > 5 else 9
        if len(payload) != expected or expected == 6:
            raise BadImage(f"JPEG: the frame header has {len(payload)} bytes; expected {expected}")
        return cls(marker, payload, *struct.unpack_from(">HH", payload, 1))

    @property
    def components(self) -> tuple[JpegComponent, ...]:
        """The components, in the order of the frame."""
        rest = self.payload[6:]
        return tuple(
            JpegComponent(name, sampling >> 4, sampling & 15, table)
            for name, sampling, table in zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        )

    def scanned(self, header: bytes) -> tuple[JpegComponent, ...]:
        """The components of a scan with this header; none if it is not a scan of the frame."""
        count = header[0] if header else 0
        if not 1 <= count <= 4 or len(header) != 4 + 2 * count:
            return ()
        named = {component.name: component for component in self.components}
        names = header[1 : 1 + 2 * count : 2]
        return tuple(named[name] for name in names) if all(name in named for name in names) else ()


def segment(marker: int, payload: bytes) -> bytes:
    """One marker segment."""
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def segments(data: bytes, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Each marker segment behind SOI, to the end marker or the end of the data: (marker, place, payload start and end).

    The end is beyond the data if the segment is cut off.

    As decoders do, it skips stray bytes and fill bytes (T.81 B.1.1.2), markers without a length, and the data of scans.
    A length below two counts as two. The work is bounded by `most`, and by one search through the data of each scan.

    Raises:
        BadImage: if there are more than `most` segments, or more than `MAX_STRAY_BYTES` between them.
    """
    at, stray = 2, MAX_STRAY_BYTES
    for _ in range(most):
        found = _MARKER.search(data, at, at + stray + 2)
        if found is None and at + stray + 2 < len(data):
            raise BadImage(f"JPEG: more than {MAX_STRAY_BYTES} bytes between segments")
        if found is None:
            return
        stray -= found.start() - at
        at = found.start()
        marker = data[at + 1]
        if marker in _WITHOUT_LENGTH:
            at += 2
        elif marker in (START_OF_IMAGE, END_OF_IMAGE):
            yield marker, at, at + 2, at + 2
            if marker == END_OF_IMAGE:
                return
            at += 2
        elif at + 4 > len(data):
            yield marker, at, at + 4, at + 4
            return
        else:
            end = at + 2 + max(2, data[at + 2] << 8 | data[at + 3])
            yield marker, at, at + 4, end
            if end > len(data):
                return
            at = scan_end(data, end) if marker == START_OF_SCAN else end
    raise BadImage(f"JPEG: more than {most} segments")


def scan_end(data: bytes, start: int) -> int:
    """The position of the first marker behind `start` that is no restart marker, or else the end of the data."""
    found = _AFTER_SCAN.search(data, start)
    return len(data) if found is None else found.start()


def restart_intervals(data: bytes, start: int, stop: int, most: int) -> list[bytes]:
    """The entropy-coded data of a scan between its restart markers, whatever their numbers; `most` pieces at most."""
    pieces = []
    for found in islice(_RESTART.finditer(data, start, stop), most):
        pieces.append(data[start : found.start()])
        start = found.end()
    return pieces if len(pieces) == most else [*pieces, data[start:stop]]
