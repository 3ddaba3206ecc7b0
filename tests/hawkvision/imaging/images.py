"""Encoded images for the tests of decoding, and Pillow as the oracle."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pillow_heif
from PIL import Image, ImageOps

from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import decode, probe

pillow_heif.register_heif_opener()
MAX_PIXELS = 1_000_000
LARGE = 100_000
"""A `min_side` that no test image reaches, so that nothing is decoded at a reduced scale."""


def scene(height: int = 30, width: int = 44, channels: int = 3) -> Pixels:
    """Smooth colours without any symmetry, so that a turned or mirrored image is seen to be."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [128 + 100 * np.sin(x / (5 + c) + c) * np.cos(y / (7 + 2 * c)) + x / 3 for c in range(channels)]
    pixels: Pixels = np.clip(np.stack(waves, -1), 0, 255).astype(np.uint8)
    return pixels


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def encoded_image(kind: str, **options: Any) -> bytes:
    return encode(Image.fromarray(scene()), kind, **options)


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def read(body: bytes) -> Pixels:
    return decode(body, probe(body), max_pixels=MAX_PIXELS, min_side=LARGE)


def pillow(body: bytes) -> Pixels:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(body))).convert("RGB"))


def furthest(a: Pixels, b: Pixels) -> int:
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png_header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))


def jpeg_with_size(body: bytes, width: int, height: int) -> bytes:
    at = next(i for m in (b"\xff\xc0", b"\xff\xc2") if (i := body.find(m)) > 0)
    return body[: at + 5] + struct.pack(">HH", height, width) + body[at + 9 :]


BODIES = [
    encoded_image("JPEG"),
    encoded_image("JPEG", progressive=True),
    encoded_image("PNG"),
    encoded_image("WEBP"),
    encoded_image("WEBP", exif=oriented(6), lossless=True),
    encoded_image("PNG", exif=oriented(5)),
    encode(Image.fromarray(scene(channels=4)), "PNG"),
    encode(Image.fromarray(scene(channels=4), "CMYK"), "JPEG"),
]
