"""Decoding against Pillow as the oracle, over formats, modes, orientations and kinds of damage."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from hawkvision.errors import BadImage, RequestError, TooLarge, UnsupportedMedia
from hawkvision.manifest import InputSpec
from hawkvision.types import Pixels
from hawkvision.vision.header import MAX_SEGMENTS
from hawkvision.vision.image import (
    MAX_SCANS,
    STRIP_PIXELS,
    ImageFormat,
    ImageHeader,
    decode,
    load_input,
    preprocess,
    probe,
)

DATA = Path(__file__).resolve().parents[4] / "shared/data/imagenet_eval.npz"
MAX_PIXELS = 1_000_000
LARGE = 100_000
"""A `min_side` that no test picture reaches, so that nothing is decoded at a reduced scale."""


def scene(height: int = 30, width: int = 44, channels: int = 3) -> Pixels:
    """Smooth colours without any symmetry, so that a turned or mirrored picture is seen to be."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [128 + 100 * np.sin(x / (5 + c) + c) * np.cos(y / (7 + 2 * c)) + x / 3 for c in range(channels)]
    pixels: Pixels = np.clip(np.stack(waves, -1), 0, 255).astype(np.uint8)
    return pixels


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def picture(kind: str, **options: Any) -> bytes:
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


# What is read


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_of_every_format_comes_out_upright(kind: str, orientation: int) -> None:
    body = picture(kind, exif=oriented(orientation))
    header = probe(body)
    assert (header.width, header.height, header.orientation) == (44, 30, orientation)
    assert furthest(read(body), pillow(body)) <= (1 if kind == "WEBP" else 0)


@pytest.mark.parametrize(
    "options",
    [{"quality": 95, "subsampling": s} for s in (0, 1, 2)]
    + [{"progressive": True}, {"restart_marker_blocks": 1}, {"quality": 5}, {"optimize": True}],
)
def test_jpeg_variants_equal_pillow(options: dict[str, Any]) -> None:
    body = picture("JPEG", **options)
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


@pytest.mark.parametrize("lossless", [True, False])
def test_webp_equals_pillow(lossless: bool) -> None:
    body = picture("WEBP", lossless=lossless)
    assert furthest(read(body), pillow(body)) <= 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_one_pixel_is_a_picture(kind: str) -> None:
    assert read(encode(Image.new("RGB", (1, 1), "red"), kind)).shape == (1, 1, 3)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_is_read(wrap: type) -> None:
    body = picture("JPEG")
    assert furthest(decode(wrap(body), probe(wrap(body)), max_pixels=MAX_PIXELS, min_side=LARGE), read(body)) == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_trailing_garbage_is_ignored(kind: str) -> None:
    body = picture(kind)
    assert furthest(read(body + b"\xff\xd8garbage" * 9), read(body)) == 0


@pytest.mark.parametrize("junk", [b"", b"II", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff", b"\0" * 40])
def test_broken_exif_does_not_spoil_a_good_picture(junk: bytes) -> None:
    plain = picture("JPEG")
    body = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(junk) + 8) + b"Exif\0\0" + junk + plain[2:]
    assert probe(body).orientation == 1
    assert furthest(read(body), read(plain)) == 0


def test_padding_before_the_end_marker_is_forgiven() -> None:
    body = picture("JPEG")
    padded = body[:-2] + b"\x55" * 7 + body[-2:]
    assert furthest(read(padded), read(body)) == 0


# What is refused


def test_empty_body_is_a_bad_image() -> None:
    with pytest.raises(BadImage, match="empty"):
        probe(b"")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b"GIF89a" + bytes(20), "GIF"),
        (b"BM" + bytes(50), "BMP"),
        (b"II*\0" + bytes(20), "TIFF"),
        (b"\0\0\0\x18ftypheic" + bytes(20), "HEIC"),
        (b"\0\0\0\x18ftypavif" + bytes(20), "AVIF"),
        (b"%PDF-1.7", "PDF"),
        (b"<svg xmlns=''/>", "SVG"),
        (b'{"image": 1}', "JSON"),
        (b"hello, world", "text"),
        (b"RIFF\0\0\0\0WAVEfmt ", "RIFF"),
        (b"\x01\x02\x03\x04", "01 02 03 04"),
    ],
)
def test_other_formats_are_named(body: bytes, name: str) -> None:
    with pytest.raises(UnsupportedMedia, match=rf"{name}.*JPEG, PNG and WebP"):
        probe(body)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_every_truncation_is_refused(kind: str) -> None:
    body = picture(kind)
    lengths = sorted(
        {*range(1, min(len(body), 700)), *range(700, len(body) - 1, 13), *range(len(body) - 40, len(body))}
    )
    accepted = []
    for length in lengths:
        try:
            read(body[:length])
            accepted.append(length)
        except BadImage:
            pass
    assert accepted == []


def test_truncated_progressive_jpeg_is_refused() -> None:
    body = picture("JPEG", progressive=True)
    with pytest.raises(BadImage, match="JPEG"):
        read(body[: len(body) * 3 // 4])


def test_truncated_jpeg_is_refused_at_reduced_scale_too() -> None:
    body = encode(Image.fromarray(scene(400, 600)), "JPEG")
    with pytest.raises(BadImage, match="Premature end"):
        decode(body[:-200], probe(body), max_pixels=MAX_PIXELS, min_side=50)


@pytest.mark.parametrize("table", [b"\xff\xdb", b"\xff\xda"])
def test_jpeg_without_a_table_or_scan_is_refused(table: bytes) -> None:
    body = picture("JPEG")
    while (at := body.find(table)) > 0:
        body = body[:at] + body[at + 2 + int.from_bytes(body[at + 2 : at + 4], "big") :]
    with pytest.raises(BadImage):
        read(body)


def test_jpeg_without_huffman_tables_has_the_standard_ones_as_webcams_send_it() -> None:
    body = whole = picture("JPEG")
    while (at := body.find(b"\xff\xc4")) > 0:
        body = body[:at] + body[at + 2 + int.from_bytes(body[at + 2 : at + 4], "big") :]
    assert furthest(read(body), read(whole)) == 0


@pytest.mark.parametrize("size", [(0, 30), (44, 0), (0, 0)])
def test_zero_size_is_refused(size: tuple[int, int]) -> None:
    for body in (jpeg_with_size(picture("JPEG"), *size), png_header(*size)):
        with pytest.raises(BadImage, match=f"{size[0]}x{size[1]}"):
            probe(body)


@pytest.mark.parametrize("size", [(44, 300), (440, 30), (45, 64)])
def test_larger_size_than_the_data_hold_is_refused(size: tuple[int, int]) -> None:
    rows = b"".join(b"\0" + row.tobytes() for row in scene())
    png = png_header(*size) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    for body in (jpeg_with_size(picture("JPEG"), *size), png):
        with pytest.raises(BadImage):
            read(body)


def test_webp_canvas_unlike_its_picture_is_refused() -> None:
    body = bytearray(picture("WEBP", exif=oriented(1)))
    assert body[12:16] == b"VP8X"
    body[24:27] = (99).to_bytes(3, "little")
    with pytest.raises(BadImage):
        read(bytes(body))


def test_wrong_checksum_is_refused() -> None:
    body = bytearray(picture("PNG"))
    body[body.index(b"IDAT") + 30] ^= 1
    with pytest.raises(BadImage, match="checksum of chunk b'IDAT'"):
        read(bytes(body))


def test_corrupt_compression_under_a_right_checksum_is_refused() -> None:
    body = png_header(44, 30) + chunk(b"IDAT", b"\x78\x9c" + b"\xff" * 60) + chunk(b"IEND", b"")
    with pytest.raises(BadImage):
        read(body)


@pytest.mark.parametrize(("marker", "precision"), [(0xC3, 8), (0xC5, 8), (0xC0, 12)])
def test_jpeg_kinds_nobody_uses_are_unsupported(marker: int, precision: int) -> None:
    body = bytearray(picture("JPEG"))
    at = body.index(b"\xff\xc0")
    body[at + 1], body[at + 4] = marker, precision
    with pytest.raises(UnsupportedMedia):
        probe(bytes(body))


def test_endless_metadata_is_given_up() -> None:
    body = b"\xff\xd8" + b"\xff\xe0\0\x02" * (MAX_SEGMENTS + 1) + picture("JPEG")[2:]
    with pytest.raises(BadImage, match=str(MAX_SEGMENTS)):
        probe(body)


def test_baseline_jpeg_in_one_scan_may_hold_what_looks_like_scans() -> None:
    body = picture("JPEG")
    comment = b"\xff\xda" * (MAX_SCANS + 1)
    commented = body[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + body[2:]
    assert not probe(commented).multiscan
    assert furthest(read(commented), read(body)) == 0


def test_jpeg_of_countless_scans_is_refused_before_decoding() -> None:
    body = picture("JPEG", progressive=True)
    with pytest.raises(TooLarge, match="scans"):
        read(body[:-2] + b"\xff\xda\0\x08\x01\x01\0\x01\x3f\0" * (MAX_SCANS + 1) + body[-2:])


@pytest.mark.parametrize("kind", [ImageFormat.JPEG, ImageFormat.PNG])
def test_pixel_bomb_is_refused_without_allocating(kind: ImageFormat) -> None:
    jpeg = jpeg_with_size(picture("JPEG"), 65_000, 65_000)
    body = jpeg if kind is ImageFormat.JPEG else png_header(60_000, 60_000)
    tracemalloc.start()
    with pytest.raises(TooLarge, match=r"at most 50000000"):
        decode(body, probe(body), max_pixels=50_000_000, min_side=224)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_sixteen_bit_alpha_may_have_half_the_pixels_of_other_kinds() -> None:
    for depth, colour, height in ((8, 2, 50), (16, 2, 50), (8, 6, 50), (16, 6, 25), (16, 4, 25)):
        largest, larger = (png_header(1_000_000, rows, depth, colour) for rows in (height, height + 1))
        with pytest.raises(BadImage):  # taken up; the data are missing
            decode(largest, probe(largest), max_pixels=50_000_000, min_side=224)
        with pytest.raises(TooLarge, match="1000000x"):
            decode(larger, probe(larger), max_pixels=50_000_000, min_side=224)


@pytest.mark.parametrize("depth", [8, 16])
def test_alpha_costs_no_memory_beyond_the_decoded_raster(depth: int) -> None:
    bytes_per_pixel = depth // 2
    rows = (b"\0" + bytes(500 * bytes_per_pixel)) * 1_000
    body = png_header(500, 1_000, depth, 6) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    tracemalloc.start()
    assert (read(body) == 255).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (bytes_per_pixel + 3 + 2) * 500_000  # the comparison takes three, strips take two


def test_every_colour_under_every_alpha_is_rounded_exactly() -> None:
    colour, alpha = (a.astype(np.int64) for a in np.mgrid[0:256, 0:256])
    rgba = np.stack([colour, 255 - colour, colour // 2, alpha], -1).astype(np.uint8)
    over_white = (rgba[..., :3] * alpha[..., None] + 255 * (255 - alpha[..., None]) + 127) // 255
    np.testing.assert_array_equal(read(encode(Image.fromarray(rgba), "PNG")), over_white)


def test_strips_join_without_a_seam() -> None:
    rgba = np.random.default_rng(5).integers(0, 256, (700, 301, 4), np.uint8)
    alpha = rgba[..., 3:].astype(np.int64)
    assert rgba.size // 4 > 3 * STRIP_PIXELS
    over_white = (rgba[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255
    np.testing.assert_array_equal(read(encode(Image.fromarray(rgba), "PNG")), over_white)


def test_nothing_is_printed_about_broken_pictures() -> None:
    jpeg, png, webp = picture("JPEG"), picture("PNG"), picture("WEBP")
    broken = [body[: len(body) // k] for body in (jpeg, png, webp) for k in (2, 3, 20)] + [jpeg[:-5], png[:40]]
    code = (
        "import sys, pickle; from hawkvision.errors import RequestError;"
        "from hawkvision.vision.image import decode, probe\n"
        "for body in pickle.loads(sys.stdin.buffer.read()):\n"
        "    try: decode(body, probe(body), max_pixels=10**6, min_side=10**5)\n"
        "    except RequestError: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(broken), capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


# Whatever comes in


BODIES = [
    picture("JPEG"),
    picture("JPEG", progressive=True),
    picture("PNG"),
    picture("WEBP"),
    picture("WEBP", exif=oriented(6), lossless=True),
    picture("PNG", exif=oriented(5)),
    encode(Image.fromarray(scene(channels=4)), "PNG"),
    encode(Image.fromarray(scene(channels=4), "CMYK"), "JPEG"),
]


def check_any(body: bytes) -> None:
    """Either a request error or a valid picture; and the next picture is none the worse."""
    try:
        pixels = read(body)
    except RequestError:
        return
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    assert pixels.size <= 3 * MAX_PIXELS


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(BODIES),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=6),
    st.floats(0, 1),
    st.binary(max_size=8),
)
def test_damaged_pictures_never_do_worse_than_an_error(
    body: bytes, flips: list[tuple[float, int]], keep: float, insert: bytes
) -> None:
    damaged = bytearray(body)
    for where, mask in flips:
        damaged[int(where * where * len(damaged))] ^= mask  # squared: headers are hit more often
    at = int(keep * len(damaged))
    check_any(bytes(damaged[:at] + insert + damaged[at:]))
    assert furthest(read(BODIES[0]), pillow(BODIES[0])) == 0


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x40\0\0\0WEBPVP8 "]), st.binary(max_size=200)
)
def test_random_bytes_are_refused(prefix: bytes, tail: bytes) -> None:
    check_any(prefix + tail)


# Scaling


def spec(height: int = 16, width: int = 16, **options: Any) -> InputSpec:
    return InputSpec(height=height, width=width, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), **options)


@settings(max_examples=80, deadline=None)
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


def test_crop_is_the_centred_square() -> None:
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 255
    assert (preprocess(pixels, spec()) == 255).all()


def test_crop_of_a_wide_input_keeps_its_aspect() -> None:
    pixels = np.zeros((60, 60, 3), np.uint8)
    pixels[15:45] = 255
    assert (preprocess(pixels, spec(height=16, width=32)) == 255).all()


def test_crop_fraction_looks_only_at_the_middle() -> None:
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[10:30, 10:30] = 255
    assert (preprocess(pixels, spec(crop_fraction=0.5)) == 255).all()


def test_strong_shrinking_averages_instead_of_aliasing() -> None:
    stripes = np.zeros((160, 160, 3), np.uint8)
    stripes[:, ::2] = 255
    found = preprocess(stripes, spec())
    assert furthest(found, np.full_like(found, 128)) <= 1


def test_picture_of_the_right_size_is_not_changed() -> None:
    assert furthest(preprocess(scene(16, 16), spec()), scene(16, 16)) == 0


@pytest.mark.parametrize(("min_side", "side"), [(401, 800), (400, 400), (201, 400), (200, 200), (100, 100), (20, 100)])
def test_jpeg_is_decoded_at_the_smallest_scale_that_is_large_enough(min_side: int, side: int) -> None:
    body = encode(Image.fromarray(scene(800, 900)), "JPEG")
    pixels = decode(body, probe(body), max_pixels=MAX_PIXELS, min_side=min_side)
    assert min(pixels.shape[:2]) == side


@settings(max_examples=30, deadline=None)
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
