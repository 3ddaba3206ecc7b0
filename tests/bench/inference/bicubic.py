"""Our bicubic scaling beside OpenCV's: how long each takes, in turns, and how many values differ.

    python -m tests.bench.inference.bicubic
    python -m tests.bench.inference.bicubic --images 3000

Those of images of noise, of 8 to 400 pixels a side, scaled to half of that and up to 700.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import cv2
import numpy as np

from hawkvision.core.types import Pixels
from hawkvision.imaging.scale import bicubic

SIDES: Final = ((227, 224), (256, 224), (256, 240), (256, 260), (400, 224))
"""Before and after: ImageNet's images here, and the cascade's inputs."""
TURNS: Final = 15
IMAGES: Final = 50
"""Of a turn."""
MOST: Final = 700
"""Pixels a side that images of noise come out with."""


def by_opencv(image: Pixels, width: int, height: int) -> Pixels:
    """What we do the same as."""
    scaled: Pixels = cv2.resize(image, (width, height), interpolation=cv2.INTER_CUBIC)
    return scaled


def turn(scale: Callable[[Pixels, int, int], Pixels], images: Sequence[Pixels], after: int) -> float:
    """Microseconds of an image."""
    before = time.perf_counter()
    for image in images:
        scale(image, after, after)
    return (time.perf_counter() - before) / len(images) * 1e6


def main() -> int:
    """Print a table; 1 where this machine has no such kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=300, help="of noise, of whose values those that differ count")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    cv2.setNumThreads(1)
    if not bicubic.prepare():
        print("this machine has no kernel that scales as OpenCV does")
        return 1
    draw = np.random.default_rng(given.seed)
    print(f"pixels a side  OpenCV us  ours us  times as quick (least to most of {TURNS} turns)")
    for before, after in SIDES:
        images = list(draw.integers(0, 256, (IMAGES, before, before, 3), dtype=np.uint8))
        pairs = [(turn(by_opencv, images, after), turn(bicubic.scaled, images, after)) for _ in range(1 + TURNS)]
        del pairs[0]  # plans are made
        ratios = [one / other for one, other in pairs]
        theirs, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{before:4} to {after:3}  {theirs:12.0f}  {ours:7.0f}  {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    values = differing = 0
    for _ in range(given.images):
        before = int(draw.integers(bicubic.LEAST_SIDE, 400))
        after = int(draw.integers((before + 1) // 2, MOST))
        image = draw.integers(0, 256, (before, before, 3), dtype=np.uint8)
        differs = bicubic.scaled(image, after, after) != by_opencv(image, after, after)
        values, differing = values + differs.size, differing + int(np.count_nonzero(differs))
    print(f"of {values} values of {given.images} images of noise {differing} differ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
