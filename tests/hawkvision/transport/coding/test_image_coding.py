"""Images through fragments and loss, with Pillow as the judge of what comes out."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hawkvision.core.errors import TooLarge
from hawkvision.core.types import Pixels
from hawkvision.transport.coding.concealment import MAX_FILLED_BYTES
from hawkvision.transport.coding.image_coding import (
    Arrived,
    Coded,
    Complete,
    Expired,
    Partial,
    Plan,
    decode,
    encode,
    missing,
    opaque,
    reframe,
)
from hawkvision.transport.protocol.image_format import MAX_PIXELS, MAX_REDRAWN_PIXELS, Kind, WireImageFormat
from hawkvision.transport.protocol.wire import MAX_DATAGRAM, WireError

ROOM = 1150


def scene(height: int = 227, width: int = 227, seed: int = 0, noise: int = 25) -> Pixels:
    """Smooth colours with texture, which JPEG finds about as hard as a photograph."""
    rng = np.random.default_rng(seed)
    smooth = cv2.resize(rng.integers(0, 256, (8, 8, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
    pixels: Pixels = np.clip(smooth + rng.normal(0, noise, smooth.shape), 0, 255).astype(np.uint8)
    return pixels


def some(coded: Coded, indices: range | list[int] | np.ndarray) -> dict[int, bytes]:
    return {int(index): coded.symbols[index] for index in indices}


def pixels_of(body: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))


def jpeg(pixels: Pixels, **options: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", **options)
    return out.getvalue()


def restarts(body: bytes) -> int:
    return sum(body.count(bytes((0xFF, marker))) for marker in range(0xD0, 0xD8))


def complete(arrived: Arrived) -> Complete:
    assert isinstance(arrived, Complete)
    return arrived


def partial(arrived: Arrived) -> Partial:
    assert isinstance(arrived, Partial)
    return arrived


@pytest.mark.parametrize(
    "size", [(227, 227), (256, 256), (224, 224), (16, 16), (1, 1), (9, 700), (208, 208), (640, 33)]
)
def test_any_k_of_n_give_what_the_encoder_made(size: tuple[int, int]) -> None:
    pixels = scene(*size)
    coded = encode(pixels, Plan(70, 1.0), ROOM)
    chosen = np.random.default_rng(1).permutation(coded.format.n)[: coded.format.k]
    arrived = complete(decode(coded.format, some(coded, chosen)))
    assert arrived.quality == 70
    assert np.array_equal(pixels_of(arrived.body), pixels_of(jpeg(pixels, quality=70, subsampling=2)))
    assert max(map(len, coded.symbols)) <= ROOM


def test_received_parts_are_true_pixels_and_holes_are_said_to_be_holes() -> None:
    pixels = scene()
    coded = encode(pixels, Plan(80, 0.2), ROOM)
    arrived = partial(decode(coded.format, some(coded, range(0, coded.format.k, 2))))
    whole = pixels_of(complete(decode(coded.format, dict(enumerate(coded.symbols)))).body)
    seen = np.kron(arrived.mask, np.ones((16, 16), np.bool_))[:227, :227]
    inside = cv2.erode(seen.astype(np.uint8), np.ones((5, 5))).astype(np.bool_)  # colours are blended over edges
    assert np.array_equal(pixels_of(arrived.body)[inside], whole[inside])
    assert 0.3 < arrived.received_fraction < 0.7
    assert arrived.received_fraction == pytest.approx(arrived.mask.mean(), abs=1e-9)


def test_a_hole_shows_what_is_next_to_it() -> None:
    stripes = np.broadcast_to(np.linspace(0, 255, 256, dtype=np.uint8)[None, :, None], (256, 256, 3)).copy()
    coded = encode(stripes, Plan(80, 0.0), 120)
    arrived = partial(decode(coded.format, some(coded, range(1, coded.format.k))))
    found, whole = pixels_of(arrived.body).astype(int), stripes.astype(int)
    assert np.abs(found - whole).max() < 12


def test_without_anything_an_image_has_expired() -> None:
    coded = encode(scene(), Plan(50, 0.5), ROOM)
    assert decode(coded.format, {}) == Expired()


def test_a_base_image_fills_holes_and_stands_alone() -> None:
    pixels = scene(noise=8)
    coded = encode(pixels, Plan(80, 1.5, base=True), ROOM)
    k, base_k = coded.format.k, coded.format.base_k
    arrived = partial(decode(coded.format, some(coded, range(k, k + base_k))))
    assert arrived.received_fraction == 0.0
    assert not arrived.mask.any()
    assert np.abs(pixels_of(arrived.body).astype(int) - pixels).mean() < 10
    assert max(map(len, coded.symbols)) <= ROOM
    assert decode(coded.format, some(coded, range(k, k + base_k - 1))) == Expired()


def test_a_base_image_that_would_be_the_image_is_left_out() -> None:
    strip = encode(scene(8, 60_000, noise=60), Plan(14, 0.0, base=True), ROOM)
    assert strip.format.base_k == 0
    assert isinstance(decode(strip.format, dict(enumerate(strip.symbols))), Complete)


def test_an_image_with_a_base_image_is_exact_from_any_k() -> None:
    coded = encode(scene(), Plan(70, 0.5, base=True), ROOM)
    last = some(coded, range(coded.format.n - coded.format.k, coded.format.n))
    plain = encode(scene(), Plan(70, 0.5), ROOM)
    assert complete(decode(coded.format, last)) == complete(decode(plain.format, dict(enumerate(plain.symbols))))


@given(st.binary(min_size=1, max_size=20_000), st.floats(0, 2), st.integers(60, 1150), st.randoms())
def test_any_k_of_n_give_an_opaque_body(body: bytes, parity: float, room: int, random: object) -> None:
    coded = opaque(body, parity, room)
    if coded is None:
        assert len(body) > 255 * room
        return
    chosen = random.sample(range(coded.format.n), coded.format.k)  # type: ignore[attr-defined]
    assert decode(coded.format, some(coded, chosen)) == Complete(body, None)
    assert decode(coded.format, some(coded, chosen[:-1])) == Expired()


def test_opaque_bodies_have_a_largest_size() -> None:
    assert opaque(b"", 1.0, ROOM) is None
    assert opaque(bytes(255 * ROOM + 1), 0.0, ROOM) is None
    coded = opaque(bytes(255 * ROOM), 1.0, ROOM)
    assert coded is not None
    assert (coded.format.k, coded.format.n) == (255, 255)


@pytest.mark.parametrize(("subsampling", "optimize", "grey"), [(0, 0, 0), (1, 0, 0), (2, 1, 0), (0, 1, 1)])
def test_a_caller_s_jpeg_is_not_quantised_again(subsampling: int, optimize: int, grey: int) -> None:
    pixels = scene()[..., 0] if grey else scene()
    body = jpeg(pixels, quality=75, subsampling=subsampling, optimize=optimize, restart_marker_blocks=4)
    found = reframe(body, 0.5, ROOM)
    assert found is not None
    coded, header = found
    last = some(coded, range(coded.format.n - coded.format.k, coded.format.n))
    arrived = complete(decode(coded.format, last, header))
    assert np.array_equal(pixels_of(arrived.body), pixels_of(body))
    assert (coded.format.tables, coded.format.quality, arrived.quality) == (1, 75, None)
    some_of_it = partial(decode(coded.format, some(coded, range(3)), header))
    assert pixels_of(some_of_it.body).shape == pixels_of(body).shape


def test_a_jpeg_with_standard_tables_needs_no_header() -> None:
    body = jpeg(scene(), quality=85, subsampling=2, restart_marker_blocks=4)
    found = reframe(body, 0.5, ROOM)
    assert found is not None
    coded, header = found
    assert (header, coded.format.tables, coded.format.quality) == (b"", 0, 85)
    assert complete(decode(coded.format, dict(enumerate(coded.symbols)))) == Complete(body, 85)


def turned(pixels: Pixels) -> bytes:
    exif, out = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(out, "JPEG", exif=exif, restart_marker_blocks=4)
    return out.getvalue()


def test_what_cannot_be_reframed_is_left_to_transcoding() -> None:
    fits = jpeg(scene(), quality=75, restart_marker_blocks=4)
    assert reframe(fits, 0.5, ROOM) is not None
    assert reframe(jpeg(scene(), quality=75), 0.5, ROOM) is None, "no restart markers"
    assert reframe(jpeg(scene(), quality=75, restart_marker_blocks=4, progressive=1), 0.5, ROOM) is None
    assert reframe(jpeg(scene(), quality=95, restart_marker_rows=1), 0.5, ROOM) is None, "segments too long"
    assert reframe(turned(scene()), 0.5, ROOM) is None, "not upright"
    assert reframe(fits[:-200], 0.5, ROOM) is None, "cut off"
    assert reframe(b"", 0.5, ROOM) is None


@given(st.data())
def test_damaged_jpegs_are_reframed_soundly_or_not_at_all(data: st.DataObject) -> None:
    body = bytearray(jpeg(scene(64, 64), quality=75, optimize=1, restart_marker_blocks=4))
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        body[at] = data.draw(st.integers(0, 255))
    found = reframe(bytes(body), 0.5, ROOM)
    if found is not None:
        coded, header = found
        assert isinstance(decode(coded.format, dict(enumerate(coded.symbols)), header), Complete)


def test_a_header_must_be_the_image_s() -> None:
    found = reframe(jpeg(scene(), quality=75, optimize=1, restart_marker_blocks=4), 0.5, ROOM)
    assert found is not None
    coded, header = found
    with pytest.raises(WireError, match="registered header is of 227x227"):
        decode(replace(coded.format, width=228), some(coded, range(3)), header)
    with pytest.raises(WireError, match="does not begin with SOI"):
        decode(coded.format, some(coded, range(3)), b"")
    with pytest.raises(WireError, match="holds more than"):
        decode(coded.format, some(coded, range(3)), header + b"\xff\xd9")


def test_too_large_images_are_refused() -> None:
    with pytest.raises(TooLarge, match="does not fit 255 datagrams"):
        encode(scene(1600, 1600, noise=60), Plan(80, 0.0), ROOM)
    with pytest.raises(TooLarge, match="4097x4096 pixels"):
        encode(np.zeros((4096, 4097, 3), np.uint8), Plan(80, 0.0), ROOM)
    with pytest.raises(TooLarge, match="65501x8 pixels"):
        encode(np.zeros((8, 65501, 3), np.uint8), Plan(80, 0.0), ROOM)


def test_segments_too_long_for_a_datagram_are_made_shorter() -> None:
    coded = encode(scene(noise=80), Plan(80, 0.5), 400)
    assert coded.format.interval < 4
    assert max(map(len, coded.symbols)) <= 400


def test_missing_asks_for_the_fewest_and_data_first() -> None:
    coded = opaque(bytes(5000), 0.6, ROOM)
    assert coded is not None
    assert (coded.format.k, coded.format.n) == (5, 8)
    assert missing(coded.format, {0, 6}) == (1, 2, 3)
    assert missing(coded.format, {1, 2, 3, 6, 7}) == ()
    assert missing(coded.format, ()) == (0, 1, 2, 3, 4)


GOOD = WireImageFormat(Kind.SEGMENTS, 227, 227, 80, 5, 10, 15)


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 0}, {"k": 16}, {"n": 256}, {"base_k": 16}, {"quality": 0}, {"quality": 101}, {"interval": 0},
        {"interval": 256}, {"width": 0}, {"height": 0}, {"width": 4097, "height": 4096}, {"base_k": 4, "tables": 1},
        {"kind": Kind.OPAQUE}, {"kind": Kind.OPAQUE, "quality": 0}, {"tables": -1}, {"width": 65536},
        {"width": 1025, "height": MAX_REDRAWN_PIXELS // 1024, "base_k": 4},
    ],
)  # fmt: skip
def test_absurd_formats_are_refused(wrong: Mapping[str, int]) -> None:
    with pytest.raises(WireError, match=r"image format: \w+ is -?\d+; expected"):
        replace(GOOD, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("symbols", "complaint"),
    [
        ({15: b"x"}, "fragment 15 of an image of n = 15"),
        ({0: b""}, "0 bytes"),
        ({0: bytes(MAX_DATAGRAM + 1)}, "1201 bytes"),
        ({i: bytes(100 + (i == 12)) for i in range(4, 15)}, "must be of one length"),
        ({i: bytes(100 - (i > 9)) for i in range(4, 15)}, "none longer"),
    ],
)
def test_symbols_that_contradict_the_format_are_refused(symbols: dict[int, bytes], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        decode(GOOD, symbols)


def test_segments_that_lie_are_not_used() -> None:
    coded = encode(scene(), Plan(80, 0.0), ROOM)
    sound = coded.symbols[1]
    lies = (b"\xff\xff" + sound[2:], sound[:2] + b"\xff\xff" + sound[4:], sound[:4] + b"\xff" + sound[5:])
    markers = (sound[:40] + b"\xff\xd9" + sound[42:], sound[:40] + b"\xff\xff" + sound[42:], sound[:3])
    for symbol in lies + markers:
        assert decode(coded.format, {1: symbol}) == Expired()


def well_formed(arrived: Arrived, format_: WireImageFormat) -> None:
    if isinstance(arrived, Expired):
        return
    columns, rows = -(-format_.width // 16), -(-format_.height // 16)
    assert restarts(arrived.body[629:]) == -(-columns * rows // format_.interval) - 1
    assert arrived.body.endswith(b"\xff\xd9")
    assert len(arrived.body) <= MAX_FILLED_BYTES + 629 + 2 * columns * rows


@given(st.data())
def test_damaged_symbols_never_break_the_structure(data: st.DataObject) -> None:
    base = data.draw(st.booleans())
    coded = encode(scene(96, 96, noise=10), Plan(80, 0.5, base), 900 if base else 300)
    symbols = some(coded, sorted(data.draw(st.sets(st.integers(0, coded.format.n - 1), min_size=1))))
    for index in data.draw(st.lists(st.sampled_from(sorted(symbols)), max_size=4)):
        symbol = bytearray(symbols[index])
        at = data.draw(st.integers(0, len(symbol) - 1))
        symbol[at] ^= data.draw(st.integers(0, 255))
        symbols[index] = bytes(symbol[: data.draw(st.integers(1, len(symbol)))])
    try:
        arrived = decode(coded.format, symbols)
    except WireError:
        return
    well_formed(arrived, coded.format)


def test_one_long_segment_does_not_fill_memory() -> None:
    format_ = WireImageFormat(Kind.SEGMENTS, 4096, 4064, 80, 1, 255, 255)
    segment = b"\x01" * 1100
    arrived = partial(decode(format_, {0: len(segment).to_bytes(2, "big") + b"\0\0\x01" + segment}))
    assert len(arrived.body) < MAX_FILLED_BYTES
    assert format_.width * format_.height <= MAX_PIXELS
    well_formed(arrived, format_)
