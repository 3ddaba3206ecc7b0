"""Decoding against Pillow as the oracle, over formats, modes and orientations; and scaling."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hawkvision.imaging.image_header import ImageFormat, ImageHeader
from hawkvision.imaging.preprocessing import decode, load_input, load_inputs, preprocess, probe
from hawkvision.models.manifest import InputSpec
from tests.fuzz.examples import examples
from tests.hawkvision.imaging.images import (
    BODIES,
    LARGE,
    MAX_PIXELS,
    chunk,
    encode,
    encoded_image,
    furthest,
    oriented,
    pillow,
    png_header,
    read,
    scene,
)

DATA = Path(__file__).resolve().parents[4] / "shared/data/imagenet_eval.npz"


# What is read


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_of_every_format_comes_out_upright(kind: str, orientation: int) -> None:
    body = encoded_image(kind, exif=oriented(orientation))
    header = probe(body)
    assert (header.width, header.height, header.orientation) == (44, 30, orientation)
    assert furthest(read(body), pillow(body)) <= (1 if kind == "WEBP" else 0)


@pytest.mark.parametrize(
    "options",
    [{"quality": 95, "subsampling": s} for s in (0, 1, 2)]
    + [{"progressive": True}, {"restart_marker_blocks": 1}, {"quality": 5}, {"optimize": True}],
)
def test_jpeg_variants_equal_pillow(options: dict[str, Any]) -> None:
    body = encoded_image("JPEG", **options)
    assert probe(body).progressive == options.get("progressive", False)
    assert furthest(read(body), pillow(body)) == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_grey_is_repeated(kind: str) -> None:
    body = encode(Image.fromarray(scene()).convert("L"), kind)
    assert probe(body).components == 1
    assert furthest(read(body), pillow(body)) == 0


def test_cmyk_jpeg_equals_pillow() -> None:
    body = encode(Image.fromarray(scene(channels=4), "CMYK"), "JPEG", quality=95)
    assert probe(body).components == 4
    assert furthest(read(body), pillow(body)) <= 1


def test_ycck_jpeg_is_converted() -> None:
    body = encode(Image.fromarray(scene(channels=4), "CMYK"), "JPEG", quality=95, subsampling=0)
    at = body.index(b"Adobe")
    ycck = body[: at + 11] + b"\x02" + body[at + 12 :]  # the transform byte: 0 CMYK, 2 YCCK
    assert furthest(read(ycck), pillow(ycck)) <= 2
    assert furthest(read(ycck), read(body)) > 50


@pytest.mark.parametrize("mode", ["P", "1"])
def test_palette_and_bilevel_png_equal_pillow(mode: str) -> None:
    body = encode(Image.fromarray(scene()).convert(mode), "PNG")
    assert furthest(read(body), pillow(body)) == 0


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("WEBP", "RGBA")])
def test_alpha_is_laid_on_white(kind: str, mode: str) -> None:
    image = Image.fromarray(scene(channels=4)).convert(mode)
    body = encode(image, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    rgba = image.convert("RGBA")
    wanted = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    assert probe(body).alpha
    assert furthest(read(body), np.asarray(wanted)) <= 1


def test_transparent_palette_entry_becomes_white() -> None:
    image = Image.fromarray(scene()).quantize(8)
    body = encode(image, "PNG", transparency=3)
    assert (read(body)[np.asarray(image) == 3] == 255).all()


@pytest.mark.parametrize("colour", [0, 2, 6])
def test_sixteen_bit_png_keeps_the_upper_byte(colour: int) -> None:
    channels = {0: 1, 2: 3, 6: 4}[colour]
    values = ((scene(channels=channels).astype(np.uint16) << 8) + 77).astype(">u2")
    if colour == 6:
        values[..., 3] = 0xFFFF
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    body = png_header(44, 30, 16, colour) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    wanted = np.repeat(values >> 8, 3, -1) if colour == 0 else (values >> 8)[..., :3]
    assert furthest(read(body), wanted.astype(np.uint8)) == 0


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_first_frame_of_an_animation_counts(kind: str) -> None:
    first = Image.fromarray(scene())
    body = encode(
        first, kind, save_all=True, append_images=[first.rotate(180)], **({"lossless": True} if kind == "WEBP" else {})
    )
    assert probe(body).animated
    assert furthest(read(body), scene()) <= 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_one_pixel_is_an_image(kind: str) -> None:
    assert read(encode(Image.new("RGB", (1, 1), "red"), kind)).shape == (1, 1, 3)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_is_read(wrap: type) -> None:
    body = encoded_image("JPEG")
    assert furthest(decode(wrap(body), probe(wrap(body)), max_pixels=MAX_PIXELS, min_side=LARGE), read(body)) == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_trailing_garbage_is_ignored(kind: str) -> None:
    body = encoded_image(kind)
    assert furthest(read(body + b"\xff\xd8garbage" * 9), read(body)) == 0


@pytest.mark.parametrize("junk", [b"", b"II", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff", b"\0" * 40])
def test_broken_exif_does_not_spoil_a_good_image(junk: bytes) -> None:
    plain = encoded_image("JPEG")
    body = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(junk) + 8) + b"Exif\0\0" + junk + plain[2:]
    assert probe(body).orientation == 1
    assert furthest(read(body), read(plain)) == 0


def test_padding_before_the_end_marker_is_forgiven() -> None:
    body = encoded_image("JPEG")
    padded = body[:-2] + b"\x55" * 7 + body[-2:]
    assert furthest(read(padded), read(body)) == 0


# Scaling


def spec(height: int = 16, width: int = 16, **options: Any) -> InputSpec:
    return InputSpec(height=height, width=width, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), **options)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(8, 40),
    st.integers(8, 40),
    st.floats(0.05, 1.0),
    st.sampled_from(["bilinear", "bicubic", "area"]),
)
def test_preprocess_always_gives_the_input_shape(
    height: int, width: int, out_height: int, out_width: int, fraction: float, method: str
) -> None:
    found = preprocess(scene(height, width), spec(out_height, out_width, crop_fraction=fraction, interpolation=method))
    assert found.shape == (out_height, out_width, 3)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous


@pytest.mark.skipif("AVX2" not in cv2.ipp.getIppVersion(), reason="Intel's library is not here, or has another CPU")
@pytest.mark.parametrize(
    ("method", "side", "digest"),
    [
        ("bicubic", 224, "ff1363632aeee8fa"),
        ("bicubic", 160, "9e4b8dae45efed08"),
        ("bilinear", 224, "c13ad04eb0176cc0"),
        ("area", 100, "f15e1673d3f39d58"),
    ],
)
def test_every_cpu_with_avx2_scales_to_the_same_pixels(method: str, side: int, digest: str) -> None:
    """Written down on a CPU with AVX2; by SSE 4.2 alone, the first would be 0b90c930232f8177."""
    pixels = np.random.default_rng(5).integers(0, 256, (256, 300, 3), dtype=np.uint8)
    scaled = preprocess(pixels, spec(side, side, interpolation=method))
    assert hashlib.sha256(scaled.tobytes()).hexdigest()[:16] == digest


def test_crop_is_the_centred_square() -> None:
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 255
    assert (preprocess(pixels, spec()) == 255).all()


def test_crop_of_a_wide_input_keeps_its_aspect() -> None:
    pixels = np.zeros((60, 60, 3), np.uint8)
    pixels[15:45] = 255
    assert (preprocess(pixels, spec(height=16, width=32)) == 255).all()


def test_crop_fraction_looks_only_at_the_intermediate() -> None:
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[10:30, 10:30] = 255
    assert (preprocess(pixels, spec(crop_fraction=0.5)) == 255).all()


def test_strong_shrinking_averages_instead_of_aliasing() -> None:
    stripes = np.zeros((160, 160, 3), np.uint8)
    stripes[:, ::2] = 255
    found = preprocess(stripes, spec())
    assert furthest(found, np.full_like(found, 128)) <= 1


@pytest.mark.parametrize(("min_side", "side"), [(401, 800), (400, 400), (201, 400), (200, 200), (100, 100), (20, 100)])
def test_jpeg_is_decoded_at_the_smallest_scale_that_is_large_enough(min_side: int, side: int) -> None:
    body = encode(Image.fromarray(scene(800, 900)), "JPEG")
    pixels = decode(body, probe(body), max_pixels=MAX_PIXELS, min_side=min_side)
    assert min(pixels.shape[:2]) == side


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(8, 300), st.integers(8, 300), st.integers(1, 120), st.integers(1, 8))
def test_reduced_scale_never_falls_below_what_is_needed(height: int, width: int, min_side: int, turn: int) -> None:
    body = encode(Image.new("RGB", (width, height)), "JPEG", exif=oriented(turn))
    pixels = decode(body, probe(body), max_pixels=MAX_PIXELS, min_side=min_side)
    assert min(pixels.shape[:2]) >= min(min_side, height, width)


def test_load_input_of_a_large_jpeg_is_close_to_the_long_way() -> None:
    body = encode(Image.fromarray(scene()).resize((800, 1200)), "JPEG", quality=95, exif=oriented(6))
    found, header = load_input(body, spec(64, 64), max_pixels=MAX_PIXELS)
    assert header == ImageHeader(ImageFormat.JPEG, 800, 1200, 6, 3)
    assert np.abs(found.astype(int) - preprocess(read(body), spec(64, 64))).mean() < 1.0


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(16, 700), st.lists(st.integers(8, 96), min_size=1, max_size=4), st.sampled_from(["JPEG", "PNG"]))
def test_several_models_take_an_image_in_as_each_would_alone(side: int, sides: list[int], kind: str) -> None:
    body = encode(Image.fromarray(scene()).resize((side, side + 9)), kind)
    specs = [spec(side, side) for side in sides]
    for found, wanted in zip(load_inputs(body, specs, max_pixels=MAX_PIXELS), specs, strict=True):
        assert found.tobytes() == load_input(body, wanted, max_pixels=MAX_PIXELS)[0].tobytes()


def test_threads_decode_alike() -> None:
    wanted = [read(body) for body in BODIES]
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(read, BODIES * 8), wanted * 8, strict=True):
            assert furthest(found, expected) == 0


def photographs(n: int) -> Iterator[bytes]:
    if not DATA.is_file():
        pytest.skip(f"{DATA} is absent: real photographs are not shipped with the project")
    with np.load(DATA) as archive:
        data, offsets = archive["data"], archive["offsets"]
    for i in range(0, len(offsets) - 1, (len(offsets) - 1) // n):
        yield data[offsets[i] : offsets[i + 1]].tobytes()


def test_real_photographs_equal_pillow() -> None:
    assert max(furthest(read(body), pillow(body)) for body in photographs(60)) == 0
