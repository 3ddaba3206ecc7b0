"""What is no image, damaged or a bomb is refused: in time, in little memory, quietly, and with the right error."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hawkvision.core.errors import BadImage, RequestError, TooLarge, UnsupportedMedia
from hawkvision.imaging.image_header import MAX_SEGMENTS, ImageFormat
from hawkvision.imaging.jpeg import MAX_STRAY_BYTES
from hawkvision.imaging.other_headers import MAX_BLOCKS, MAX_BOXES, MAX_ITEMS, MAX_RUNS_BYTES, MAX_TAGS, reduced
from hawkvision.imaging.png_repair import MAX_PNG_CHUNKS
from hawkvision.imaging.preprocessing import MAX_SCANS, STRIP_PIXELS, decode, probe
from tests.fuzz.examples import examples
from tests.hawkvision.imaging.images import (
    BODIES,
    MAX_PIXELS,
    chunk,
    encode,
    encoded_image,
    furthest,
    jpeg_with_size,
    oriented,
    pillow,
    png_header,
    read,
    scene,
)
from tests.odd_images import odd_jpegs, odd_pngs


def test_empty_body_is_a_bad_image() -> None:
    with pytest.raises(BadImage, match="empty"):
        probe(b"")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b"\0\0\0\x18ftypisom" + bytes(20), "MP4"),
        (b"8BPS" + bytes(30), "Photoshop"),
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
def test_every_truncation_is_refused_unless_all_of_the_image_is_there(kind: str) -> None:
    body = encoded_image(kind)
    whole = read(body)
    lengths = sorted(
        {*range(1, min(len(body), 700)), *range(700, len(body) - 1, 13), *range(len(body) - 40, len(body))}
    )
    accepted = []
    for length in lengths:
        try:
            np.testing.assert_array_equal(read(body[:length]), whole)
            accepted.append(length)
        except BadImage:
            pass
    allowed = {"JPEG": 2, "PNG": 22, "WEBP": 1}[kind]  # end marker; end chunk and checksums before it; fill byte
    assert all(length >= len(body) - allowed for length in accepted)


def test_truncated_progressive_jpeg_is_refused() -> None:
    body = encoded_image("JPEG", progressive=True)
    with pytest.raises(BadImage, match="JPEG"):
        read(body[: len(body) * 3 // 4])


def test_truncated_jpeg_is_refused_at_reduced_scale_too() -> None:
    body = encode(Image.fromarray(scene(400, 600)), "JPEG")
    with pytest.raises(BadImage, match=r"cut off: \d+ of 400 rows"):
        decode(body[:-200], probe(body), max_pixels=MAX_PIXELS, min_side=50)


@pytest.mark.parametrize("table", [b"\xff\xdb", b"\xff\xda"])
def test_jpeg_without_a_table_or_scan_is_refused(table: bytes) -> None:
    body = encoded_image("JPEG")
    while (at := body.find(table)) > 0:
        body = body[:at] + body[at + 2 + int.from_bytes(body[at + 2 : at + 4], "big") :]
    with pytest.raises(BadImage):
        read(body)


def test_jpeg_without_huffman_tables_has_the_standard_ones_as_webcams_send_it() -> None:
    body = whole = encoded_image("JPEG")
    while (at := body.find(b"\xff\xc4")) > 0:
        body = body[:at] + body[at + 2 + int.from_bytes(body[at + 2 : at + 4], "big") :]
    assert furthest(read(body), read(whole)) == 0


@pytest.mark.parametrize("size", [(0, 30), (44, 0), (0, 0)])
def test_zero_size_is_refused(size: tuple[int, int]) -> None:
    for body in (jpeg_with_size(encoded_image("JPEG"), *size), png_header(*size)):
        with pytest.raises(BadImage, match=f"{size[0]}x{size[1]}"):
            probe(body)


@pytest.mark.parametrize("size", [(44, 300), (440, 30), (45, 64)])
def test_larger_size_than_the_data_hold_is_refused(size: tuple[int, int]) -> None:
    rows = b"".join(b"\0" + row.tobytes() for row in scene())
    png = png_header(*size) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    for body in (jpeg_with_size(encoded_image("JPEG"), *size), png):
        with pytest.raises(BadImage):
            read(body)


def test_webp_canvas_unlike_its_image_is_refused() -> None:
    body = bytearray(encoded_image("WEBP", exif=oriented(1)))
    assert body[12:16] == b"VP8X"
    body[24:27] = (99).to_bytes(3, "little")
    with pytest.raises(BadImage):
        read(bytes(body))


def test_wrong_checksum_is_refused() -> None:
    body = bytearray(encoded_image("PNG"))
    body[body.index(b"IDAT") + 30] ^= 1
    with pytest.raises(BadImage, match="checksum of chunk b'IDAT'"):
        read(bytes(body))


def test_corrupt_compression_under_a_right_checksum_is_refused() -> None:
    body = png_header(44, 30) + chunk(b"IDAT", b"\x78\x9c" + b"\xff" * 60) + chunk(b"IEND", b"")
    with pytest.raises(BadImage):
        read(body)


@pytest.mark.parametrize(("marker", "precision"), [(0xC3, 8), (0xC5, 8), (0xC0, 12)])
def test_jpeg_kinds_nobody_uses_are_unsupported(marker: int, precision: int) -> None:
    body = bytearray(encoded_image("JPEG"))
    at = body.index(b"\xff\xc0")
    body[at + 1], body[at + 4] = marker, precision
    with pytest.raises(UnsupportedMedia):
        probe(bytes(body))


def big_tiff(*tags: tuple[int, int, int, int]) -> bytes:
    """16x16 grey pixels, with these tags (tag, type, number of values, value) beside those that say so."""
    usual = ((256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 16),
             (277, 3, 1, 1), (278, 4, 1, 16), (279, 4, 1, 256))  # fmt: skip
    entries = b"".join(struct.pack("<HHQQ", *tag) for tag in (*usual, *tags))
    head = b"II+\0" + struct.pack("<HHQ", 8, 0, 16 + 256)
    return head + b"\x55" * 256 + struct.pack("<Q", len(usual) + len(tags)) + entries + bytes(8)


def gif_with(blocks: bytes) -> bytes:
    """A GIF with these blocks before its image."""
    body = encode(Image.fromarray(scene()), "GIF")
    palette_end = 13 + (3 << (body[10] & 7) + 1)
    return body[:palette_end] + blocks + body[palette_end:]


def items(kind: str, box: bytes, at: int, form: str, value: int) -> bytes:
    """An image of boxes, one number in one of which is replaced."""
    body = bytearray(encoded_image(kind))
    struct.pack_into(form, body, body.index(box) + 4 + at, value)
    return bytes(body)


UNBOUNDED = {
    "JPEG, segments": (b"\xff\xd8" + b"\xff\xe0\0\x02" * (MAX_SEGMENTS + 1), f"more than {MAX_SEGMENTS} segments"),
    "JPEG, fill bytes": (b"\xff\xd8" + b"\xff" * (MAX_STRAY_BYTES + 9) + encoded_image("JPEG"), "between segments"),
    "PNG, chunks": (
        png_header(9, 9) + chunk(b"tEXt", b"a\0b") * MAX_PNG_CHUNKS + chunk(b"IDAT", b""),
        f"more than {MAX_PNG_CHUNKS} chunks",
    ),
    "GIF, comments": (gif_with(b"!\xfe" + b"\1a" * MAX_BLOCKS + b"\0"), f"first {MAX_BLOCKS} blocks"),
    "GIF, stray bytes": (gif_with(b"\1" * MAX_BLOCKS), f"first {MAX_BLOCKS} blocks"),
    "BMP, runs": (
        b"BM" + struct.pack("<IIIIiiHHI", 0, 0, 54, 40, 99, 99, 1, 8, 1) + bytes(MAX_RUNS_BYTES),
        f"at most {MAX_RUNS_BYTES}",
    ),
    "TIFF, tags": (big_tiff(*[(40_000, 1, 1, 0)] * MAX_TAGS), f"at most {MAX_TAGS}"),
    "TIFF, strips": (big_tiff((273, 4, 1 << 20, 16)), "tag 273 has 1048576 values"),
    "TIFF, a value beyond the file": (big_tiff((347, 1, 60_000, 16)), "tag 347 has 60000 values"),
    "TIFF, a tile beyond the image": (big_tiff((322, 4, 1, 1 << 15)), "tiles of 32768 pixels a side"),
    **{
        f"{kind}, {what}": (body, match)
        for kind, length_at in (("HEIF", 22), ("AVIF", 18))
        for what, body, match in (
            ("boxes", encoded_image(kind) + b"\0\0\0\x08free" * MAX_BOXES, f"more than {MAX_BOXES} boxes"),
            ("an endless box", encoded_image(kind) + b"\0\0\0\x07free", "has 7 bytes"),
            ("items", items(kind, b"iinf", 4, ">H", MAX_ITEMS + 1), f"at most {MAX_ITEMS}"),
            ("copies", items(kind, b"iloc", length_at, ">I", 1 << 30), "in a file of"),
        )
    },
}
"""What makes a library work for ever, just above a bound of ours, and what the error says."""


@pytest.mark.parametrize("what", UNBOUNDED)
def test_a_file_above_a_bound_is_refused_before_a_library_reads_it(what: str) -> None:
    body, match = UNBOUNDED[what]
    with pytest.raises((BadImage, TooLarge), match=match):
        read(body)


def test_a_library_sees_of_a_tiff_only_what_decoding_needs() -> None:
    odd = big_tiff(*((40_000 + each, 7, 100, 16) for each in range(1_000)), (34_665, 4, 1, 16), (330, 4, 1, 16))
    np.testing.assert_array_equal(read(odd), read(big_tiff()))
    assert reduced(odd, ImageFormat.TIFF)[len(odd) :] == big_tiff()[16 + 256 :]


def test_a_library_sees_no_metadata_of_a_gif() -> None:
    plain = gif_with(b"")
    comments = gif_with(b"!\xfe\3abc\2de\0" * 9)
    assert reduced(comments, ImageFormat.GIF) == reduced(plain, ImageFormat.GIF)
    np.testing.assert_array_equal(read(comments), read(plain))


def test_headers_are_read_without_a_library() -> None:
    code = (
        "import pickle, sys; sys.modules['PIL'] = sys.modules['pillow_heif'] = sys.modules['cv2'] = None\n"
        "from hawkvision.imaging.other_headers import ImageFormat, probe\n"
        "for kind, body in pickle.loads(sys.stdin.buffer.read()).items():\n"
        "    print(probe(body, ImageFormat(kind)).pixels)\n"
    )
    bodies = {kind.lower(): encoded_image(kind) for kind in ("GIF", "BMP", "TIFF", "AVIF", "HEIF")}
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(bodies), capture_output=True, check=True)
    assert done.stdout.split() == [b"1320"] * len(bodies)


def test_baseline_jpeg_in_one_scan_may_hold_what_looks_like_scans() -> None:
    body = encoded_image("JPEG")
    comment = b"\xff\xda" * (MAX_SCANS + 1)
    commented = body[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + body[2:]
    assert not probe(commented).multiscan
    assert furthest(read(commented), read(body)) == 0


def test_jpeg_of_countless_scans_is_refused_before_decoding() -> None:
    body = encoded_image("JPEG", progressive=True)
    with pytest.raises(TooLarge, match="scans"):
        read(body[:-2] + b"\xff\xda\0\x08\x01\x01\0\x01\x3f\0" * (MAX_SCANS + 1) + body[-2:])


@pytest.mark.parametrize("kind", [ImageFormat.JPEG, ImageFormat.PNG])
def test_pixel_bomb_is_refused_without_allocating(kind: ImageFormat) -> None:
    jpeg = jpeg_with_size(encoded_image("JPEG"), 65_000, 65_000)
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


def test_nothing_is_printed_about_broken_and_odd_images() -> None:
    jpeg, png, webp = encoded_image("JPEG"), encoded_image("PNG"), encoded_image("WEBP")
    broken = [body[: len(body) // k] for body in (jpeg, png, webp) for k in (2, 3, 20)] + [jpeg[:-5], png[:40]]
    corrupt = ("raster's checksum", "bytes behind the raster")  # libpng itself writes a line about these
    broken += [body for kind, body in ODD.items() if not kind.startswith(corrupt)]
    code = (
        "import sys, pickle; from hawkvision.core.errors import RequestError;"
        "from hawkvision.imaging.preprocessing import decode, probe\n"
        "for body in pickle.loads(sys.stdin.buffer.read()):\n"
        "    try: decode(body, probe(body), max_pixels=10**6, min_side=10**5)\n"
        "    except RequestError: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(broken), capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


# Whatever comes in


def check_any(body: bytes) -> None:
    """Either a request error or a valid image; and the next image is none the worse."""
    try:
        pixels = read(body)
    except RequestError:
        return
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    assert pixels.size <= 3 * MAX_PIXELS


ODD = {kind: this.body for kind, this in {**odd_jpegs(scene(24, 40)), **odd_pngs(scene(24, 40))}.items()}
ANY = (*BODIES, *ODD.values(), *(encoded_image(kind) for kind in ("GIF", "BMP", "TIFF", "AVIF", "HEIF")))


@settings(max_examples=examples(600), deadline=None)
@given(
    st.sampled_from(ANY),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=6),
    st.floats(0, 1),
    st.binary(max_size=8),
)
def test_damaged_images_never_do_worse_than_an_error(
    body: bytes, flips: list[tuple[float, int]], keep: float, insert: bytes
) -> None:
    damaged = bytearray(body)
    for where, mask in flips:
        damaged[int(where * where * len(damaged))] ^= mask  # squared: headers are hit more often
    at = int(keep * len(damaged))
    check_any(bytes(damaged[:at] + insert + damaged[at:]))
    assert furthest(read(BODIES[0]), pillow(BODIES[0])) == 0
