"""What decoding is said to cost, beside what a process takes for it."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hawkvision.core.errors import TooLarge
from hawkvision.imaging import decoding_cost
from hawkvision.imaging.decoding_cost import (
    SMALL,
    DecodingScales,
    check_pixels,
    cost_of,
)
from hawkvision.imaging.image_header import ImageFormat, ImageHeader
from hawkvision.imaging.preprocessing import least_side, probe
from hawkvision.models.manifest import InputSpec
from tests.images import chunk, flat_png

WIDTH, HEIGHT = 2048, 1536
SPEC = InputSpec(height=224, width=224, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
NOISE = 2**20
"""Bytes: code that is brought in, and what an allocator keeps."""
MEASURE = """
import json, os, sys
from hawkvision.imaging.preprocessing import decode, probe
from tests.images import encoded
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
small = [encoded(kind) for kind in (".jpg", ".png", ".webp")]
for side, path in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        for each in small:  # bring in the code of the libraries
            decode(each, probe(each), max_pixels=10**9, min_side=1)
        body = open(path, "rb").read()
        header = probe(body)
        before = status("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")  # from here on the peak is anew (proc(5))
        decode(body, header, max_pixels=10**9, min_side=side)
        print(status("VmHWM") - before, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def photo(channels: int = 3) -> np.ndarray[Any, Any]:
    coarse = np.random.default_rng(0).integers(0, 256, (HEIGHT // 16, WIDTH // 16, channels), np.uint8)
    pixels: np.ndarray[Any, Any] = cv2.resize(coarse, (WIDTH, HEIGHT))
    return pixels


def by_opencv(suffix: str, *options: int, channels: int = 3) -> bytes:
    return bytes(cv2.imencode(suffix, photo(channels), options)[1].data)


def by_pillow(kind: str, mode: str = "RGB", frames: int = 1, **options: Any) -> bytes:
    image = Image.frombytes(mode, (WIDTH, HEIGHT), photo(len(mode)).tobytes())
    out = io.BytesIO()
    more = {"save_all": True, "append_images": [image.rotate(180)] * (frames - 1)} if frames > 1 else {}
    image.save(out, kind, **more, **options)
    return out.getvalue()


def turned(jpeg: bytes) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    segment = b"Exif\0\0" + exif.tobytes().removeprefix(b"Exif\0\0")
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + jpeg[2:]


def restarts(marker: bytes) -> bytes:
    """With this in the place of every restart marker."""
    jpeg = by_opencv(".jpg", cv2.IMWRITE_JPEG_RST_INTERVAL, 64)
    return re.sub(rb"\xff[\xd0-\xd7]", lambda _: marker, jpeg)


def transparent(png: bytes, levels: bytes) -> bytes:
    at = png.index(b"IDAT") - 4
    return png[:at] + chunk(b"tRNS", levels) + png[at:]


PROGRESSIVE = cv2.IMWRITE_JPEG_PROGRESSIVE, 1
FINE = cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444
IMAGES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: by_opencv(".jpg"),
    "jpeg-turned": lambda: turned(by_opencv(".jpg")),
    "jpeg-progressive": lambda: by_opencv(".jpg", *PROGRESSIVE),
    "jpeg-progressive-444": lambda: by_opencv(".jpg", *PROGRESSIVE, *FINE),
    "jpeg-progressive-444-turned": lambda: turned(by_opencv(".jpg", *PROGRESSIVE, *FINE)),
    "jpeg-cmyk-progressive": lambda: by_pillow("JPEG", "CMYK", progressive=True),
    "png-rgb": lambda: flat_png(WIDTH, HEIGHT),
    "png-rgb-photo": lambda: by_opencv(".png"),
    "png-rgb-interlaced": lambda: flat_png(WIDTH, HEIGHT, interlaced=True),
    "png-rgba": lambda: flat_png(WIDTH, HEIGHT, colour=6),
    "png-16": lambda: flat_png(WIDTH, HEIGHT, depth=16),
    "png-16-alpha": lambda: flat_png(WIDTH, HEIGHT, colour=6, depth=16),
    "png-16-alpha-interlaced": lambda: flat_png(WIDTH, HEIGHT, colour=6, depth=16, interlaced=True),
    "png-16-transparent": lambda: transparent(flat_png(WIDTH, HEIGHT, depth=16), b"\0\1" * 3),
    "png-grey": lambda: flat_png(WIDTH, HEIGHT, colour=0),
    "png-bits": lambda: flat_png(WIDTH, HEIGHT, colour=0, depth=1),
    "png-grey-alpha": lambda: flat_png(WIDTH, HEIGHT, colour=4),
    "png-palette": lambda: flat_png(WIDTH, HEIGHT, colour=3),
    "png-palette-transparent": lambda: transparent(flat_png(WIDTH, HEIGHT, colour=3), b"\x80"),
    "png-animated": lambda: by_pillow("PNG", frames=2, compress_level=1),
    "png-alpha-animated": lambda: by_pillow("PNG", "RGBA", frames=2, compress_level=1),
    "webp": lambda: by_pillow("WEBP", quality=80, method=0),
    "webp-lossless": lambda: by_pillow("WEBP", lossless=True, quality=0, method=0),
    "webp-alpha": lambda: by_pillow("WEBP", "RGBA", quality=80, method=0),
    "webp-lossless-alpha": lambda: by_pillow("WEBP", "RGBA", lossless=True, quality=0, method=0),
    "gif": lambda: by_pillow("GIF"),
    "bmp": lambda: by_pillow("BMP"),
    "tiff": lambda: by_pillow("TIFF", compression="tiff_lzw"),
    "tiff-alpha": lambda: by_pillow("TIFF", "RGBA", compression="tiff_deflate"),
    "tiff-cmyk": lambda: by_pillow("TIFF", "CMYK"),
    "webp-animated": lambda: by_pillow("WEBP", frames=2, quality=80, method=0),
}
MENDED: dict[str, Callable[[], bytes]] = {
    "png-without-end": lambda: flat_png(WIDTH, HEIGHT)[:-12],
    "png-16-alpha-without-end": lambda: flat_png(WIDTH, HEIGHT, colour=6, depth=16)[:-12],
    "jpeg-restarts-misnumbered": lambda: restarts(b"\xff\xd0"),
    "jpeg-restarts-padded": lambda: restarts(b"\0\0\xff\xd0"),
    "jpeg-restarts-behind-junk": lambda: restarts(b"\x55\x12\x77\xff\xd0"),
    "jpeg-progressive-behind-junk": lambda: by_opencv(".jpg", *PROGRESSIVE)[:-2] + b"\x55\x12\x77\xff\xd9",
}
SMALLER = ("jpeg", "jpeg-turned", "jpeg-progressive", "jpeg-progressive-444", "jpeg-restarts-padded")


@pytest.mark.slow
def test_no_image_takes_more_memory_than_was_said_nor_very_much_less(tmp_path: Path) -> None:
    """In processes of their own: what decoding adds to the peak is at most the charge, and a quarter of it at least.

    A quarter, because a JPEG's sampling is not looked at (of 4:2:0 there are half of the coefficients), and most need
    not be mended; so of what Pillow reads, and half of other formats. The body is left out of the quarter and the half.
    """
    all_of_them = {**IMAGES, **MENDED}
    for name, make in all_of_them.items():
        (tmp_path / name).write_bytes(make())
    asked = [(side, name) for names, side in ((all_of_them, 10**9), (SMALLER, 256)) for name in names]
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps([(side, str(tmp_path / name)) for side, name in asked]),
        capture_output=True,
        text=True,
        check=True,
    )
    problems = []
    for (side, name), took in zip(asked, map(int, ran.stdout.split()), strict=True):
        body = (tmp_path / name).read_bytes()
        said = cost_of(body, probe(body), [side]).bytes
        loosely = name.startswith(("jpeg", "gif", "bmp", "tiff"))
        least = (said - decoding_cost.BODIES * len(body)) / (4 if loosely else 2)
        if not least - NOISE <= took <= said + NOISE:
            problems.append(f"{name} at {side}: {took} bytes of {said} said")
    assert not problems, "\n".join(problems)


headers = st.builds(
    ImageHeader,
    st.sampled_from(ImageFormat),
    st.integers(1, 65535),
    st.integers(1, 65535),
    st.integers(1, 8),
    st.sampled_from((1, 3, 4)),
    alpha=st.booleans(),
    multiscan=st.booleans(),
    animated=st.booleans(),
    depth=st.sampled_from((8, 16)),
)


@given(headers)
def test_a_raster_and_its_turned_copy_are_always_in_it_and_a_smaller_scale_never_costs_more(
    header: ImageHeader,
) -> None:
    full, small = (cost_of(b"", header, [side]).bytes for side in (10**9, 1))
    assert small <= full
    assert full >= 3 * header.pixels * (2 if header.orientation > 1 else 1)


@given(headers.filter(lambda header: header.pixels <= 50_000_000))
def test_what_is_called_small_is(header: ImageHeader) -> None:
    scales = DecodingScales([SPEC], 50_000_000, 50_000_000)
    try:
        said = scales.cost(b"", header)
    except TooLarge:
        return
    exact = cost_of(b"", header, [least_side(SPEC)])
    assert said.bytes >= exact.bytes if said is SMALL else said == exact
    assert scales.cost(bytes(decoding_cost.SMALL_BODY + 1), header) is not SMALL


def test_formats_that_cannot_be_decoded_small_have_a_bound_of_their_own() -> None:
    jpeg = ImageHeader(ImageFormat.JPEG, 8000, 6000, 1, 3)
    check_pixels(jpeg, 50_000_000, 16_777_216)
    for kind in (ImageFormat.PNG, ImageFormat.WEBP):
        check_pixels(ImageHeader(kind, 4096, 4096, 1, 3), 50_000_000, 16_777_216)
        with pytest.raises(
            TooLarge, match=r"at most 16777216 are decoded, for a .* cannot be decoded at a smaller size"
        ):
            check_pixels(ImageHeader(kind, 4096, 4097, 1, 3), 50_000_000, 16_777_216)
    deep = ImageHeader(ImageFormat.PNG, 4096, 2049, 1, 4, alpha=True, depth=16)
    with pytest.raises(TooLarge, match=r"at most 8388608 are decoded, of 16 bits with alpha"):
        check_pixels(deep, 50_000_000, 16_777_216)
    with pytest.raises(TooLarge, match=r"at most 1000 are decoded$"):
        check_pixels(ImageHeader(ImageFormat.PNG, 100, 11, 1, 3), 1000, 16_777_216)


def test_what_is_heavy_follows_from_pixels_format_and_scans() -> None:
    def heavy(kind: ImageFormat, side: int, body: bytes = b"", **more: bool) -> bool:
        return cost_of(body, ImageHeader(kind, side, side, 1, 3, **more), [1]).heavy

    scan = b"\xff\xda"
    assert [heavy(ImageFormat.JPEG, side) for side in (4096, 4097)] == [False, True]
    assert [heavy(ImageFormat.PNG, side) for side in (2048, 2049)] == [False, True]
    assert [heavy(ImageFormat.JPEG, 2048, scan * scans, multiscan=True) for scans in (4, 5)] == [False, True]
    with pytest.raises(TooLarge, match="has 257 scans of 4194304 pixels; at most 256 are decoded"):
        heavy(ImageFormat.JPEG, 2048, scan * 257, multiscan=True)
