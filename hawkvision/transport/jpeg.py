"""Baseline JPEG as far as a transport needs it: headers, restart segments, and segments that show nothing.

    SOI APP0 DQT×2 SOF0 DHT×4 DRI SOS   segment RST0 segment RST1 … segment   EOI
    └─ the header: 629 bytes that size, quality and interval imply ─┘

Prediction of DC starts anew with each restart segment (T.81 F.1.1.5.1), so that a segment means the same wherever it
stands: it can be lost alone, sent in any order, and be copied into the place of another with as many MCUs.
Tables are those of T.81 Annex K, scaled as libjpeg does; encoders that are built on libjpeg write exactly these.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from hawkvision.transport.wire import WireError

SOI: Final = b"\xff\xd8"
EOI: Final = b"\xff\xd9"
SEPARATOR: Final = b"\xff\xd0"
"""Between segments on the wire; numbers are given when all segments are in their places."""
MARKERS: Final = tuple(bytes((0xFF, 0xD0 + number)) for number in range(8))

MAX_HEADER_BYTES: Final = 4096
"""Of a header that we keep for a peer: four quantisation and four Huffman tables of full size take 1.2 KB."""

_ZIGZAG: Final = (
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21,
    28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61,
    54, 47, 55, 62, 63,
)  # fmt: skip
_LUMINANCE: Final = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29,
    51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120,
    101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMINANCE: Final = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99,
    99, 99, 99, 99, *(99,) * 32,
)  # fmt: skip
"""T.81 tables K.1 and K.2, row by row."""

_DC_LENGTHS: Final = (
    bytes.fromhex("00010501010101010100000000000000"),
    bytes.fromhex("00030101010101010101010000000000"),
)
_AC_LENGTHS: Final = (
    bytes.fromhex("0002010303020403050504040000017d"),
    bytes.fromhex("00020102040403040705040400010277"),
)
_DC_SYMBOLS: Final = bytes(range(12))
_AC_SYMBOLS: Final = (
    bytes.fromhex(
        "01020300041105122131410613516107227114328191a1082342b1c11552d1f02433627282090a161718191a25262728292a3435363738"
        "393a434445464748494a535455565758595a636465666768696a737475767778797a838485868788898a92939495969798999aa2a3a4a5"
        "a6a7a8a9aab2b3b4b5b6b7b8b9bac2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9dae1e2e3e4e5e6e7e8e9eaf1f2f3f4f5f6f7f8f9fa"
    ),
    bytes.fromhex(
        "000102031104052131061241510761711322328108144291a1b1c109233352f0156272d10a162434e125f11718191a262728292a353637"
        "38393a434445464748494a535455565758595a636465666768696a737475767778797a82838485868788898a92939495969798999aa2a3"
        "a4a5a6a7a8a9aab2b3b4b5b6b7b8b9bac2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9dae2e3e4e5e6e7e8e9eaf2f3f4f5f6f7f8f9fa"
    ),
)
"""T.81 tables K.3 to K.6: how many codes have 1, 2, … 16 bits, and the symbols in the order of their codes."""


_SAMPLING: Final = b"\x01\x22\x00\x02\x11\x01\x03\x11\x01"
_SCAN: Final = b"\x03\x01\x00\x02\x11\x03\x11\0\x3f\0"
_STANDARD_CODES: Final = {
    0x00: _DC_LENGTHS[0] + _DC_SYMBOLS,
    0x10: _AC_LENGTHS[0] + _AC_SYMBOLS[0],
    0x01: _DC_LENGTHS[1] + _DC_SYMBOLS,
    0x11: _AC_LENGTHS[1] + _AC_SYMBOLS[1],
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a JPEG's segments lie in its picture.

    `nothing` is the code of an MCU that changes no DC and has no AC coefficients, as a string of 0s and 1s.
    """

    width: int
    height: int
    mcu_width: int
    mcu_height: int
    interval: int
    nothing: str

    @property
    def columns(self) -> int:
        """MCUs in one row."""
        return -(-self.width // self.mcu_width)

    @property
    def rows(self) -> int:
        """Rows of MCUs."""
        return -(-self.height // self.mcu_height)

    @property
    def mcus(self) -> int:
        """MCUs of the picture."""
        return self.rows * self.columns

    @property
    def segments(self) -> int:
        """Restart segments; the last may be shorter than the others."""
        return -(-self.mcus // self.interval)

    @property
    def last_mcus(self) -> int:
        """MCUs of the last segment."""
        return self.mcus - (self.segments - 1) * self.interval

    def blank(self, mcus: int) -> bytes:
        """A segment of so many MCUs that shows middle grey."""
        bits = self.nothing * mcus
        padded = bits + "1" * (-len(bits) % 8)
        return int(padded, 2).to_bytes(len(padded) // 8, "big").replace(b"\xff", b"\xff\0")


def standard_layout(width: int, height: int, interval: int) -> Layout:
    """Of a picture with the implied header: 4:2:0, so an MCU is 16×16 pixels; four blocks of Y, one of Cb and Cr."""
    return Layout(width, height, 16, 16, interval, "001010" * 4 + "0000" * 2)


@functools.cache
def quantisation(quality: int) -> tuple[bytes, bytes]:
    """Luminance and chrominance steps in zigzag order, for a quality of 1..100 on libjpeg's scale."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return (_scaled(_LUMINANCE, scale), _scaled(_CHROMINANCE, scale))


def _scaled(table: tuple[int, ...], scale: int) -> bytes:
    return bytes(min(max((table[place] * scale + 50) // 100, 1), 255) for place in _ZIGZAG)


@functools.lru_cache(maxsize=256)
def standard_header(width: int, height: int, quality: int, interval: int) -> bytes:
    """Everything before the first segment of a 4:2:0 picture with standard tables: SOI to SOS.

    An interval of zero leaves DRI out.
    """
    luminance, chrominance = quantisation(quality)
    parts = [
        SOI,
        _marker(0xE0, b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0"),
        _marker(0xDB, b"\0" + luminance),
        _marker(0xDB, b"\x01" + chrominance),
        _marker(0xC0, struct.pack(">BHHB", 8, height, width, 3) + _SAMPLING),
    ]
    parts += (_marker(0xC4, bytes((place,)) + table) for place, table in _STANDARD_CODES.items())
    if interval:
        parts.append(_marker(0xDD, struct.pack(">H", interval)))
    parts.append(_marker(0xDA, _SCAN))
    return b"".join(parts)


def assemble(header: bytes, segments: list[bytes]) -> bytes:
    """The whole file: segments in raster order with restart markers numbered between them."""
    parts = [header, segments[0]]
    for number, segment in enumerate(segments[1:]):
        parts += (MARKERS[number & 7], segment)
    parts.append(EOI)
    return b"".join(parts)


def scan_of(body: bytes) -> bytes:
    """The entropy-coded data of a JPEG that we have just made ourselves."""
    start = body.index(b"\xff\xda")
    return body[start + 2 + int.from_bytes(body[start + 2 : start + 4], "big") : -2]


def split_scan(scan: bytes) -> list[bytes]:
    """A scan cut at its restart markers, whatever their numbers."""
    for marker in MARKERS[1:]:
        scan = scan.replace(marker, SEPARATOR)
    return scan.split(SEPARATOR)


def is_clean(data: bytes) -> bool:
    """Whether data hold no marker but separators: every 0xff is stuffed or begins one."""
    return data.count(b"\xff") == data.count(b"\xff\0") + data.count(SEPARATOR)


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
    numbers = _RESTARTS.findall(scan)
    if end < 0 or found.turned or any(marker != MARKERS[i & 7] for i, marker in enumerate(numbers)):
        return None
    segments = split_scan(scan)
    if len(segments) != found.layout.segments or not all(segments) or not all(map(is_clean, segments)):
        return None
    return Cut(b"" if found.standard else found.canonical, found.layout, found.quality, segments)


def parse_header(header: bytes) -> Layout:
    """The layout of a picture whose header a peer has registered.

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


_RESTARTS: Final = re.compile(rb"\xff[\xd0-\xd7]")
_MAX_MARKERS: Final = 256
_ORIENTATION: Final = re.compile(rb"\x12\x01\x03\0\x01\0\0\0([^\x01])\0|\x01\x12\0\x03\0\0\0\x01\0([^\x01])")
"""An EXIF entry of tag 0x0112, one short, in either byte order, that says anything but upright."""


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
                raise WireError(f"JPEG header: marker 0xff{code:02x} has no place in a baseline picture")
        header.kept.append(_marker(code, payload))
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
    canonical = SOI + b"".join(header.kept) + _marker(0xDA, scan)
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
    sampled = header.frame[6:] == _SAMPLING and scan == _SCAN
    return not foreign and sampled and header.codes == _STANDARD_CODES


def _marker(code: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, code, len(payload) + 2) + payload
