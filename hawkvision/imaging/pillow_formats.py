"""Formats beyond JPEG, PNG and WebP, decoded by Pillow if the extra `formats` is installed.

    header (`other_headers`) ─► limits ─┬─ pillow: GIF, BMP, TIFF, AVIF ──┬─► first frame ─► RGB, or BGRA with alpha
                                        └─ pillow-heif: HEIC, HEIF ───────┘

Each body goes only to the plugin of the format that its first bytes name, and only to be decoded. These formats are
decoded at full scale only. No function but `readable` may run on an event loop.
"""

from __future__ import annotations

import functools
import importlib
import io
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BadImage, HawkVisionError, UnsupportedMedia
from hawkvision.imaging.image_header import ImageFormat, ImageHeader
from hawkvision.imaging.other_headers import reduced

PLUGINS: Final = {
    ImageFormat.GIF: ("PIL.GifImagePlugin", "GifImageFile"),
    ImageFormat.BMP: ("PIL.BmpImagePlugin", "BmpImageFile"),
    ImageFormat.TIFF: ("PIL.TiffImagePlugin", "TiffImageFile"),
    ImageFormat.AVIF: ("PIL.AvifImagePlugin", "AvifImageFile"),
    ImageFormat.HEIF: ("pillow_heif", "HeifImageFile"),
}
_WIDE: Final = ("I", "F")
"""Pillow's modes with 32 bits per sample, whose white is not defined."""


def readable(kind: ImageFormat) -> bool:
    """Whether the plugin of a format is installed."""
    return _plugin(kind) is not None


def decode(body: bytes, header: ImageHeader) -> NDArray[Any]:
    """The first frame: RGB (height, width, 3), or BGRA (height, width, 4) if it has alpha.

    Raises:
        BadImage: if the image data are cut off, corrupt, or not of the declared size.
        UnsupportedMedia: if the plugin is missing, or a sample has 32 bits.
    """
    kind = header.format
    image = _opened(reduced(body, kind), kind)
    if image.mode in _WIDE:
        raise UnsupportedMedia(f"{kind.upper()}: samples of 32 bits are not read; those of 1 to 16 bits are")
    if image.size != (header.width, header.height):
        raise BadImage(
            f"{kind.upper()}: the header declared {header.width}x{header.height} pixels; "
            f"the decoder finds {image.size[0]}x{image.size[1]}"
        )
    raster: NDArray[Any]
    try:
        image.load()
        if image.mode.startswith("I;16"):
            upper = (np.asarray(image) >> 8).astype(np.uint8)
            raster = cv2.cvtColor(upper, cv2.COLOR_GRAY2RGB)
        elif _has_alpha(image):
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


def _opened(body: bytes, kind: ImageFormat) -> Any:
    plugin = _plugin(kind)
    if plugin is None:
        raise UnsupportedMedia(f"{kind.upper()} images are read where the extra `formats` is installed; it is not here")
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
