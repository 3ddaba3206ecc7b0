"""Encoded images made on the spot."""

from __future__ import annotations

import functools
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@functools.cache
def encoded(suffix: str = ".jpg", height: int = 64, width: int = 80, seed: int = 0) -> bytes:
    """A smooth random image, encoded as the suffix says."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
    pixels = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    done, data = cv2.imencode(suffix, pixels)
    assert done
    return data.tobytes()


@functools.cache
def photograph(kilobytes: int) -> bytes:
    """A JPEG of random blobs, of about this size."""
    rng, side = np.random.default_rng(kilobytes), 16
    while True:
        pixels = cv2.GaussianBlur(rng.integers(0, 256, (side, side, 3), np.uint8), (3, 3), 0)
        body = cv2.imencode(".jpg", pixels)[1].tobytes()
        if len(body) >= kilobytes * 1000:
            return body
        side += 4


def chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column and row of each pass of an interlaced PNG, and the steps to the next."""


@functools.cache
def flat_png(width: int, height: int, colour: int = 2, depth: int = 8, *, interlaced: bool = False) -> bytes:
    """A PNG of one colour: few bytes for many pixels, as an attacker writes it."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    compressor, out = zlib.compressobj(6), []
    for column, row, across, down in ADAM7 if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - column) // across), -(-(height - row) // down)
        line = b"\0" + b"\x07" * ((columns * channels * depth + 7) // 8)
        out += [compressor.compress(line) for _ in range(rows)]
    out.append(compressor.flush())
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlaced)))
    palette = chunk(b"PLTE", bytes(range(256)) * 3) if colour == 3 else b""
    return b"\x89PNG\r\n\x1a\n" + head + palette + chunk(b"IDAT", b"".join(out)) + chunk(b"IEND", b"")


def with_restarts(quality: int = 80, height: int = 256, width: int = 256) -> bytes:
    pixels = cv2.imdecode(np.frombuffer(encoded(height=height, width=width), np.uint8), cv2.IMREAD_COLOR)
    options = (cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_RST_INTERVAL, 4)
    return bytes(cv2.imencode(".jpg", pixels, options)[1].data)
