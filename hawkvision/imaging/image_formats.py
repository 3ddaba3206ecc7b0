"""Formats of encoded images, and what the first bytes of a body look like."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

Encoded: TypeAlias = bytes | bytearray | memoryview
"""An encoded image as it was received."""

READ_FORMATS = "JPEG, PNG and WebP images are read, with hawkvision[formats] also HEIC, AVIF, GIF, BMP and TIFF"

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
