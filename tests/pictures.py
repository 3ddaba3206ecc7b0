"""Encoded pictures made on the spot."""

from __future__ import annotations

import functools
from pathlib import Path

import cv2
import numpy as np

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@functools.cache
def encoded(suffix: str = ".jpg", height: int = 64, width: int = 80, seed: int = 0) -> bytes:
    """A smooth random picture, encoded as the suffix says."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
    pixels = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    done, data = cv2.imencode(suffix, pixels)
    assert done
    return data.tobytes()


def with_restarts(quality: int = 80, height: int = 256, width: int = 256) -> bytes:
    pixels = cv2.imdecode(np.frombuffer(encoded(height=height, width=width), np.uint8), cv2.IMREAD_COLOR)
    options = (cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_RST_INTERVAL, 4)
    return bytes(cv2.imencode(".jpg", pixels, options)[1].data)
