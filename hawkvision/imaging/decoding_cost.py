"""Bounds the cost of decoding an image, by its header: bytes at the peak, and whether it is heavy.

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
A JPEG is assumed to have as many coefficients as samples. Nothing is learned and no time is predicted: whether an
image is heavy follows from its pixels and format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from hawkvision.core.errors import TooLarge
from hawkvision.imaging.image_header import Encoded, ImageFormat, ImageHeader
from hawkvision.imaging.jpeg_decoding import MAX_MENDED_BYTES
from hawkvision.imaging.placement import whole_scaled
from hawkvision.imaging.preprocessing import least_side, scale_of
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
HEAVY_WORK: Final = 16 << 20
"""An image that takes as long as a JPEG of more pixels is heavy."""
MOST_WORK: Final = 1 << 30
"""An image that takes as long as a JPEG of more pixels is refused."""
SLOW: Final = 4
"""A pixel of another format takes at most about as long as so many of a JPEG."""
SMALL_PIXELS: Final = 1 << 19
SMALL_SIDE: Final = 4096
SMALL_BODY: Final = 512 * 1024
"""A JPEG of one scan within these bounds is not heavy, so that its header says enough."""


@dataclass(frozen=True, slots=True)
class DecodingCost:
    """The cost of decoding one image."""

    bytes: int
    """At its peak, in addition to the body."""
    heavy: bool
    """Whether others must not wait for many of them."""


SMALL: Final = DecodingCost(
    BASE_BYTES + ROW_BYTES * SMALL_SIDE + 4 * MENDED * SMALL_PIXELS + BODIES * SMALL_BODY, heavy=False
)
"""The cost of any small JPEG."""


class DecodingScales:
    """The costs of images that are decoded for the given models' inputs."""

    def __init__(self, inputs: Iterable[InputSpec], max_pixels: int, max_pixels_whole: int) -> None:
        """For models with these inputs.

        Args:
            inputs: at least one.
            max_pixels: the largest image; see `check_pixels`.
            max_pixels_whole: the largest image that cannot be decoded at a smaller size.
        """
        inputs = tuple(inputs)
        self._sides = sorted({least_side(each) for each in inputs})
        self._whole = tuple({each: None for each in inputs if each.exact})
        self._scales_once = len(self._sides) == 1 and not self._whole
        self._max_pixels = max_pixels
        self._max_pixels_whole = max_pixels_whole

    def cost(self, body: Encoded, header: ImageHeader) -> DecodingCost:
        """The cost of decoding an image once for each scale that an input needs.

        Raises:
            TooLarge: as `check_pixels` and `cost_of`.
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
        found = cost_of(body, header, self._sides)
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


def check_memory(cost: DecodingCost, header: ImageHeader, most: int) -> None:
    """Refuse an image that can never be decoded.

    Raises:
        TooLarge: if it takes more than `most` bytes.
    """
    if cost.bytes > most:
        raise TooLarge(
            f"to decode the image of {header.width}x{header.height} pixels takes up to {cost.bytes} bytes of memory; "
            f"one request may have {most}"
        )


def cost_of(body: Encoded, header: ImageHeader, min_sides: Iterable[int]) -> DecodingCost:
    """The cost of decoding an image once for each scale that follows from `min_sides` (see `decode`).

    Raises:
        TooLarge: for so many scans that it would take too long.
    """
    if header.format is not ImageFormat.JPEG:
        size, work = _bytes_whole(header), SLOW * header.pixels
    else:
        of_pixel = 4 if header.components == 4 else 3
        factors = {scale_of(header, side) for side in min_sides}
        rasters = [-(-header.width // each) * -(-header.height // each) * of_pixel for each in factors]
        size = sum(rasters) + max(_beside(each, header) for each in rasters)
        work = header.pixels * len(factors)
        if header.multiscan:
            size += 2 * header.components * _padded(header.width) * _padded(header.height)
            work *= (scans := _scans(body))
            if work > MOST_WORK:
                most = MOST_WORK // header.pixels
                raise TooLarge(f"the image has {scans} scans of {header.pixels} pixels; at most {most} are decoded")
    size += BASE_BYTES + ROW_BYTES * header.width + BODIES * len(body)
    return DecodingCost(size, heavy=work > HEAVY_WORK)


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
