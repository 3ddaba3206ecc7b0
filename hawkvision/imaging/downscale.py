"""What an image travels as to larger models: the part that they look at, no finer than they look.

    1920 x 1080 from a camera ──┬─ the centred square ──► 260 pixels a side ──► JPEG of 30 KB ──► datacenter
    256 x 256 pixels, 25 KB ────┴────────────────────────────────────── as it is ───────────────► datacenter

Images with less than `LEAST_FINER` times the pixels a side that are looked at are left alone: coding these anew at
their own size would add its losses to theirs, a point of accuracy at quality 90, where shrinking averages both out.

1,360 ImageNet images enlarged four times, with the noise of a camera, as JPEG of quality 85, and what is made of
them, before the ensemble of three (`python -m tests.bench.reduced`). What was right before and is wrong after is
lost, the other way it is won.

    detail, quality     KB    accuracy     lost, won    same answer
    as they are        185     88.46 %                        100 %
    1, 95               32     88.46 %          6, 6         98.4 %
    2, 90               62     88.24 %          5, 2         99.3 %
    1.5, 90             41     88.53 %          5, 6         98.6 %
    1, 90               22     88.60 %        10, 12         97.4 %
    1, 85               18     88.01 %        21, 15         96.0 %

The first is what is sent: a sixth of the bytes, as many right answers, and nearly all of them the same. Of 4,000
CIFAR-10 images enlarged six times it lost 21 and won 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
import simplejpeg

from hawkvision.core.types import Pixels
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.preprocessing import OVERSAMPLING, decode
from hawkvision.models.manifest import InputSpec

DETAIL: Final = 1.0
"""Pixels a side that are sent for each that the most demanding model takes in."""
QUALITY: Final = 95
LEAST_FINER: Final = 1.5
_QUICKLY: Final = (cv2.IMWRITE_PNG_COMPRESSION, 1)


@dataclass(frozen=True, slots=True)
class CropWindow:
    """The centred part of an image that some inputs are cropped from, in pixels, and what it is scaled by."""

    height: int
    width: int
    scale: float


@dataclass(frozen=True, slots=True)
class Reducer:
    """Makes images as small as these inputs look at them.

    Whatever is cropped and scaled for one of the inputs, from an image or from what is made of it, shows the same
    thing. The same bytes in give the same bytes out.
    """

    inputs: tuple[InputSpec, ...]
    """Of all models that may look; at least one."""
    max_pixels: int
    """See `decode`."""
    detail: float = DETAIL
    quality: int = QUALITY
    """On libjpeg's scale."""

    def saves(self, header: ImageHeader) -> bool:
        """Whether an image is so much finer than anybody looks that it is made smaller."""
        return self._window(*_upright(header)).scale * LEAST_FINER <= self.detail

    def reduced(self, body: bytes, header: ImageHeader) -> bytes:
        """The image as a JPEG of what the inputs take of it; the very same object where that would not be smaller.

        Of a format that not every tier reads, a JPEG or a PNG is made in any case.

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
        """The same pixels, upright, in a format that every tier reads."""
        pixels = decode(body, header, max_pixels=self.max_pixels, min_side=max(header.height, header.width))
        done, encoded = cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), _QUICKLY)
        assert done
        return bytes(encoded.data)

    def least_side(self, header: ImageHeader) -> int:
        """At what size an image is decoded that is made smaller; see `decode`, `min_side`."""
        side = self._window(*_upright(header)).scale * min(header.height, header.width)
        return round(side * max(1.0, OVERSAMPLING / self.detail))

    def _window(self, height: int, width: int) -> CropWindow:
        """Of an image this large.

        `preprocess` takes the same of this part as of the whole: a share of the largest rectangle of an input's aspect,
        which lies within it.
        """
        fits = [min(height / each.height, width / each.width) for each in self.inputs]
        kept_height = max(round(fit * each.height) for fit, each in zip(fits, self.inputs, strict=True))
        kept_width = max(round(fit * each.width) for fit, each in zip(fits, self.inputs, strict=True))
        finest = min(fit * each.crop_fraction for fit, each in zip(fits, self.inputs, strict=True))
        return CropWindow(min(height, kept_height), min(width, kept_width), self.detail / finest)

    def _cut(self, pixels: Pixels) -> Pixels:
        height, width = pixels.shape[:2]
        kept = self._window(height, width)
        top, left = (height - kept.height) // 2, (width - kept.width) // 2
        part = np.ascontiguousarray(pixels[top : top + kept.height, left : left + kept.width])
        size = max(1, round(kept.width * kept.scale)), max(1, round(kept.height * kept.scale))
        small: Pixels = cv2.resize(part, size, interpolation=cv2.INTER_AREA)
        return small


def _upright(header: ImageHeader) -> tuple[int, int]:
    """Height and width of the image as it is to be seen."""
    turned = header.orientation >= 5
    return (header.width, header.height) if turned else (header.height, header.width)
