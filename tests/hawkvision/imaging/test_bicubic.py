"""Bicubic scaling by our own kernel: OpenCV's pixels, and OpenCV itself wherever the kernel is not one for them."""

from __future__ import annotations

import os
import subprocess
import sys

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.types import Pixels
from hawkvision.imaging.scale import bicubic
from hawkvision.native import library

LACKS = library.unsupported_reason() or (
    None if bicubic.NEEDS in library.cpuinfo("flags").split() else f"no {bicubic.NEEDS}"
)
WITH_INTEL = "AVX2" in cv2.ipp.getIppVersion()
runs = pytest.mark.skipif(LACKS is not None or not WITH_INTEL, reason=f"{LACKS or 'OpenCV is not built with IPP'}")


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    """As a process that has opened a network of ours."""
    bicubic.prepare()


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def by_opencv(pixels: Pixels, width: int, height: int) -> Pixels:
    scaled: Pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_CUBIC)
    return scaled


def check(encoded_image: Pixels, width: int, height: int) -> None:
    np.testing.assert_array_equal(bicubic.scaled(encoded_image, width, height), by_opencv(encoded_image, width, height))


@runs
def test_the_kernel_is_used_where_it_does_as_opencv() -> None:
    assert bicubic.prepare()


@given(st.integers(bicubic.LEAST_SIDE, 460), st.integers(8, 460), st.integers(0, 1 << 30), st.booleans())
def test_squares_are_scaled_as_opencv_scales_them(before: int, after: int, seed: int, stark: bool) -> None:
    encoded_image = noise(before, before, seed)
    check(encoded_image // 128 * 255 if stark else encoded_image, after, after)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(8, 30), st.integers(8, 40), st.integers(0, 1 << 30))
def test_oblongs_that_keep_their_shape_are_too(high: int, wide: int, before: int, after: int, seed: int) -> None:
    check(noise(high * before, wide * before, seed), wide * after, high * after)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 1 << 30))
def test_a_part_of_an_image_is_scaled_as_a_copy_of_it(top: int, left: int, seed: int) -> None:
    part = noise(140, 150, seed)[top : top + 90, left : left + 90]
    np.testing.assert_array_equal(bicubic.scaled(part, 64, 64), bicubic.scaled(part.copy(), 64, 64))


@pytest.mark.parametrize(
    ("encoded_image", "width", "height"),
    [
        (noise(60, 90), 64, 64),  # not alike in both directions
        (noise(200, 200), 64, 64),  # by more than two
        (noise(128, 128), 64, 64),
        (noise(600, 600), bicubic.MOST_WIDTH + 1, bicubic.MOST_WIDTH + 1),
        (noise(3, 3), 20, 20),
        (noise(80, 160)[:, ::2], 64, 64),  # every second pixel
        (noise(80, 80)[:, ::-1], 64, 64),
        (noise(80, 80)[::-1], 64, 64),
        (noise(80, 80)[:, :, ::-1], 64, 64),
    ],
)
def test_whatever_else_comes_is_scaled_as_opencv_scales_a_copy(encoded_image: Pixels, width: int, height: int) -> None:
    np.testing.assert_array_equal(
        bicubic.scaled(encoded_image, width, height), by_opencv(np.ascontiguousarray(encoded_image), width, height)
    )


AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys
import numpy as np
from hawkvision.imaging.scale import bicubic
assert bicubic.prepare()
page = mmap.PAGESIZE
for before, after in ((64, 64), (227, 224), (100, 64), (40, 64), (9, 33)):
    size = before * before * 3
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (begin, begin + (pages + 1) * page):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), page, 0) == 0
    for offset in (page, (pages + 1) * page - size):
        image = np.frombuffer(memory, np.uint8, size, offset).reshape(before, before, 3)
        image[:] = 7
        assert (bicubic.scaled(image, after, after) == 7).all()
"""


@runs
def test_nothing_before_or_behind_an_image_is_touched() -> None:
    """What lies there must not be touched: the process would be killed."""
    assert subprocess.run([sys.executable, "-c", AT_THE_END_OF_MEMORY], check=False).returncode == 0


@runs
def test_an_opencv_that_has_other_pixels_scales_itself() -> None:
    reported = "import logging; logging.basicConfig(level=logging.INFO)\nfrom hawkvision.imaging.scale import bicubic"
    ran = subprocess.run(
        [sys.executable, "-c", f"{reported}\nprint(bicubic.prepare())"],
        env={**os.environ, "OPENCV_IPP": "disabled"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "False\n"
    assert "other pixels than the kernel" in ran.stderr
