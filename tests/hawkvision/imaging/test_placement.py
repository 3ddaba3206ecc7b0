"""What a model finds in its input lies where it is in the image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hawkvision.core.types import Pixels
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.image_header import ImageFormat, ImageHeader
from hawkvision.imaging.placement import Placement, placement
from hawkvision.imaging.preprocessing import load_input, preprocess, probe
from hawkvision.models.manifest import InputSpec
from tests.fuzz.examples import examples
from tests.hawkvision.imaging.images import encode, oriented

MOST = 4_000_000


def spec(height: int = 64, width: int = 64, **options: Any) -> InputSpec:
    return InputSpec(height=height, width=width, mean=(0.0,) * 3, std=(1.0,) * 3, **options)


def to_input(placed: Placement, boxes: NDArray[Any]) -> NDArray[np.float64]:
    """The inverse of `Placement.to_image`."""
    offset, far = placed.to_image(np.array([0.0, 0.0, 0.0, 0.0])), placed.to_image(np.array([1.0, 1.0, 1.0, 1.0]))
    return (boxes - offset) / (far - offset)


SPECS = st.one_of(
    st.builds(spec, st.integers(24, 96), st.integers(24, 96), crop_fraction=st.floats(0.5, 1.0)),
    st.builds(spec, st.integers(24, 96), st.integers(24, 96), fit=st.just("stretch")),
    st.builds(
        spec,
        st.integers(24, 96),
        st.integers(24, 96),
        fit=st.just("letterbox"),
        pad_value=st.just(0),
        pad_position=st.sampled_from(["centre", "top_left"]),
    ),
)
BOXES = st.lists(st.floats(-0.5, 1.5), min_size=4, max_size=4)


@settings(max_examples=examples(200))
@given(
    height=st.integers(40, 900),
    width=st.integers(40, 900),
    orientation=st.integers(1, 8),
    kind=st.sampled_from(["JPEG", "PNG"]),
    input_spec=SPECS,
    middle=st.tuples(st.floats(0.3, 0.7), st.floats(0.3, 0.7)),
)
@example(height=897, width=801, orientation=7, kind="JPEG", input_spec=spec(24, 24, fit="stretch"), middle=(0.3, 0.7))
@example(height=801, width=897, orientation=6, kind="JPEG", input_spec=spec(24, 24, fit="stretch"), middle=(0.3, 0.7))
def test_an_object_is_found_in_the_image_where_a_model_sees_it(
    height: int, width: int, orientation: int, kind: str, input_spec: InputSpec, middle: tuple[float, float]
) -> None:
    """To three quarters of a pixel of the input, or one and a half of the image where that is coarser."""
    wanted, body = bright(height, width, orientation, middle, kind)
    placed = placement(probe(body), input_spec)
    left, top, right, bottom = to_input(placed, wanted)
    # What is thinner is nowhere as bright in the input as `box_of` takes it to be.
    assume((right - left) * input_spec.width >= 2.0 and (bottom - top) * input_spec.height >= 2.0)
    found = box_of(load_input(body, input_spec, max_pixels=MOST)[0])
    if found is None:
        return  # the crop does not show it whole
    upright = (height, width) if orientation < 5 else (width, height)
    pixel = np.abs(placed.to_image(np.array([0, 0, 1 / input_spec.width, 1 / input_spec.height])) -
                   placed.to_image(np.zeros(4)))[2:]  # fmt: skip
    tolerance = np.maximum(pixel, 2.0 / np.array(upright[::-1])) * 0.75
    assert (np.abs(placed.to_image(found) - wanted) <= np.tile(tolerance, 2)).all()


def bright(
    height: int, width: int, orientation: int, middle: tuple[float, float], kind: str
) -> tuple[NDArray[np.float64], bytes]:
    """A dark image with a bright rectangle of a fifth of its sides, and where that is when the image is upright."""
    pixels = np.zeros((height, width, 3), np.uint8)
    left, top = round((middle[0] - 0.1) * width), round((middle[1] - 0.1) * height)
    right, bottom = left + round(0.2 * width), top + round(0.2 * height)
    pixels[top:bottom, left:right] = 255
    upright = as_displayed(pixels, orientation)
    rows, columns = (np.flatnonzero(upright[..., 0].any(axis=1 - axis)) for axis in (0, 1))
    high, wide = upright.shape[:2]
    box = np.array([columns[0] / wide, rows[0] / high, (columns[-1] + 1) / wide, (rows[-1] + 1) / high])
    options = {"quality": 95} if kind == "JPEG" else {}
    return box, encode(Image.fromarray(pixels), kind, exif=oriented(orientation), **options)


def as_displayed(pixels: Pixels, orientation: int) -> Pixels:
    """As EXIF 2.32 describes, by Pillow."""
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = orientation
    return np.asarray(ImageOps.exif_transpose(image))


def box_of(pixels: Pixels) -> NDArray[np.float64] | None:
    """The bright rectangle of an input by its brightness, in fractions; None if it is cut off."""
    light = pixels[..., 0].astype(np.float64) / 255
    along, down = light.max(axis=0), light.max(axis=1)
    if max(along[0], along[-1], down[0], down[-1]) > 0.1 or light.max() < 0.5:
        return None
    along, down = (np.where(profile > 0.08, profile, 0.0) for profile in (along, down))  # without JPEG's ringing
    sides = []
    for profile in (along, down):
        peak = int(profile.argmax())
        sides.append((peak - profile[:peak].sum(), peak + profile[peak:].sum()))
    (left, right), (top, bottom) = sides
    high, wide = light.shape
    return np.array([left / wide, top / high, right / wide, bottom / high])


def test_a_stretched_input_shows_the_whole_image() -> None:
    pixels = np.zeros((40, 100, 3), np.uint8)
    pixels[:, 50:] = 200
    found = preprocess(pixels, spec(50, 50, fit="stretch"))
    assert (found[:, :24] == 0).all()
    assert (found[:, 26:] == 200).all()


@pytest.mark.parametrize(("position", "rows"), [("centre", slice(16, 48)), ("top_left", slice(0, 32))])
def test_a_letterboxed_input_has_the_images_aspect_and_is_padded(position: str, rows: slice) -> None:
    pixels = np.full((100, 200, 3), 250, np.uint8)
    found = preprocess(pixels, spec(64, 64, fit="letterbox", pad_value=7, pad_position=position))
    assert (found[rows] == 250).all()
    assert (np.delete(found, np.r_[rows], axis=0) == 7).all()


@pytest.mark.parametrize("fit", ["stretch", "letterbox"])
@pytest.mark.parametrize("size", [(640, 640), (640, 20), (20, 640)])
def test_strong_shrinking_averages_in_either_direction(fit: str, size: tuple[int, int]) -> None:
    """Also where the other side is enlarged."""
    height, width = size
    stripes = np.zeros((height, width, 3), np.uint8)
    if width > height:
        stripes[:, ::2] = 255
    else:
        stripes[::2] = 255
    found = preprocess(stripes, spec(40, 40, fit=fit, pad_value=128))
    assert np.abs(found.astype(int) - 128).max() <= 2


@pytest.mark.parametrize("fit", ["stretch", "letterbox"])
def test_what_travels_shows_models_the_whole_image(fit: str) -> None:
    y, x = np.mgrid[0:1:600j, 0:1:1200j]
    pixels = np.stack([200 * x, 200 * y, 100 + 50 * np.sin(7 * x)], -1).astype(np.uint8)
    body = encode(Image.fromarray(pixels), "JPEG", quality=95, exif=oriented(6))
    input_spec = spec(64, 96, fit=fit)
    small = Reducer((input_spec,), MOST).reduced(body, probe(body))
    assert len(small) < len(body)
    before, after = (load_input(each, input_spec, max_pixels=MOST)[0].astype(int) for each in (body, small))
    assert np.abs(before - after).mean() < 3.0


def test_what_travels_is_not_cut_off_where_places_matter() -> None:
    body = encode(Image.new("RGB", (1200, 600)), "JPEG")
    header = probe(Reducer((spec(),), MOST, whole=True).reduced(body, probe(body)))
    assert (header.height, header.width) == (64, 128)


@pytest.mark.parametrize(
    ("orientation", "sides"),
    [
        (1, (0.0, 0.0, 904 / 897, 808 / 801)),
        (2, (-7 / 897, 0.0, 1.0, 808 / 801)),
        (3, (-7 / 897, -7 / 801, 1.0, 1.0)),
        (4, (0.0, -7 / 801, 904 / 897, 1.0)),
        (5, (0.0, 0.0, 808 / 801, 904 / 897)),
        (6, (-7 / 801, 0.0, 1.0, 904 / 897)),
        (7, (-7 / 801, -7 / 897, 1.0, 1.0)),
        (8, (0.0, -7 / 897, 808 / 801, 1.0)),
    ],
)
def test_the_last_blocks_of_a_jpeg_reach_beyond_the_image(orientation: int, sides: tuple[float, ...]) -> None:
    """Of 897x801 pixels, at an eighth: 113x101 pixels that stand for 904x808, turned like the image."""
    header = ImageHeader(ImageFormat.JPEG, 897, 801, orientation, 3)
    assert placement(header, spec(32, 32, fit="stretch")).to_image(np.array([0, 0, 1, 1])) == pytest.approx(sides)
