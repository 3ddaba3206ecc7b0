"""Reduces an image to what the datacenter's models use of it, before it is escalated.

    1920 x 1080 from a camera ──┬─ centred square ──► 260 pixels a side ──► JPEG of 30 kB ──► datacenter
    256 x 256 pixels, 25 kB ────┴──────────────────────── unchanged ────────────────────────► datacenter

Images with less than `LEAST_FINER` times the pixels per side that models use are sent unchanged: to encode them again
at their own size would lose accuracy, while scaling down averages the loss of both encodings. Figures:
`docs/design/inference-threads.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
import simplejpeg

from hawkvision.core.types import Pixels
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.placement import OVERSAMPLING, crop_scale
from hawkvision.imaging.preprocessing import decode
from hawkvision.models.input_spec import InputSpec

DETAIL: Final = 1.0
"""Pixels per side that are sent, as a multiple of the most demanding model's input."""
QUALITY: Final = 95
LEAST_FINER: Final = 1.5
_QUICKLY: Final = (cv2.IMWRITE_PNG_COMPRESSION, 1)


@dataclass(frozen=True, slots=True)
class Reducer:
    """Reduces images to the resolution that these inputs use.

    The crop of each input shows the same part in the image and in the reduced one. Equal input bytes give equal output
    bytes.
    """

    inputs: tuple[InputSpec, ...]
    """The inputs of all models that may run, at least one."""
    max_pixels: int
    """See `decode`."""
    detail: float = DETAIL
    quality: int = QUALITY
    """On libjpeg's scale."""
    whole: bool = False
    """Whether answers name places in the image (`TaskKind.located`), so that none of it is cut off."""
    shrinks: bool = True
    """Whether images are made smaller at all; formats that not every tier reads are converted in any case."""

    def saves(self, header: ImageHeader) -> bool:
        """Whether an image has so much more detail than the models use that it is reduced."""
        return self.shrinks and self._window(*_upright(header))[2] * LEAST_FINER <= self.detail

    def reduced(self, body: bytes, header: ImageHeader) -> bytes:
        """The part of the image that the inputs use, as a JPEG; the same object if that would not be smaller.

        A format that not every tier reads is always converted to JPEG or PNG.

        Raises:
            BadImage, TooLarge: as `decode`.
        """
        if not self.saves(header):
            return body if header.format.native else self._as_png(body, header)
        min_side = self.least_side(header)
        pixels = self._cut(decode(body, header, max_pixels=self.max_pixels, min_side=min_side))
        encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=self.quality, colorsubsampling="420")
        return encoded if len(encoded) < len(body) or not header.format.native else body

    def _as_png(self, body: bytes, header: ImageHeader) -> bytes:
        """The upright pixels as a PNG."""
        pixels = decode(body, header, max_pixels=self.max_pixels, min_side=max(header.height, header.width))
        done, encoded = cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), _QUICKLY)
        assert done
        return bytes(encoded.data)

    def least_side(self, header: ImageHeader) -> int:
        """The `min_side` of `decode` for an image that is to be reduced."""
        side = self._window(*_upright(header))[2] * min(header.height, header.width)
        return round(side * max(1.0, OVERSAMPLING / self.detail))

    def _window(self, height: int, width: int) -> tuple[int, int, float]:
        """Height and width of the centred part of an image of this size that the inputs use, and its scale.

        The whole image, unless all inputs show crops.

        `preprocess` crops the same from this part as from the whole image: a share of the largest rectangle of an
        input's aspect, which lies within the part.
        """
        if self.whole or any(each.fit != "crop" for each in self.inputs):
            finest = min(_pixels_per_pixel(height, width, each) for each in self.inputs)
            return height, width, self.detail / finest
        fits = [min(height / each.height, width / each.width) for each in self.inputs]
        kept_height = max(round(fit * each.height) for fit, each in zip(fits, self.inputs, strict=True))
        kept_width = max(round(fit * each.width) for fit, each in zip(fits, self.inputs, strict=True))
        finest = min(fit * each.crop_fraction for fit, each in zip(fits, self.inputs, strict=True))
        return min(height, kept_height), min(width, kept_width), self.detail / finest

    def _cut(self, pixels: Pixels) -> Pixels:
        height, width = pixels.shape[:2]
        rows, columns, scale = self._window(height, width)
        top, left = (height - rows) // 2, (width - columns) // 2
        part = np.ascontiguousarray(pixels[top : top + rows, left : left + columns])
        size = max(1, round(columns * scale)), max(1, round(rows * scale))
        small: Pixels = cv2.resize(part, size, interpolation=cv2.INTER_AREA)
        return small


def useful_side(inputs: Iterable[InputSpec]) -> int:
    """The most pixels of an image's shorter side that any of these inputs uses."""
    return max(math.ceil(max(each.height, each.width) / each.crop_fraction) for each in inputs)


def _pixels_per_pixel(height: int, width: int, spec: InputSpec) -> float:
    """Pixels of an image per pixel of an input, in the direction in which these are fewer."""
    match spec.fit:
        case "crop":
            return crop_scale(height, width, spec)
        case "stretch":
            return min(height / spec.height, width / spec.width)
        case "letterbox":
            return max(height / spec.height, width / spec.width)


def _upright(header: ImageHeader) -> tuple[int, int]:
    """Height and width of the upright image."""
    turned = header.orientation >= 5
    return (header.width, header.height) if turned else (header.height, header.width)
