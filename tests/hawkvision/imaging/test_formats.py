"""HEIC, AVIF, GIF, BMP and TIFF are read as Pillow shows them where the extra is there, and named where it is not."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hawkvision.core.errors import BadImage, RequestError, TooLarge, UnsupportedMedia
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.preprocessing import decode, probe
from hawkvision.models.manifest import InputSpec
from tests.hawkvision.imaging.images import MAX_PIXELS, encode, encoded_image, furthest, oriented, pillow, read, scene

KINDS: dict[str, dict[str, Any]] = {"GIF": {}, "BMP": {}, "TIFF": {}, "AVIF": {}, "HEIF": {}}
NAMES = {"GIF": "GIF", "BMP": "BMP", "TIFF": "TIFF", "AVIF": "AVIF", "HEIF": "HEI[CF]"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_other_formats_are_read_as_pillow_shows_them(kind: str, channels: int) -> None:
    pixels = scene(channels=channels)
    body = encode(Image.fromarray(pixels if channels == 3 else pixels[..., 0]), kind)
    header = probe(body)
    assert (header.width, header.height, header.format.native) == (44, 30, False)
    assert furthest(read(body), pillow(body)) == 0


@pytest.mark.parametrize("kind", ["TIFF", "AVIF", "HEIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_other_formats_are_turned_upright(kind: str, orientation: int) -> None:
    body = encoded_image(kind, exif=oriented(orientation))
    assert furthest(read(body), pillow(body)) == 0


@pytest.mark.parametrize(("kind", "further"), [("TIFF", 1), ("AVIF", 12), ("HEIF", 12)])
def test_alpha_is_laid_on_white(kind: str, further: int) -> None:
    rgba = scene(channels=4)
    body = encode(Image.fromarray(rgba), kind, **({} if kind == "TIFF" else {"quality": 100}))
    assert furthest(read(body), read(encode(Image.fromarray(rgba), "PNG"))) <= further


def test_transparent_colour_of_a_gif_is_white() -> None:
    indices = Image.fromarray((np.arange(200).reshape(10, 20) % 3).astype(np.uint8), "P")
    indices.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    pixels = read(encode(indices, "GIF", transparency=1))
    assert pixels[0, 1].tolist() == [255, 255, 255]
    assert pixels[0, 2].tolist() == [70, 80, 90]


def test_first_frame_of_an_animation_counts() -> None:
    frames = [Image.fromarray(np.full((10, 12, 3), level, np.uint8)) for level in (200, 10, 90)]
    for kind in ("GIF", "TIFF", "AVIF"):
        body = encode(frames[0], kind, save_all=True, append_images=frames[1:])
        assert furthest(read(body), np.full((10, 12, 3), 200, np.uint8)) <= 2


def test_samples_of_sixteen_bits_keep_their_upper_byte() -> None:
    grey = np.arange(30 * 44, dtype=np.uint16).reshape(30, 44) * 49
    body = encode(Image.fromarray(grey), "TIFF")
    np.testing.assert_array_equal(read(body)[..., 0], grey >> 8)


def test_cmyk_is_taken_as_ink() -> None:
    body = encode(Image.fromarray(scene(channels=4), "CMYK"), "TIFF")
    assert furthest(read(body), pillow(body)) == 0


def test_samples_without_a_white_are_unsupported() -> None:
    body = encode(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF")
    with pytest.raises(UnsupportedMedia, match="32 bits"):
        read(body)


@pytest.mark.parametrize("kind", KINDS)
def test_more_pixels_than_allowed_are_refused_from_the_header(kind: str) -> None:
    body = encoded_image(kind)
    with pytest.raises(TooLarge, match="44x30"):
        decode(body, probe(body), max_pixels=1_000, min_side=10)


def test_a_bomb_of_a_few_bytes_is_refused_from_its_header() -> None:
    gif = b"GIF89a" + struct.pack("<HH", 65_000, 65_000) + b"\0\0\0," + struct.pack("<HHHHB", 0, 0, 65_000, 65_000, 0)
    bmp = b"BM" + struct.pack("<IIIIiiHHIIIIII", 99, 0, 54, 40, 1 << 30, 1 << 20, 1, 24, 0, 0, 0, 0, 0, 0)
    for body in (gif + b"\x08\x01\0\0;", bmp):
        with pytest.raises((TooLarge, BadImage)):
            decode(body, probe(body), max_pixels=50_000_000, min_side=224)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_images_are_refused(kind: str) -> None:
    body = encode(Image.fromarray(scene(120, 180)), kind)
    for share in (0.1, 0.5, 0.8):
        with pytest.raises(RequestError):
            read(body[: int(share * len(body))])


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("mirror", [0, 1])
def test_an_avif_is_turned_by_its_own_boxes(turn: int, mirror: int) -> None:
    body = bytearray(encoded_image("AVIF", exif=oriented(7)))  # has both boxes
    body[body.index(b"irot") + 4], body[body.index(b"imir") + 4] = turn, mirror
    assert furthest(read(bytes(body)), pillow(bytes(body))) == 0


def test_without_the_extra_formats_are_named_and_so_is_the_extra() -> None:
    code = (
        "import sys, pickle; sys.modules['PIL'] = sys.modules['pillow_heif'] = None\n"
        "from hawkvision.core.errors import UnsupportedMedia; from hawkvision.imaging.preprocessing import probe\n"
        "for body in pickle.loads(sys.stdin.buffer.read()):\n"
        "    try: print(probe(body))\n"
        "    except UnsupportedMedia as error: print(error)\n"
    )
    bodies = pickle.dumps([encoded_image(kind) for kind in KINDS])
    done = subprocess.run([sys.executable, "-c", code], input=bodies, capture_output=True, check=True)
    lines = done.stdout.decode().splitlines()
    assert len(lines) == len(KINDS)
    for line, kind in zip(lines, KINDS, strict=True):
        assert "the extra `formats`" in line
        assert NAMES[kind].replace("[CF]", "C") in line or NAMES[kind].replace("[CF]", "F") in line


@pytest.mark.parametrize("height", [64, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_other_formats_leave_the_node_as_what_every_tier_reads(kind: str, height: int) -> None:
    body = encode(Image.fromarray(scene(height, height + 20)), kind)
    header = probe(body)
    square = InputSpec(height=64, width=64, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    sent = Reducer((square,), MAX_PIXELS).reduced(body, header)
    assert probe(sent).format.native
    if height == 64:
        assert furthest(read(sent), read(body)) == 0
