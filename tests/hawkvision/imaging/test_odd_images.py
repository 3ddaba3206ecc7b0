"""Images that viewers show whole are read whole, whatever is odd about them; those that lack something are refused.

Pillow, which decodes by libjpeg itself, is the oracle for layouts; for files that it refuses, the file's sound twin.
"""

from __future__ import annotations

import functools
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hawkvision.core.errors import BadImage, RequestError, TooLarge
from hawkvision.core.types import Pixels
from hawkvision.imaging import jpeg_decoding
from hawkvision.imaging.preprocessing import decode, probe
from tests.fuzz.examples import examples
from tests.hawkvision.imaging.images import MAX_PIXELS, encode, furthest, pillow, read, scene
from tests.odd_images import (
    FACTORS,
    Odd,
    after_start,
    before_segment,
    between_restarts,
    odd_jpegs,
    odd_pngs,
    sampled_jpeg,
    scan_start,
    segment,
)

PIXELS = scene(75, 106)


@functools.cache
def odd(kind: str) -> Odd:
    return {**odd_jpegs(PIXELS), **odd_pngs(PIXELS)}[kind]


KINDS = (*odd_jpegs(scene(16, 40)), *odd_pngs(scene(16, 40)))


def at_half(body: bytes) -> Pixels:
    return decode(body, probe(body), max_pixels=MAX_PIXELS, min_side=30)


@pytest.fixture(scope="module")
def all_odd() -> dict[str, Odd]:
    return {**odd_jpegs(PIXELS), **odd_pngs(PIXELS)}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_image_is_read_as_its_sound_twin(kind: str, all_odd: dict[str, Odd]) -> None:
    this = all_odd[kind]
    assert this.body != this.twin
    np.testing.assert_array_equal(read(this.body), read(this.twin))
    np.testing.assert_array_equal(at_half(this.body), at_half(this.twin))


@pytest.mark.parametrize("factors", FACTORS)
def test_every_layout_of_components_is_read(factors: str) -> None:
    body = sampled_jpeg(PIXELS, factors)
    assert furthest(read(body), pillow(body)) == 0
    assert at_half(body).shape == (38, 53, 3)


@pytest.mark.parametrize("space", ["RGB", "CMYK", "L"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 2}])
def test_colours_that_pillow_writes_are_read_without_their_end_too(space: str, options: dict[str, int]) -> None:
    channels = {"RGB": 3, "CMYK": 4, "L": 1}[space]
    pixels = scene(75, 106, channels)
    body = encode(Image.fromarray(pixels[..., 0] if channels == 1 else pixels, space), "JPEG", **options)
    np.testing.assert_array_equal(read(body[:-2]), read(body))


@pytest.mark.parametrize(
    "whole",
    [
        sampled_jpeg(PIXELS, "2x2 1x1 1x1"),
        sampled_jpeg(PIXELS, "2x2 1x1 1x1", interval=2),
        sampled_jpeg(PIXELS, "4x2 1x1 1x1"),
        sampled_jpeg(PIXELS, "1x1 2x1 2x1", interval=3),
        encode(Image.fromarray(scene(75, 106)), "JPEG", progressive=True),
    ],
    ids=["plain", "restarts", "layout", "layout, restarts", "progressive"],
)
@settings(max_examples=examples(300), deadline=None)
@given(
    where=st.floats(0, 1),
    added=st.sampled_from([b"", b"\xff\xd9", bytes(9), bytes(500)]),
)
def test_cut_jpeg_is_refused_or_shows_every_pixel_of_the_whole(whole: bytes, where: float, added: bytes) -> None:
    start = scan_start(whole)
    cut = whole[: start + round(where * (len(whole) - 2 - start))]
    if probe(whole).progressive and added.endswith(b"\xff\xd9"):
        return  # encoders may leave the last scans out; the end marker says that nothing is missing
    try:
        pixels = read(cut + added)
    except BadImage:
        return
    surely = 63 if added.startswith(b"\0") else 75  # eight zero bits may be taken for the last blocks
    np.testing.assert_array_equal(pixels[:surely], read(whole)[:surely])


def test_lost_restart_interval_is_refused_however_they_are_numbered() -> None:
    whole = sampled_jpeg(PIXELS, "2x2 1x1 1x1", interval=2)
    start = scan_start(whole)
    at = whole.index(b"\xff\xd2", start)
    lost = whole[:at] + whole[whole.index(b"\xff\xd3", at) :]
    with pytest.raises(BadImage, match="17 of 18 restart intervals"):
        read(lost)


def test_emptied_restart_interval_is_refused() -> None:
    whole = sampled_jpeg(PIXELS, "2x2 1x1 1x1", interval=2)
    emptied = between_restarts(whole, lambda i, piece: piece[: 3 if i == 7 else None] + b"stray bytes of the maker")
    with pytest.raises(BadImage):
        read(emptied)


def test_missing_component_is_refused_though_the_file_has_an_end() -> None:
    whole = sampled_jpeg(PIXELS, "1x1")
    frame = whole.index(b"\xff\xc0")
    grey_only = (
        whole[:frame]
        + segment(0xC0, whole[frame + 4 : frame + 9] + b"\x03\x01\x11\0\x02\x11\1\x03\x11\1")
        + whole[frame + 2 + 11 :]
    )
    with pytest.raises(BadImage, match="cut off"):
        read(grey_only)


def test_arithmetic_code_without_an_end_is_refused_for_nobody_could_tell() -> None:
    body = sampled_jpeg(PIXELS, "2x2 1x1 1x1").replace(b"\xff\xc0", b"\xff\xc9")[:-2]
    with pytest.raises(BadImage):
        read(body)


def test_refusal_says_how_much_is_there() -> None:
    whole = sampled_jpeg(scene(160, 106), "2x2 1x1 1x1")
    start = scan_start(whole)
    with pytest.raises(BadImage, match=r"cut off: (48|56|64|72) of 160 rows are there"):
        read(whole[: start + (len(whole) - start) // 2])
    png = encode(Image.fromarray(scene(160, 106)), "PNG")
    with pytest.raises(BadImage, match=r"cut off or damaged: \d+ of 160 rows are there"):
        read(png[: len(png) // 2])
    webp = encode(Image.fromarray(scene(160, 106)), "WEBP")
    with pytest.raises(BadImage, match=rf"cut off: {len(webp) // 2} of {len(webp)} bytes are there"):
        read(webp[: len(webp) // 2])


@pytest.mark.parametrize("lossless", [False, True])
def test_webp_cut_in_its_metadata_is_read(lossless: bool) -> None:
    exif = Image.Exif()
    exif[0x010F] = "maker" * 20
    body = encode(Image.fromarray(scene()), "WEBP", lossless=lossless, exif=exif.tobytes())
    assert body[12:16] == b"VP8X"
    np.testing.assert_array_equal(read(body[:-30]), read(body))


# Bounds


def test_more_padded_restart_intervals_than_are_looked_into_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = odd("stray bytes before each restart").body
    monkeypatch.setattr(jpeg_decoding, "MAX_PIECES", 5)
    with pytest.raises(BadImage, match="18 restart intervals"):
        read(body)


def test_what_costs_more_than_is_looked_into_is_decoded_once() -> None:
    whole = sampled_jpeg(PIXELS, "2x2 1x1 1x1")
    huge = whole.replace(b"\x08\0\x4b\0\x6a", b"\x08\x3f\xff\x3f\xff")
    assert probe(huge).pixels > jpeg_decoding.MAX_SCANNED_PIXELS
    with pytest.raises(BadImage, match="is not mended"):
        decode(huge, probe(huge), max_pixels=300_000_000, min_side=100)


def test_countless_restart_markers_are_not_collected() -> None:
    whole = sampled_jpeg(PIXELS, "2x2 1x1 1x1", interval=1)
    flooded = whole[: scan_start(whole)] + b"\xff\xd0" * 1_000_000
    with pytest.raises(BadImage, match="0 of 35 restart intervals"):
        read(flooded)


def test_countless_segments_and_chunks_are_refused() -> None:
    jpeg = sampled_jpeg(PIXELS, "2x2 1x1 1x1", interval=2)
    with pytest.raises(RequestError):
        read(after_start(jpeg, b"\xff\xfe\0\2" * 100_000))
    with pytest.raises((BadImage, TooLarge)):
        read(encode(Image.fromarray(PIXELS), "JPEG", progressive=True)[:-2] + b"\xff\xfe\0\2" * 100_000)
    png = encode(Image.fromarray(PIXELS), "PNG")
    with pytest.raises(BadImage, match="chunks"):
        read(png[:33] + (bytes(4) + b"tEXt" + bytes(4)) * 100_000 + png[33:])


@pytest.mark.parametrize("unit", [b"\xff", b"\xff\0", b"\xff\xd0", b"\xff\xff\0", b"\xff\xe1\0\x08Exif\0\0", b"\0"])
def test_ten_megabytes_of_anything_are_passed_over_or_refused(unit: bytes) -> None:
    whole = sampled_jpeg(PIXELS, "2x2 1x1 1x1", interval=2)
    flood = unit * (10_000_000 // len(unit))
    start = scan_start(whole)
    for body in (before_segment(whole, 0xC0, flood), whole[:start] + flood, whole[:-2] + flood):
        with suppress(RequestError):
            np.testing.assert_array_equal(read(body), read(whole))


# Whatever comes in
