"""Reads the header of an encoded image, without decoding a pixel.

    JPEG   segments as in `jpeg`, up to the first scan
    PNG    89504E470D0A1A0A { length:4 type:4 payload crc:4 }*  first IHDR: width:4 height:4 depth:1 colour:1 ...
    WebP   RIFF size:4 WEBP { type:4 size:4 payload pad }*  first VP8, VP8L or VP8X

The work is bounded by the number of segments, not by the length of the body or by values in headers.
Sources: ITU-T T.81 annex B, PNG third edition §5 and §11, RFC 9649 (WebP), EXIF 2.32 §4.6 (orientation, tag 0x0112).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from hawkvision.core.errors import BadImage, UnsupportedMedia
from hawkvision.imaging.jpeg import (
    END_OF_IMAGE,
    FRAMES,
    PROGRESSIVE,
    SOI,
    START_OF_IMAGE,
    START_OF_SCAN,
    JpegFrame,
    segments,
)

Encoded: TypeAlias = bytes | bytearray | memoryview
"""An encoded image as it was received."""

MAX_SEGMENTS = 512
"""JPEG segments before the first scan. Each holds up to 64 KiB, so 512 are 32 MiB of metadata, three times the largest
body of a node. ICC profiles and extended XMP use a few dozen."""

MAX_CHUNKS = 64
"""PNG chunks before the image data, or WebP chunks in the file: the standards define about twenty each."""

MAX_EXIF_ENTRIES = 256
"""Entries that are read of EXIF's first directory; cameras write about fifteen."""

_JPEG_DNL = re.compile(rb"\xff\xdc\x00\x04..", re.DOTALL)
MAX_EXIFS = 8
"""EXIF segments of a JPEG in which the orientation is searched; some editors leave two."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIGNATURES = (SOI + b"\xff", PNG_SIGNATURE, b"RIFF")

_EXIF_INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
"""Field types of the orientation that cameras use; the standard demands 3."""


class ImageFormat(StrEnum):
    """Formats that can be read: three always, the others by `imaging.pillow_formats`."""

    JPEG = "jpeg"
    PNG = "png"
    WEBP = "webp"
    GIF = "gif"
    BMP = "bmp"
    TIFF = "tiff"
    HEIF = "heif"
    AVIF = "avif"

    @property
    def native(self) -> bool:
        """Whether every node and tier reads the format without extras."""
        return self in (ImageFormat.JPEG, ImageFormat.PNG, ImageFormat.WEBP)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The header's statements about an image.

    `width` and `height` are as stored, before `orientation` (EXIF, 1..8) is applied. `components` counts stored
    channels: 1 grey or palette, 2 grey with alpha, 3 colour, 4 colour with alpha, or CMYK in a JPEG. `depth` is bits
    per sample; only PNG has other depths than 8. `multiscan` says that a JPEG has several scans, so that a decoder
    reads to the end.
    """

    format: ImageFormat
    width: int
    height: int
    orientation: int
    components: int
    alpha: bool = False
    progressive: bool = False
    multiscan: bool = False
    animated: bool = False
    depth: int = 8

    @property
    def pixels(self) -> int:
        """Pixels of the image at full scale."""
        return self.width * self.height


def probe(body: Encoded) -> ImageHeader:
    """Read the header of a JPEG, PNG or WebP image.

    Raises:
        BadImage: if the body is empty, or the header is cut off or breaks its format.
        UnsupportedMedia: if it is another format; the message names what it looks like and what is read.
    """
    view = memoryview(body).cast("B")
    head = bytes(view[:32])
    if not head:
        raise BadImage("the body is empty; expected a JPEG, PNG or WebP image")
    if head.startswith(SOI):
        return _probe_jpeg(body if isinstance(body, bytes) else bytes(view))
    if head.startswith(PNG_SIGNATURE):
        return _probe_png(view)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _probe_webp(view)
    if any(signature.startswith(head[: len(signature)]) for signature in _SIGNATURES) and len(head) < 12:
        raise BadImage(f"the image ends after {len(head)} bytes, inside its header")
    raise UnsupportedMedia(f"the body looks like {recognise(bytes(view[:128]))}; {READ_FORMATS}")


def png_chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Each whole chunk as (type, payload start, payload end), to IEND or the end of the data.

    Checksums are not checked. Each step advances by at least twelve bytes, so a body of b bytes yields at most b/12
    chunks.
    """
    at = len(PNG_SIGNATURE)
    while at + 12 <= len(view):
        length = int.from_bytes(view[at : at + 4], "big")
        kind = bytes(view[at + 4 : at + 8])
        end = at + 8 + length
        if end + 4 > len(view):
            return
        yield kind, at + 8, end
        if kind == b"IEND":
            return
        at = end + 4


def png_chunk_is_sound(view: memoryview, start: int, end: int) -> bool:
    """Whether the chunk with the payload at this place has the right checksum."""
    return zlib.crc32(view[start - 4 : end]) == int.from_bytes(view[end : end + 4], "big")


def _probe_jpeg(data: bytes) -> ImageHeader:
    orientation: int | None = None
    frame: JpegFrame | None = None
    exifs = MAX_EXIFS
    for marker, at, start, end in segments(data, MAX_SEGMENTS):
        if marker in (START_OF_IMAGE, END_OF_IMAGE) or (marker == START_OF_SCAN and frame is None):
            raise BadImage(f"JPEG: marker {marker:#04x} at byte {at} comes before any frame header or scan")
        metadata = 0xE0 <= marker <= 0xEF or marker == 0xFE  # decoders ignore lengths of these that are too short
        if end > len(data) or (end == start and not metadata and data[at + 3] < 2):
            raise BadImage(f"JPEG: the segment at byte {at} is cut off, or shorter than its length")
        if marker == START_OF_SCAN and frame is not None:
            whole = end > start and data[start] == frame.payload[5]
            return _jpeg_header(frame, orientation or 1, frame.height or _defined_height(data, end), whole=whole)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if frame is not None:
                raise BadImage(f"JPEG: a second frame header at byte {at}")
            frame = _jpeg_frame(marker, data[start:end])
        elif marker == 0xE1 and orientation is None and exifs and data.startswith(b"Exif\0\0", start):
            orientation = _orientation(memoryview(data)[start + 6 : end])
            exifs -= 1
    raise BadImage(f"JPEG: the data end at byte {len(data)}, inside the header")


def _jpeg_frame(marker: int, payload: bytes) -> JpegFrame:
    if marker not in FRAMES:
        raise UnsupportedMedia(
            f"JPEG: lossless and hierarchical frames (SOF marker {marker:#04x}) are not read; "
            "baseline, extended and progressive ones are"
        )
    if len(payload) > 5 and payload[0] != 8:
        raise UnsupportedMedia(f"JPEG: {payload[0]} bits per sample; only 8 are read")
    frame = JpegFrame.read(marker, payload)
    if payload[5] not in (1, 3, 4):
        raise BadImage(f"JPEG: {payload[5]} components; expected 1, 3 or 4")
    return frame


def _jpeg_header(frame: JpegFrame, orientation: int, height: int, *, whole: bool) -> ImageHeader:
    """`whole` says whether the first scan is of all components."""
    _check_size("JPEG", frame.width, height)
    progressive = frame.marker in PROGRESSIVE
    return ImageHeader(
        ImageFormat.JPEG, frame.width, height, orientation, frame.payload[5],
        progressive=progressive, multiscan=progressive or not whole,
    )  # fmt: skip


def _defined_height(data: bytes, at: int) -> int:
    """The height of a frame that leaves it to a DNL segment behind the first scan (T.81 B.2.5)."""
    found = _JPEG_DNL.search(data, at)
    return int.from_bytes(found.group()[4:], "big") if found else 0


_PNG_COMPONENTS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}


def _probe_png(view: memoryview) -> ImageHeader:
    if len(view) < 33:
        raise BadImage(f"PNG: the data end at byte {len(view)}, inside the header (33 bytes)")
    if bytes(view[8:16]) != b"\0\0\0\x0dIHDR":
        raise BadImage("PNG: the first chunk is not an IHDR of 13 bytes")
    if zlib.crc32(view[12:29]) != int.from_bytes(view[29:33], "big"):
        raise BadImage("PNG: the checksum of the header (IHDR) is wrong")
    width, height, depth, colour, compression, filtering, interlace = struct.unpack_from(">IIBBBBB", view, 16)
    if depth not in _PNG_DEPTHS.get(colour, ()) or compression or filtering or interlace > 1:
        raise BadImage(
            f"PNG: the header has depth {depth}, colour type {colour}, compression {compression}, "
            f"filter {filtering}, interlace {interlace}; the standard knows no such combination"
        )
    _check_size("PNG", width, height)
    orientation, alpha, animated = None, colour in (4, 6), False
    for (kind, start, end), _ in zip(png_chunks(view), range(MAX_CHUNKS), strict=False):
        match kind:
            case b"IDAT":
                break
            case b"eXIf" if orientation is None and png_chunk_is_sound(view, start, end):
                orientation = _orientation(view[start:end])
            case b"tRNS":
                alpha = True
            case b"acTL":
                animated = True
    return ImageHeader(
        ImageFormat.PNG,
        width,
        height,
        orientation or 1,
        _PNG_COMPONENTS[colour],
        alpha,
        interlace == 1,
        animated=animated,
        depth=depth,
    )


def _probe_webp(view: memoryview) -> ImageHeader:
    if len(view) < 30:
        raise BadImage(f"WebP: the data end at byte {len(view)}, inside the header (30 bytes)")
    kind, data = bytes(view[12:16]), bytes(view[20:30])
    match kind:
        case b"VP8 ":  # RFC 6386 §9.1: frame tag of 3 bytes, start code, two 14-bit sizes with 2 bits of scale
            if data[3:6] != b"\x9d\x01\x2a" or data[0] & 1:
                raise BadImage("WebP: the VP8 key frame does not begin with its start code")
            width, height = (size & 0x3FFF for size in struct.unpack_from("<HH", data, 6))
            _check_size("WebP", width, height)
            return ImageHeader(ImageFormat.WEBP, width, height, 1, 3)
        case b"VP8L":  # RFC 9649 §3.4: signature, then 14 + 14 bits of size less one, alpha hint
            bits = int.from_bytes(data[1:5], "little")
            if data[0] != 0x2F or bits >> 29:
                raise BadImage("WebP: the VP8L stream does not begin with its signature and version 0")
            alpha = bool(bits >> 28 & 1)
            size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
            return ImageHeader(ImageFormat.WEBP, *size, 1, 4 if alpha else 3, alpha)
        case b"VP8X":  # RFC 9649 §2.7.1: flags, three reserved bytes, 24 + 24 bits of canvas size less one
            width = int.from_bytes(data[4:7], "little") + 1
            height = int.from_bytes(data[7:10], "little") + 1
            alpha, animated = bool(data[0] & 0x10), bool(data[0] & 0x02)
            orientation = _webp_orientation(view) if data[0] & 0x08 else 1
            components = 4 if alpha else 3
            return ImageHeader(ImageFormat.WEBP, width, height, orientation, components, alpha, animated=animated)
    raise BadImage(f"WebP: the first chunk is {kind!r}; expected VP8, VP8L or VP8X")


def _webp_orientation(view: memoryview) -> int:
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(view):
            break
        size = int.from_bytes(view[at + 4 : at + 8], "little")
        if bytes(view[at : at + 4]) == b"EXIF":
            return _orientation(view[at + 8 : at + 8 + size]) or 1
        at += 8 + size + (size & 1)
    return 1


def _orientation(exif: memoryview) -> int | None:
    """EXIF orientation, or None without a valid block: broken metadata do not invalidate an image."""
    if bytes(exif[:6]) == b"Exif\0\0":
        exif = exif[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(exif[:4]))
    if order is None or len(exif) < 14:
        return None
    (at,) = struct.unpack_from(order + "I", exif, 4)
    if at + 2 > len(exif):
        return None
    (entries,) = struct.unpack_from(order + "H", exif, at)
    for index in range(min(entries, MAX_EXIF_ENTRIES)):
        entry = at + 2 + 12 * index
        if entry + 12 > len(exif):
            return None
        tag, kind, count = struct.unpack_from(order + "HHI", exif, entry)
        if tag == 0x0112:
            written = _EXIF_INTEGERS.get(kind) if count == 1 else None
            value = struct.unpack_from(order + written, exif, entry + 8)[0] if written else 0
            return value if 1 <= value <= 8 else None
    return None


def _check_size(name: str, width: int, height: int) -> None:
    if not width or not height:
        raise BadImage(f"{name}: the header declares {width}x{height} pixels; expected at least 1x1")


READ_FORMATS = "JPEG, PNG and WebP images are read, with the extra `formats` also HEIC, AVIF, GIF, BMP and TIFF"

_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "BigTIFF"),
    (b"MM\0+", "BigTIFF"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\x01\0", "an icon (ICO)"),
    (b"8BPS", "Photoshop (PSD)"),
    (b"%PDF", "PDF"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "ZIP"),
    (b"RIFF", "a RIFF file that is not WebP"),
    (b"\x93NUMPY", "a NumPy array"),
)

_ISO_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs"), "HEIC"),
    **dict.fromkeys((b"mif1", b"msf1", b"mif2"), "HEIF"),
}
"""Brands of still images in ISO files, most specific first."""
_MAX_BRANDS = 16
_OTHERS = {
    "GIF": ImageFormat.GIF,
    "BMP": ImageFormat.BMP,
    "TIFF": ImageFormat.TIFF,
    "BigTIFF": ImageFormat.TIFF,
    "HEIC": ImageFormat.HEIF,
    "HEIF": ImageFormat.HEIF,
    "AVIF": ImageFormat.AVIF,
}


def other_format(body: Encoded) -> ImageFormat | None:
    """The format that a body seems to have, of those that not every node reads."""
    name = recognise(bytes(memoryview(body).cast("B")[:128]))
    return _OTHERS.get(name)


def recognise(head: bytes) -> str:
    """What a body that begins so looks like, in words."""
    if head[4:8] == b"ftyp":
        end = min(int.from_bytes(head[:4], "big"), len(head), 16 + 4 * _MAX_BRANDS)
        brands = {head[8:12], *(head[at : at + 4] for at in range(16, end - 3, 4))}
        return next((name for brand, name in _ISO_BRANDS.items() if brand in brands), "an ISO media file (MP4)")
    for prefix, name in _FOREIGN:
        if head.startswith(prefix):
            return name
    if head[:1] == b"P" and head[1:2] in b"1234567" and head[2:3].isspace():
        return "PNM"
    if head.lstrip()[:1] in (b"{", b"["):
        return "JSON"
    if head.lstrip()[:1] == b"<":
        return "XML, SVG or HTML"
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):
        return "text"
    return f"nothing known (it begins {head[:8].hex(' ')})"
