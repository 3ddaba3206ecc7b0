"""Coverage-guided fuzzing of everything that reads a stranger's image files in Python.

    python -m tests.fuzz.image_parsers [-max_total_time=60] [CORPUS]

As `tests.fuzz.datagram_parsers`: an image is decoded, or refused with an error that is the caller's (a status below
500).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import atheris
import cv2
import numpy as np

with atheris.instrument_imports(include=["hawkvision.imaging"]):
    from hawkvision.core.errors import RequestError
    from hawkvision.imaging.image_header import ImageFormat
    from hawkvision.imaging.jpeg_repair import JpegStream, scans
    from hawkvision.imaging.png_repair import rewritten_png, sound_png, sound_webp
    from hawkvision.imaging.preprocessing import decode, probe

from tests.odd_images import odd_jpegs, odd_pngs

MAX_PIXELS: Final = 100_000


def _decoded(data: bytes) -> None:
    header = probe(data)
    decode(data, header, max_pixels=MAX_PIXELS, min_side=20)


def _apart(data: bytes) -> None:
    scans(data)
    stream = JpegStream.read(data, 16)
    stream.trimmed().body(b"\0")
    if stream.plain:
        stream.alone(0)


def _png(data: bytes) -> None:
    if probe(data).format is ImageFormat.PNG:
        sound_png(data)
        rewritten_png(data)


PARSERS: Final[tuple[Callable[[bytes], object], ...]] = (_decoded, _apart, _png, sound_webp)


def one(data: bytes) -> None:
    """The first byte chooses the parser, the others are its input."""
    if not data:
        return
    try:
        PARSERS[data[0] % len(PARSERS)](data[1:])
    except RequestError as error:
        assert error.status < 500  # noqa: PT017


def seeds() -> list[bytes]:
    """An input of each kind, for each parser that it may come to."""
    pixels = np.random.default_rng(0).integers(0, 255, (16, 24, 3), np.uint8)
    jpegs = [odd.body for odd in odd_jpegs(pixels).values()][:50]
    pngs = [odd.body for odd in odd_pngs(pixels).values()]
    others = [cv2.imencode(suffix, pixels)[1].tobytes() for suffix in (".webp", ".bmp", ".tiff")]
    every = [b"\0" + body for body in (*jpegs, *pngs, *others)]
    return [*every, *(b"\x01" + body for body in jpegs), *(b"\x02" + body for body in pngs), b"\x03" + others[0]]


def main(argv: list[str]) -> None:
    """Fuzz until libFuzzer ends."""
    with tempfile.TemporaryDirectory() as folder:
        if all(each.startswith("-") for each in argv[1:]):
            for number, seed in enumerate(seeds()):
                (Path(folder) / str(number)).write_bytes(seed)
            argv = [*argv, folder]
        atheris.Setup([*argv, f"-artifact_prefix={tempfile.gettempdir()}/"], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
