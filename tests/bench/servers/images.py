"""The JPEGs that all servers of a comparison are sent: as the data holds them, or enlarged to what a camera sends."""

from __future__ import annotations

from typing import Final

import cv2
import numpy as np

from hawkvision.core.errors import ConfigError
from hawkvision.core.types import Pixels

JPEG: Final = b"\xff\xd8\xff"
QUALITY: Final = 90
"""Of images that come as PNG or WebP."""
CAMERA_QUALITY: Final = 85
SIDES: Final = range(64, 4097)
"""Longer sides that can be asked for: from an icon to 12 megapixels."""


def as_jpeg(body: bytes, number: int) -> bytes:
    """The image itself if it is a JPEG, else made one: all servers are sent what all of them decode alike.

    Raises:
        ConfigError: naming the image that is none.
    """
    if body.startswith(JPEG):
        return body
    return _encoded(_decoded(body, number), QUALITY)


def enlarged(body: bytes, number: int, side: int) -> bytes:
    """The image as a JPEG of `side` x 3/4 `side` pixels: its centred square fills the height.

    Left and right of that square it goes on mirrored, so that a model, which looks at the centred square, sees what it
    saw before, and its accuracy can be compared. Scaled up, an image has less detail than a camera's of that size: it
    is a smaller file and quicker to decode.

    Raises:
        ConfigError: if the image is neither JPEG, PNG nor WebP.
    """
    pixels = _decoded(body, number)
    height, width = pixels.shape[:2]
    square = min(height, width)
    top, left = (height - square) // 2, (width - square) // 2
    tall = round(side * 3 / 4)
    scaled = cv2.resize(pixels[top : top + square, left : left + square], (tall, tall), interpolation=cv2.INTER_CUBIC)
    wider = side - tall
    wide = cv2.copyMakeBorder(scaled, 0, 0, wider // 2, wider - wider // 2, cv2.BORDER_REFLECT_101)
    return _encoded(wide, CAMERA_QUALITY)


def _decoded(body: bytes, number: int) -> Pixels:
    pixels = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise ConfigError(f"--data: image {number} is neither JPEG, PNG nor WebP")
    return np.asarray(pixels, np.uint8)


def _encoded(pixels: Pixels, quality: int) -> bytes:
    return bytes(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes())
