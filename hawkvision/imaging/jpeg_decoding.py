"""JPEG to pixels: libjpeg-turbo decodes intact files; files with warnings are examined further.

    strict ── no warning ──────────────────────────────────────────────────────► pixels
       └ warning ── read in parts and rebuilt (`jpeg_repair`) ── strict ─────────► pixels
                      └ warning of surplus bytes ── each piece alone, strict ──► pixels, if all are there
                      └ any other warning, or missing data ────────────────────► refused

An image is accepted if all samples were decoded from the file's own data, whatever the decoder reports. libjpeg fills
missing data with grey, so a lenient decode alone would not show it.

TurboJPEG supports seven layouts of luminance and chrominance. Others go to OpenCV's libjpeg, which does not report
missing data. There the bytes after the data are varied: an image whose pixels depend on them is incomplete.
"""

from __future__ import annotations

import math
from typing import Any, Final

import cv2
import numpy as np
import simplejpeg

from hawkvision.core.errors import BadImage
from hawkvision.core.types import Pixels
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.jpeg_repair import TAIL_BYTES, JpegStream

MAX_PIECES: Final = 16_384
"""Pieces between restart markers that are decoded one by one, if padding hides whether they are whole. Each takes some
20 us, so all take a third of a second at most. An image of 1080 rows has 68 to 8,160."""
MAX_SCANNED_PIXELS: Final = 200_000_000
"""Largest scans x pixels of an image that is examined further, which decodes it up to seven times: 16 megapixels in
twelve scans. Larger images are decoded once, and refused if libjpeg warns."""
MAX_MENDED_BYTES: Final = 24 << 20
"""Largest raster in bytes of an image that is examined further, because three of them are held at once. At the scale
that models use, an image twice as wide as high has 8 MB."""
SPARED_ZEROS: Final = 1
"""Zero bytes with which valid data may end. More are padding if no end marker follows. With the usual tables, ten zero
bits in a row code grey areas."""
TAILS: Final = (b"\x55" * TAIL_BYTES, b"\xaa\0" * (TAIL_BYTES // 2))
"""Codes that differ from their first symbol on; neither contains a marker."""

_SURPLUS: Final = "extraneous bytes"
_SURPLUS_AT_END: Final = "extraneous bytes before marker 0xd9"
_SHORT: Final = ("premature end", "Premature end")
_NO_LAYOUT: Final = "Could not determine subsampling"
_REDUCED: Final = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}


def decode_jpeg(data: bytes, header: ImageHeader, factor: int) -> Pixels:
    """All of a JPEG at 1/`factor` of its size (1, 2, 4 or 8): RGB, or inverted CMYK of a CMYK image.

    Raises:
        BadImage: if it is cut off or corrupt, or no decoder here knows the layout of its components.
    """
    height, width = math.ceil(header.height / factor), math.ceil(header.width / factor)
    colourspace = "CMYK" if header.components == 4 else "RGB"
    options = {"colorspace": colourspace, "min_height": height, "min_width": width, "min_factor": float(factor)}
    if header.multiscan and not header.progressive:
        JpegStream.read(data, header.height)  # libjpeg does not notice a component without a scan
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, strict=True, **options)
    except ValueError as error:
        pixels = _recovered(data, header, factor, options, str(error))
    if pixels.shape[:2] != (height, width):
        raise BadImage(f"JPEG: decoded to {pixels.shape[1]}x{pixels.shape[0]}, the header declared {width}x{height}")
    return pixels


def _recovered(data: bytes, header: ImageHeader, factor: int, options: dict[str, Any], warning: str) -> Pixels:
    if _SURPLUS_AT_END in warning and not header.multiscan and b"\xff\xdd" not in data:
        # Webcams pad the end of the last scan. All blocks were read by then, so nothing is missing.
        return _filled(data, options)
    if options["min_height"] * options["min_width"] * max(3, header.components) > MAX_MENDED_BYTES:
        raise BadImage(f"JPEG: {warning}; a raster of {options['min_width']}x{options['min_height']} is not mended")
    stream = JpegStream.read(data, header.height)
    if not stream.ended:
        # Zeros are valid codes. If zeros replace missing data, no end marker follows them.
        stream = stream.trimmed(SPARED_ZEROS)
    if header.pixels * len(stream.scans) > MAX_SCANNED_PIXELS and _NO_LAYOUT not in warning:
        raise BadImage(
            f"JPEG: {warning}; an image of {header.pixels} pixels in {len(stream.scans)} scans is not mended"
        )
    try:
        return _decompressed(stream.body(), options)
    except ValueError as error:
        warning = str(error)
    if _NO_LAYOUT in warning:
        return _by_opencv(stream, header, factor)
    if _SURPLUS in warning or "progression" in warning:
        return _with_surplus(stream, header, options, warning)
    raise _refusal(stream, header, warning)


def _with_surplus(stream: JpegStream, header: ImageHeader, options: dict[str, Any], warning: str) -> Pixels:
    """An image with more bytes than samples, which is accepted if no sample is missing."""
    body = stream.body()
    if _SURPLUS_AT_END in warning:  # libjpeg reports only its first warning, and this one comes after all data are read
        return _filled(body, options)
    try:
        return _decompressed(stream.trimmed().body(), options)
    except ValueError:
        pass
    if not stream.plain:
        return _unless_it_depends_on_tails(stream, header, options, warning)
    pieces = stream.scans[0].pieces
    if len(pieces) > MAX_PIECES:
        raise BadImage(f"JPEG: {warning}; with {len(pieces)} restart intervals that is not looked into")
    for index in range(len(pieces)):
        alone = stream.alone(index)
        if alone is None:
            return _unless_it_depends_on_tails(stream, header, options, warning)
        complaint = _complaint(alone)
        if complaint and _SURPLUS_AT_END not in complaint:
            raise BadImage(f"JPEG: restart interval {index} of {len(pieces)} is not whole: {complaint}")
    return _filled(body, options)


def _complaint(body: bytes) -> str:
    """libjpeg's first warning about a file; None of an intact one."""
    try:
        simplejpeg.decode_jpeg(body, "GRAY", min_height=1, min_width=1, min_factor=8.0)
    except ValueError as error:
        return str(error)
    return ""


def _unless_it_depends_on_tails(
    stream: JpegStream, header: ImageHeader, options: dict[str, Any], warning: str
) -> Pixels:
    first, second = (_filled(stream.body(tail), options) for tail in TAILS)
    if not np.array_equal(first, second):
        raise _refusal(stream, header, warning)
    return first


def _decompressed(body: bytes, options: dict[str, Any]) -> Pixels:
    """Pixels of an intact file. Raises ValueError with libjpeg's first warning for any other."""
    pixels: Pixels = simplejpeg.decode_jpeg(body, strict=True, **options)
    return pixels


def _filled(body: bytes, options: dict[str, Any]) -> Pixels:
    """Pixels of an image that may be incomplete; missing parts are grey or repeated.

    Raises:
        BadImage: if nothing can be decoded.
    """
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(body, strict=False, **options)
    except ValueError as error:
        raise BadImage(f"JPEG: {error}") from None
    return pixels


def _refusal(stream: JpegStream, header: ImageHeader, warning: str) -> BadImage:
    """Why an image is refused; for an image that is cut off, how much is there."""
    if not any(short in warning for short in _SHORT) or not stream.plain:
        return BadImage(f"JPEG: the image data are damaged or cut off: {warning}")
    options = {"min_height": 1, "min_width": 1, "min_factor": 8.0}
    try:
        first, second = (_filled(stream.body(tail), options) for tail in TAILS)
    except BadImage as error:
        return error
    return _cut_off(first, second, header)


def _cut_off(first: Pixels, second: Pixels, header: ImageHeader) -> BadImage:
    same = (first == second).all(axis=(1, 2))
    rows = header.height * int(np.argmin(same)) // len(same)
    return BadImage(f"JPEG: the image is cut off: {rows} of {header.height} rows are there; expected all of them")


def _by_opencv(stream: JpegStream, header: ImageHeader, factor: int) -> Pixels:
    """An image in a layout that TurboJPEG does not support.

    Without an end marker, OpenCV ignores the bytes behind the data, and stops if the data end too early. An image of
    several scans must have the marker; OpenCV writes a line to stderr about it.
    """
    if stream.arithmetic:  # the bytes behind may belong to the data, because encoders omit zeros
        return _opened(stream.body(), factor)
    if not stream.plain:
        return _opened_twice([stream.body(tail) for tail in TAILS], header, factor)
    pieces = stream.scans[0].pieces
    if len(pieces) == 1:
        return _opened_twice([stream.body(tail, end=False) for tail in TAILS], header, factor)
    if len(pieces) > MAX_PIECES:
        raise BadImage(f"JPEG: more than {MAX_PIECES} restart intervals in an unusual layout")
    for index in range(len(pieces)):
        alone = [stream.alone(index, tail, end=False) for tail in TAILS]
        if None in alone:
            raise BadImage(
                "JPEG: restart intervals in an unusual layout, of which it cannot be told whether they are whole"
            )
        _opened_twice([body for body in alone if body is not None], header, 1)
    return _opened(stream.trimmed().body(), factor)


def _opened_twice(bodies: list[bytes], header: ImageHeader, factor: int) -> Pixels:
    first, second = (_opened(body, factor) for body in bodies)
    if not np.array_equal(first, second):
        raise _cut_off(first, second, header)
    return first


def _opened(body: bytes, factor: int) -> Pixels:
    try:
        bgr = cv2.imdecode(np.frombuffer(body, np.uint8), _REDUCED[factor] | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise BadImage(f"JPEG: the image data are corrupt ({error.err or error})") from None
    if bgr is None:
        raise BadImage("JPEG: the image data are corrupt or cut off, or in a layout that is not read")
    pixels: Pixels = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
    return pixels
