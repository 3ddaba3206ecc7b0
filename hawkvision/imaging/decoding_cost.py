"""Estimates the cost of decoding an image from its header: peak bytes and seconds.

    JPEG                       raster at the chosen scale (3 bytes per pixel, 4 for CMYK); three of them if it may be
                               repaired (`jpeg_decoding`); two if not, and it is rotated
      of several scans         and 2 bytes per coefficient of the whole image
    PNG, WebP                  the decoder's raster and a copy of it, of the whole image: 3 bytes a pixel each,
                               4 with alpha, 8 with alpha of 16 bits; lossless WebP 4 for its own
      animated                 and the decoder's canvas
    scaled whole               and Pillow's copies, for the interpolations of libraries
    others (`formats`)         24 bytes per pixel: Pillow's raster of 4, its source, conversions and copies
    all                        several copies of the body, if it is taken apart and rebuilt

Bytes are an upper bound, which `tests/hawkvision/imaging/test_decoding_cost.py` compares with the memory of a process.
A JPEG is assumed to have as many coefficients as samples. Seconds are pixels times the recent time per pixel of such
images; the first value is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import cv2
import numpy as np

from hawkvision.core.errors import TooLarge
from hawkvision.imaging.image_header import Encoded, ImageFormat, ImageHeader, probe
from hawkvision.imaging.jpeg_decoding import MAX_MENDED_BYTES
from hawkvision.imaging.placement import whole_scaled
from hawkvision.imaging.preprocessing import decode, least_side, scale_of
from hawkvision.models.manifest import InputSpec

BASE_BYTES: Final = 256 * 1024
"""Bytes for tables, inflating windows and strips of any image."""
ROW_BYTES: Final = 256
"""Bytes per pixel of a row, for the rows that a decoder holds at once."""
BODIES: Final = 6
"""Most copies of a body while it is repaired, notes on its bytes included."""
MENDED: Final = 3
"""Most rasters of a JPEG while it is repaired."""
BLOCK: Final = 32
"""Side of the largest coded unit of a JPEG: four blocks of eight pixels. Coefficients are held for whole units."""
OTHER_BYTES: Final = 24
"""Bytes per pixel of a format that Pillow reads."""
HEAVY_S: Final = 0.03
"""Decoding time from which on an image is heavy. Only heavy images count in estimates of waiting time."""
SMALL_PIXELS: Final = 1 << 19
SMALL_SIDE: Final = 4096
SMALL_BODY: Final = 512 * 1024
"""A JPEG of one scan within these bounds is not heavy, so that its cost need not be estimated."""
LEARN_FROM: Final = 1 << 16
"""Pixels; the time of smaller images is mostly overhead and is not learned from."""
GAIN: Final = 0.1
"""Weight of the newest image in the smoothed time per pixel."""
SAMPLE_SIDE: Final = 256
"""Side in pixels of the images that measure the first value."""


class DecoderKind(StrEnum):
    """Images whose pixels take about as long each."""

    JPEG = "jpeg"
    """At full or half scale."""
    JPEG_SMALL = "jpeg_small"
    """At a quarter or an eighth of the size, reading the code takes most of the time."""
    JPEG_SCANS = "jpeg_scans"
    """Per pixel of each scan."""
    PNG = "png"
    PNG_ALPHA = "png_alpha"
    PNG_DEEP = "png_deep"
    """16 bits."""
    PNG_DEEP_ALPHA = "png_deep_alpha"
    WEBP = "webp"
    OTHER = "other"
    """Of `formats`; before the first one is decoded, as slow as the slowest other kind."""


@dataclass(frozen=True, slots=True)
class DecodingCost:
    """The cost of decoding one image."""

    bytes: int
    """At its peak, in addition to the body."""
    heavy_s: float
    """Expected seconds; 0 if they are less than `HEAVY_S`."""
    kind: DecoderKind
    work: int
    """Pixels of all scans, which determine the time."""

    @property
    def heavy(self) -> bool:
        """Whether its time is estimated."""
        return self.heavy_s > 0.0


SMALL: Final = DecodingCost(
    BASE_BYTES + ROW_BYTES * SMALL_SIDE + 4 * MENDED * SMALL_PIXELS + BODIES * SMALL_BODY, 0.0, DecoderKind.JPEG, 0
)
"""The cost of any small JPEG; nothing is learned from it."""


class DecodingRates:
    """Seconds per pixel by kind, learned from all decoded images. Any thread may use it."""

    def __init__(self) -> None:
        """Measure the first values with a photograph-like image of each kind; takes less than 0.1 s."""
        self._start: dict[DecoderKind, float] = {
            kind: _measured(kind) for kind in DecoderKind if kind is not DecoderKind.OTHER
        }
        self._start[DecoderKind.OTHER] = max(self._start.values())
        self._seconds = dict(self._start)

    def seconds(self, kind: DecoderKind, work: int) -> float:
        """The expected seconds for so many pixels of a kind."""
        return self._seconds[kind] * work

    def alone(self, cost: DecodingCost) -> float:
        """Expected seconds of a heavy image on an idle processor by the first measurement; 0 of others."""
        return self._start[cost.kind] * cost.work if cost.heavy else 0.0

    def learn(self, cost: DecodingCost, seconds: float) -> None:
        """Learn from one decoded image."""
        if cost.work >= LEARN_FROM:
            self._seconds[cost.kind] += GAIN * (seconds / cost.work - self._seconds[cost.kind])


class DecodingScales:
    """The costs of images that are decoded for the given models' inputs."""

    def __init__(
        self, inputs: Iterable[InputSpec], rates: DecodingRates, max_pixels: int, max_pixels_whole: int
    ) -> None:
        """For models with these inputs.

        Args:
            inputs: at least one.
            rates: seconds per pixel.
            max_pixels: the largest image; see `check_pixels`.
            max_pixels_whole: the largest image that cannot be decoded at a smaller size.
        """
        inputs = tuple(inputs)
        self._sides = sorted({least_side(each) for each in inputs})
        self._whole = tuple({each: None for each in inputs if each.exact})
        self._scales_once = len(self._sides) == 1 and not self._whole
        self._rates = rates
        self._max_pixels = max_pixels
        self._max_pixels_whole = max_pixels_whole

    def cost(self, body: Encoded, header: ImageHeader) -> DecodingCost:
        """The cost of decoding an image once for each scale that an input needs.

        Raises:
            TooLarge: as `check_pixels`.
        """
        check_pixels(header, self._max_pixels, self._max_pixels_whole)
        if (
            header.format is ImageFormat.JPEG
            and not header.multiscan
            and header.pixels <= SMALL_PIXELS
            and header.width <= SMALL_SIDE
            and len(body) <= SMALL_BODY
            and self._scales_once
        ):
            return SMALL
        found = cost_of(body, header, self._sides, self._rates)
        beside = max((_bytes_scaling(header, each) for each in self._whole), default=0)
        return replace(found, bytes=found.bytes + beside) if beside else found


def check_pixels(header: ImageHeader, max_pixels: int, max_pixels_whole: int) -> None:
    """Refuse an image with too many pixels.

    Args:
        header: the image's header.
        max_pixels: the bound for every image.
        max_pixels_whole: the bound for formats that are decoded at full size only (all but JPEG); half of it
            for 16 bits with alpha.

    Raises:
        TooLarge: with the bound that the image exceeds.
    """
    most, why = max_pixels, ""
    if header.format is not ImageFormat.JPEG and max_pixels_whole < max_pixels:
        most, why = max_pixels_whole, f", for a {header.format.value.upper()} cannot be decoded at a smaller size"
    if header.alpha and header.depth == 16:
        most, why = most // 2, ", of 16 bits with alpha"
    if header.pixels > most:
        raise TooLarge(
            f"the image has {header.width}x{header.height} = {header.pixels} pixels; at most {most} are decoded{why}"
        )


def cost_of(body: Encoded, header: ImageHeader, min_sides: Iterable[int], rates: DecodingRates) -> DecodingCost:
    """The cost of decoding an image once for each scale that follows from `min_sides` (see `decode`)."""
    pixels = header.pixels
    if header.format is not ImageFormat.JPEG:
        kind, work = _kind_whole(header), pixels
        size = _bytes_whole(header)
    else:
        of_pixel = 4 if header.components == 4 else 3
        factors = {scale_of(header, side) for side in min_sides}
        rasters = [-(-header.width // each) * -(-header.height // each) * of_pixel for each in factors]
        size = sum(rasters) + max(_beside(each, header) for each in rasters)
        kind, work = DecoderKind.JPEG if min(factors) < 4 else DecoderKind.JPEG_SMALL, pixels * len(factors)
        if header.multiscan:
            size += 2 * header.components * _padded(header.width) * _padded(header.height)
            kind, work = DecoderKind.JPEG_SCANS, work * _scans(body)
    seconds = rates.seconds(kind, work)
    size += BASE_BYTES + ROW_BYTES * header.width + BODIES * len(body)
    return DecodingCost(size, seconds if seconds >= HEAVY_S else 0.0, kind, work)


def _bytes_scaling(header: ImageHeader, spec: InputSpec) -> int:
    """Bytes for scaling a whole raster: Pillow's copies of it and what is made of it, four bytes per pixel each."""
    made = whole_scaled(header.height, header.width, spec)
    pixels = spec.height * spec.width if made is None else made.height * made.width
    return 4 * 3 * (pixels + (header.pixels if spec.needs_pillow else 0))


def _beside(raster: int, header: ImageHeader) -> int:
    """Bytes beyond the final raster."""
    if raster <= MAX_MENDED_BYTES:
        return (MENDED - 1) * raster
    return raster if header.orientation != 1 else 0


def _kind_whole(header: ImageHeader) -> DecoderKind:
    if not header.format.native:
        return DecoderKind.OTHER
    if header.format is ImageFormat.WEBP:
        return DecoderKind.WEBP
    if header.depth == 16:
        return DecoderKind.PNG_DEEP_ALPHA if header.alpha else DecoderKind.PNG_DEEP
    return DecoderKind.PNG_ALPHA if header.alpha else DecoderKind.PNG


def _bytes_whole(header: ImageHeader) -> int:
    if not header.format.native:
        return OTHER_BYTES * header.pixels
    raster = (8 if header.depth == 16 else 4) if header.alpha else 3
    most = 2 * raster
    if header.format is ImageFormat.WEBP:
        most = max(most, raster + 4)
    if header.animated:
        most += 8
    return most * header.pixels


def _padded(side: int) -> int:
    return -(-side // BLOCK) * BLOCK


def _scans(body: Encoded) -> int:
    """The number of scans, those of thumbnails included."""
    data = body if isinstance(body, bytes | bytearray) else bytes(body)
    return max(1, data.count(b"\xff\xda"))


def _measured(kind: DecoderKind) -> float:
    """Measured processor seconds per pixel, the least of three."""
    body = _sample(kind)
    header = probe(body)
    side = SAMPLE_SIDE // 8 if kind is DecoderKind.JPEG_SMALL else SAMPLE_SIDE
    work = header.pixels * (_scans(body) if kind is DecoderKind.JPEG_SCANS else 1)
    best = math.inf
    for _ in range(3):
        begun = time.thread_time()
        decode(body, header, max_pixels=header.pixels * 2, min_side=side)
        best = min(best, time.thread_time() - begun)
    return best / work


def _sample(kind: DecoderKind) -> bytes:
    """An image of smooth colours with noise, like a camera's."""
    rng = np.random.default_rng(0)
    coarse = cv2.resize(rng.integers(0, 256, (16, 16, 4), np.uint8), (SAMPLE_SIDE, SAMPLE_SIDE))
    pixels = cv2.add(coarse, rng.integers(0, 8, coarse.shape, np.uint8))
    suffix, options = ".jpg", []
    match kind:
        case DecoderKind.JPEG_SCANS:
            options = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]
        case DecoderKind.WEBP:
            suffix, options = ".webp", [cv2.IMWRITE_WEBP_QUALITY, 80]
        case DecoderKind.PNG | DecoderKind.PNG_ALPHA | DecoderKind.PNG_DEEP | DecoderKind.PNG_DEEP_ALPHA:
            suffix, options = ".png", [cv2.IMWRITE_PNG_COMPRESSION, 1]
    if kind not in (DecoderKind.PNG_ALPHA, DecoderKind.PNG_DEEP_ALPHA):
        pixels = pixels[..., :3]
    if kind in (DecoderKind.PNG_DEEP, DecoderKind.PNG_DEEP_ALPHA):
        pixels = pixels.astype(np.uint16) << 8
    done, data = cv2.imencode(suffix, pixels, options)
    assert done, f"OpenCV writes no {suffix}"
    return data.tobytes()
