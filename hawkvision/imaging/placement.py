"""How an image lies in a model's input, and where a place in the input lies in the image.

    stored image ── decoded at 1/f, turned upright ──► raster ── cut, scaled, padded ──► model's input
    upright image ◄───────────────── Placement.to_image ◄────────────────────────────── boxes

Coordinates are fractions of the width and the height, from the left and the top, of the upright image and of the input.
A JPEG that is decoded at 1/f covers whole blocks of f pixels, so that its raster may reach beyond the image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hawkvision.imaging.image_header import ImageFormat, ImageHeader
from hawkvision.models.input_spec import InputSpec

OVERSAMPLING: Final = 2
"""Least size of a decoded JPEG in multiples of the input, if the image is that large.

At twice the input, predictions agree better with those of full decoding than at its size:
`docs/benchmarks/decoding.md`.
"""

WHOLE: Final = 1 << 30
"""As least side: decode at full size."""

MOST_SCALED: Final = 1 << 21
"""Pixels of a raster that is scaled as a whole before it is cropped: 32:1 for the usual side of 256."""

_REACHES_LEFT: Final = {2, 3, 6, 7}
"""EXIF orientations by which what is right or at the bottom of the stored image comes to the left side."""
_REACHES_UP: Final = {3, 4, 7, 8}


class Rectangle(NamedTuple):
    """A part of a raster or of an input, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's input lies in the upright image: its sides, as fractions of the image's width and height.

    They are outside 0..1 where the input shows more than the image.
    """

    left: float
    top: float
    right: float
    bottom: float

    def to_image(self, boxes: NDArray[Any]) -> NDArray[np.float64]:
        """Boxes (..., 4) of x1, y1, x2, y2 in the input, as boxes in the image. Nothing is clipped."""
        return (
            np.asarray(boxes, np.float64) * ([self.right - self.left, self.bottom - self.top] * 2)
            + [self.left, self.top] * 2
        )


def placement(header: ImageHeader, spec: InputSpec) -> Placement:
    """How `hawkvision.imaging.preprocessing.load_input` places an image into an input."""
    factor = scale_of(header, least_side(spec))
    height, width = math.ceil(header.height / factor), math.ceil(header.width / factor)
    right, bottom = width * factor / header.width, height * factor / header.height
    if header.orientation >= 5:
        height, width, right, bottom = width, height, bottom, right
    left = 1.0 - right if header.orientation in _REACHES_LEFT else 0.0
    top = 1.0 - bottom if header.orientation in _REACHES_UP else 0.0
    x, y = right / width, bottom / height  # of a pixel of the raster
    (upper, leftmost, rows, columns), target = _shown(height, width, spec)
    across, down = x * columns / target.width, y * rows / target.height  # of a pixel of the input
    start = left + x * leftmost - across * target.left, top + y * upper - down * target.top
    return Placement(*start, start[0] + across * spec.width, start[1] + down * spec.height)


def fitting(height: int, width: int, spec: InputSpec) -> tuple[Rectangle, Rectangle]:
    """The part of a raster of this size that an input shows, and the part of the input that shows it."""
    whole = Rectangle(0, 0, spec.height, spec.width)
    match spec.fit:
        case "crop":
            scale = crop_scale(height, width, spec)
            crop_height = min(height, max(1, round(spec.height * scale)))
            crop_width = min(width, max(1, round(spec.width * scale)))
            source = Rectangle((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)
            return source, whole
        case "stretch":
            return Rectangle(0, 0, height, width), whole
        case "letterbox":
            return Rectangle(0, 0, height, width), _letterboxed(height, width, spec)


def whole_scaled(height: int, width: int, spec: InputSpec) -> Rectangle | None:
    """For an exact interpolation with `crop`: the size of the scaled raster, and where the input begins in it.

    As torchvision's `Resize` of the shorter side and `CenterCrop` do. None for other inputs, and for a raster so long
    that scaled it would have more than `MOST_SCALED` pixels: it is cropped first, by `fitting`.
    """
    if spec.fit != "crop" or not spec.exact:
        return None
    shorter = round(min(spec.height, spec.width) / spec.crop_fraction)
    rows, columns = _sides(height, width, shorter)
    if rows < spec.height or columns < spec.width:
        enlarged = max(spec.height / rows, spec.width / columns)
        rows, columns = max(spec.height, round(rows * enlarged)), max(spec.width, round(columns * enlarged))
    if rows * columns > MOST_SCALED:
        return None
    return Rectangle(round((rows - spec.height) / 2), round((columns - spec.width) / 2), rows, columns)


def _sides(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Height and width with the shorter one scaled to so many pixels, and the longer one rounded down."""
    if height <= width:
        return shorter, int(shorter * width / height)
    return int(shorter * height / width), shorter


def _shown(height: int, width: int, spec: InputSpec) -> tuple[tuple[float, float, float, float], Rectangle]:
    """As `fitting`; the part of the raster to fractions of a pixel: top, left, height, width."""
    source, target = fitting(height, width, spec)
    whole = whole_scaled(height, width, spec)
    if whole is None:
        return source, target
    down, across = height / whole.height, width / whole.width
    return (whole.top * down, whole.left * across, spec.height * down, spec.width * across), target


def crop_scale(height: int, width: int, spec: InputSpec) -> float:
    """Pixels of a raster per pixel of an input that shows a centred part of it."""
    return min(height / spec.height, width / spec.width) * spec.crop_fraction


def _letterboxed(height: int, width: int, spec: InputSpec) -> Rectangle:
    """Sides are rounded, and an odd pixel of padding is right or below, as Ultralytics' `LetterBox` does."""
    scale = min(spec.height / height, spec.width / width)
    fitted_height = min(spec.height, max(1, round(height * scale)))
    fitted_width = min(spec.width, max(1, round(width * scale)))
    if spec.pad_position == "top_left":
        return Rectangle(0, 0, fitted_height, fitted_width)
    top, left = (spec.height - fitted_height) // 2, (spec.width - fitted_width) // 2
    return Rectangle(top, left, fitted_height, fitted_width)


def least_side(spec: InputSpec) -> int:
    """The least pixels of the shorter side with which a model loses nothing."""
    if spec.exact:
        return WHOLE
    return math.ceil(OVERSAMPLING * max(spec.height, spec.width) / spec.crop_fraction)


def scale_of(header: ImageHeader, min_side: int) -> int:
    """The factor by which a JPEG's sides are divided in decoding: 1, 2, 4 or 8."""
    shorter = min(header.width, header.height)
    factors = (8, 4, 2) if header.format is ImageFormat.JPEG else ()
    return next((f for f in factors if math.ceil(shorter / f) >= min_side), 1)
