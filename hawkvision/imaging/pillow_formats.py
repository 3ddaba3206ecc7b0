"""Formats beyond JPEG, PNG and WebP, decoded by Pillow if the extra `formats` is installed.

    GIF, BMP, TIFF, AVIF ── pillow ──┐
    HEIC, HEIF ── pillow-heif ───────┴─ header only ─► limits ─► first frame ─► RGB, or BGRA with alpha

Each body goes only to the plugin of the format that its first bytes name. The header is read before any pixel, so that
the same limits apply as to other formats. These formats are decoded at full scale only.
"""

from __future__ import annotations

import functools
import importlib
import io
from contextlib import suppress
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BadImage, HawkVisionError, UnsupportedMedia
from hawkvision.imaging.image_header import Encoded, ImageFormat, ImageHeader

PLUGINS: Final = {
    ImageFormat.GIF: ("PIL.GifImagePlugin", "GifImageFile"),
    ImageFormat.BMP: ("PIL.BmpImagePlugin", "BmpImageFile"),
    ImageFormat.TIFF: ("PIL.TiffImagePlugin", "TiffImageFile"),
    ImageFormat.AVIF: ("PIL.AvifImagePlugin", "AvifImageFile"),
    ImageFormat.HEIF: ("pillow_heif", "HeifImageFile"),
}
_ORIENTATION: Final = 0x0112
_WIDE: Final = ("I", "F")
"""Pillow's modes with 32 bits per sample, whose white is not defined."""


def readable(kind: ImageFormat) -> bool:
    """Whether the plugin of a format is installed."""
    return _plugin(kind) is not None


def probe(body: Encoded, kind: ImageFormat) -> ImageHeader:
    """Read the header of an image.

    Width and height are those of the upright image, because Pillow rotates these formats, except AVIF, during decoding.

    Raises:
        BadImage: if its header is cut off or breaks its format.
        UnsupportedMedia: if the format is not supported.
    """
    image = _opened(body, kind)
    (width, height), mode = image.size, image.mode
    if not width or not height:
        raise BadImage(f"{kind.upper()}: the header declares {width}x{height} pixels; expected at least 1x1")
    if mode in _WIDE:
        raise UnsupportedMedia(f"{kind.upper()}: samples of 32 bits are not read; those of 1 to 16 bits are")
    alpha = _has_alpha(image)
    depth = 16 if mode.startswith("I;16") else 8
    orientation = _orientation(image) if kind is ImageFormat.AVIF else 1
    return ImageHeader(kind, width, height, orientation, len(image.getbands()), alpha, depth=depth)


def decode(body: Encoded, header: ImageHeader) -> NDArray[Any]:
    """The first frame: RGB (height, width, 3), or BGRA (height, width, 4) if it has alpha.

    Raises:
        BadImage: if the image data are cut off, corrupt, or not of the declared size.
    """
    kind = header.format
    image = _opened(body, kind)
    raster: NDArray[Any]
    try:
        image.load()
        if image.mode.startswith("I;16"):
            upper = (np.asarray(image) >> 8).astype(np.uint8)
            raster = cv2.cvtColor(upper, cv2.COLOR_GRAY2RGB)
        elif header.alpha:
            raster = cv2.cvtColor(np.asarray(image.convert("RGBA")), cv2.COLOR_RGBA2BGRA)
        else:
            raster = np.array(image.convert("RGB"))
    except Exception as error:  # noqa: BLE001 - plugins raise any exception for broken images
        raise _broken(kind, error) from None
    if raster.shape[:2] != (header.height, header.width):
        raise BadImage(
            f"{kind.upper()}: decoded to {raster.shape[1]}x{raster.shape[0]}, "
            f"the header declared {header.width}x{header.height}"
        )
    return raster


def _opened(body: Encoded, kind: ImageFormat) -> Any:
    plugin = _plugin(kind)
    if plugin is None:
        raise UnsupportedMedia(f"{kind.upper()} images are read where hawkvision[formats] is installed; it is not here")
    try:
        return plugin(io.BytesIO(body))
    except Exception as error:  # noqa: BLE001 - plugins raise any exception for broken images
        raise _broken(kind, error) from None


@functools.cache
def _plugin(kind: ImageFormat) -> Any:
    module, name = PLUGINS[kind]
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def _broken(kind: ImageFormat, error: Exception) -> HawkVisionError:
    return BadImage(f"{kind.upper()}: the image is corrupt, cut off or of an unknown kind ({str(error)[:120]})")


def _has_alpha(image: Any) -> bool:
    return "transparency" in image.info or any(band in "Aa" for band in image.getbands())


def _orientation(image: Any) -> int:
    """The orientation by EXIF or AVIF's own boxes; 1 if the metadata are broken."""
    orientation = 1
    with suppress(Exception):
        orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1
