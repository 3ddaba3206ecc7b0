"""Baseline JPEG as far as a transport needs it: headers, restart segments, and segments that show nothing.

    SOI APP0 DQT×2 SOF0 DHT×4 DRI SOS   segment RST0 segment RST1 … segment   EOI
    └─ the header: 629 bytes that size, quality and interval imply ─┘

Prediction of DC starts anew with each restart segment (T.81 F.1.1.5.1), so that a segment means the same wherever it
stands: it can be lost alone, sent in any order, and be copied into the place of another with as many MCUs.
Tables are those of T.81 Annex K, scaled as libjpeg does; encoders that are built on libjpeg write exactly these.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Final

import cv2

from hawkvision.core.types import Pixels
from hawkvision.imaging.jpeg import EOI, RESTARTS, SOI, START_OF_SCAN, segment

SEPARATOR: Final = b"\xff\xd0"
"""Between segments on the wire; numbers are given when all segments are in their places."""

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


SAMPLING: Final = b"\x01\x22\x00\x02\x11\x01\x03\x11\x01"
SCAN: Final = b"\x03\x01\x00\x02\x11\x03\x11\0\x3f\0"
STANDARD_CODES: Final = {
    0x00: _DC_LENGTHS[0] + _DC_SYMBOLS,
    0x10: _AC_LENGTHS[0] + _AC_SYMBOLS[0],
    0x01: _DC_LENGTHS[1] + _DC_SYMBOLS,
    0x11: _AC_LENGTHS[1] + _AC_SYMBOLS[1],
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a JPEG's segments lie in its image.

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
        """MCUs of the image."""
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
    """Of an image with the implied header: 4:2:0, so an MCU is 16×16 pixels; four blocks of Y, one of Cb and Cr."""
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
    """Everything before the first segment of a 4:2:0 image with standard tables: SOI to SOS.

    An interval of zero leaves DRI out.
    """
    luminance, chrominance = quantisation(quality)
    parts = [
        SOI,
        segment(0xE0, b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0"),
        segment(0xDB, b"\0" + luminance),
        segment(0xDB, b"\x01" + chrominance),
        segment(0xC0, struct.pack(">BHHB", 8, height, width, 3) + SAMPLING),
    ]
    parts += (segment(0xC4, bytes((place,)) + table) for place, table in STANDARD_CODES.items())
    if interval:
        parts.append(segment(0xDD, struct.pack(">H", interval)))
    parts.append(segment(START_OF_SCAN, SCAN))
    return b"".join(parts)


def assemble(header: bytes, segments: list[bytes]) -> bytes:
    """The whole file: segments in raster order with restart markers numbered between them."""
    parts = [header, segments[0]]
    for number, piece in enumerate(segments[1:]):
        parts += (RESTARTS[number & 7], piece)
    parts.append(EOI)
    return b"".join(parts)


def compress(bgr: Pixels, quality: int, interval: int) -> list[bytes]:
    """The segments of an image (height, width, 3) with the implied header; one of all MCUs if the interval is 0."""
    done, raster = cv2.imencode(
        ".jpg",
        bgr,
        (
            cv2.IMWRITE_JPEG_QUALITY, quality,
            cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
            cv2.IMWRITE_JPEG_RST_INTERVAL, interval,
        ),
    )  # fmt: skip
    assert done
    body = raster.tobytes()
    start = body.index(b"\xff\xda")
    return split_scan(body[start + 2 + int.from_bytes(body[start + 2 : start + 4], "big") : -len(EOI)])


def split_scan(scan: bytes) -> list[bytes]:
    """A scan cut at its restart markers, whatever their numbers."""
    for restart in RESTARTS[1:]:
        scan = scan.replace(restart, SEPARATOR)
    return scan.split(SEPARATOR)


def is_clean(data: bytes) -> bool:
    """Whether data hold no marker but separators: every 0xff is stuffed or begins one."""
    return data.count(b"\xff") == data.count(b"\xff\0") + data.count(SEPARATOR)
