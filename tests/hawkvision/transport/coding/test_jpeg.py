"""Headers that are written from tables, against those that encoders write."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hawkvision.transport.coding.jpeg import assemble, compress, is_clean, standard_header, standard_layout
from hawkvision.transport.coding.jpeg_splitting import MAX_HEADER_BYTES, cut, parse_header
from hawkvision.transport.protocol.wire import WireError

QUALITIES = (1, 14, 27, 49, 50, 70, 80, 85, 99, 100)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


def by_opencv(pixels: np.ndarray, quality: int, interval: int) -> bytes:
    options = (cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_RST_INTERVAL, interval)
    sampling = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420)
    return cv2.imencode(".jpg", pixels, options + sampling)[1].tobytes()


def by_pillow(pixels: np.ndarray, quality: int, interval: int) -> bytes:
    out = io.BytesIO()
    image = Image.fromarray(pixels)
    image.save(out, "JPEG", quality=quality, subsampling=2, restart_marker_blocks=interval)
    return out.getvalue()


def without_jfif(body: bytes) -> bytes:
    assert body[2:4] == b"\xff\xe0"
    return body[:2] + body[4 + int.from_bytes(body[4:6], "big") :]


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize(("height", "width"), [(8, 8), (227, 227), (70, 333)])
def test_the_implied_header_is_what_opencv_and_pillow_write(quality: int, height: int, width: int) -> None:
    header = standard_header(width, height, quality, 4)
    pixels = noise(height, width)
    assert by_opencv(pixels, quality, 4).startswith(header)
    # Pillow differs in the number that JFIF has for its version's minor part and in the density.
    assert without_jfif(by_pillow(pixels, quality, 4)).startswith(without_jfif(header))


def test_without_an_interval_the_header_has_no_dri() -> None:
    assert by_opencv(noise(40, 40), 60, 0).startswith(standard_header(40, 40, 60, 0))


@pytest.mark.parametrize("interval", [1, 3, 4, 255])
def test_a_jpeg_is_its_header_and_its_segments(interval: int) -> None:
    segments = compress(noise(100, 90), 90, interval)
    assert len(segments) == standard_layout(90, 100, interval).segments
    assert assemble(standard_header(90, 100, 90, interval), segments) == by_opencv(noise(100, 90), 90, interval)


@pytest.mark.parametrize("interval", [1, 4, 5])
def test_blank_segments_show_intermediate_grey(interval: int) -> None:
    layout = standard_layout(90, 100, interval)
    blanks = [layout.blank(interval)] * (layout.segments - 1) + [layout.blank(layout.last_mcus)]
    body = assemble(standard_header(90, 100, 50, interval), blanks)
    assert (np.asarray(Image.open(io.BytesIO(body))) == 128).all()


@pytest.mark.parametrize("sampling", ["411", "420", "422", "440", "444"])
def test_blank_segments_are_right_for_any_sampling(sampling: str) -> None:
    options = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{sampling}"))
    body = cv2.imencode(".jpg", noise(60, 100), (cv2.IMWRITE_JPEG_RST_INTERVAL, 2, *options))[1].tobytes()
    found = cut(body)
    assert found is not None
    layout = found.layout
    blanks = [layout.blank(2)] * (layout.segments - 1) + [layout.blank(layout.last_mcus)]
    header = found.header or standard_header(100, 60, 95, 2)
    assert (np.asarray(Image.open(io.BytesIO(assemble(header, blanks)))) == 128).all()


@pytest.mark.parametrize("quality", QUALITIES)
def test_quality_is_read_from_the_tables(quality: int) -> None:
    found = cut(by_opencv(noise(40, 40), quality, 2))
    assert found is not None
    assert (found.quality, found.header) == (quality, b"")


def test_quality_of_foreign_tables_is_estimated() -> None:
    out = io.BytesIO()
    tables = [[min(2 * step, 255) for step in range(10, 74)]] * 2
    Image.fromarray(noise(40, 40)).save(out, "JPEG", qtables=tables, restart_marker_blocks=2)
    found = cut(out.getvalue())
    assert found is not None
    assert 30 < found.quality < 40, "the steps are 1.4 times those of quality 50"
    assert found.header


def test_comments_and_profiles_are_not_registered() -> None:
    out = io.BytesIO()
    image = Image.fromarray(noise(40, 40))
    image.save(out, "JPEG", optimize=True, comment=b"x" * 500, icc_profile=b"y" * 500, restart_marker_blocks=2)
    found = cut(out.getvalue())
    assert found is not None
    assert 100 < len(found.header) < MAX_HEADER_BYTES
    assert b"xxx" not in found.header
    assert parse_header(found.header) == found.layout


@given(st.data())
def test_damaged_headers_are_errors_or_layouts(data: st.DataObject) -> None:
    header = bytearray(standard_header(100, 60, 50, 4))
    for at in data.draw(st.lists(st.integers(0, len(header) - 1), max_size=5)):
        header[at] = data.draw(st.integers(0, 255))
    try:
        layout = parse_header(bytes(header[: data.draw(st.integers(0, len(header)))]))
    except WireError:
        return
    assert layout.segments >= 1
    assert is_clean(layout.blank(layout.last_mcus))
