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
