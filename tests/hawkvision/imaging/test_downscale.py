"""Images made smaller before they travel: what models then see is what they would have seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from hawkvision.core.errors import BadImage, TooLarge
from hawkvision.core.types import Pixels
from hawkvision.imaging.downscale import DETAIL, Reducer
from hawkvision.imaging.preprocessing import load_input, probe
from hawkvision.models.manifest import InputSpec
from tests.fuzz.examples import examples
from tests.hawkvision.imaging.images import encode, oriented

MOST = 4_000_000


def spec(side: int = 64, *, width: int | None = None, crop_fraction: float = 1.0) -> InputSpec:
    return InputSpec(
        height=side,
        width=width or side,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        crop_fraction=crop_fraction,
    )


def scene(height: int, width: int) -> Pixels:
    """Smooth colours without symmetry, as smooth at any size."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    waves = [128 + 60 * np.sin(5 * x + c) * np.cos(4 * y + 2 * c) + 50 * x - 30 * y for c in range(3)]
    pixels: Pixels = np.clip(np.stack(waves, -1), 0, 255).astype(np.uint8)
    return pixels


def body_of(height: int, width: int, kind: str = "JPEG", **options: object) -> bytes:
    return encode(Image.fromarray(scene(height, width)), kind, **options)


def reduced(body: bytes, *inputs: InputSpec) -> bytes:
    return Reducer(inputs or (spec(),), MOST).reduced(body, probe(body))


def seen(body: bytes, input_spec: InputSpec) -> Pixels:
    return load_input(body, input_spec, max_pixels=MOST)[0]


@pytest.mark.parametrize("size", [(64, 64), (95, 160), (60, 400), (95, 1000)])
def test_an_image_not_much_larger_than_it_is_looked_at_travels_as_it_is(size: tuple[int, int]) -> None:
    body = body_of(*size)
    assert reduced(body) is body


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_cameras_image_travels_as_the_square_that_is_looked_at(kind: str) -> None:
    body = body_of(720, 1280, kind)
    small = reduced(body)
    header = probe(small)
    assert header.width == header.height == DETAIL * 64
    assert len(small) < len(body)
    assert small == reduced(body), "the same bytes every time: certificates are about them"


def test_every_input_finds_its_part_at_its_size() -> None:
    inputs = (spec(48), spec(40, width=80), spec(64, crop_fraction=0.8))
    small = reduced(body_of(900, 1200), *inputs)
    header = probe(small)
    assert header.height >= DETAIL * 80
    assert header.width > header.height, "the wide input looks further to the sides"


@settings(max_examples=examples(300), deadline=None)
@given(
    height=st.integers(100, 1400),
    width=st.integers(100, 1400),
    inputs=st.lists(
        st.builds(
            spec,
            st.integers(24, 96),
            width=st.none() | st.integers(24, 96),
            crop_fraction=st.sampled_from([1.0, 0.875, 0.7]),
        ),
        min_size=1,
        max_size=3,
    ),
    orientation=st.integers(1, 8),
)
@example(height=1000, width=1400, inputs=[spec(96), spec(24, width=90)], orientation=6)
def test_models_see_the_same_in_what_travels(
    height: int, width: int, inputs: list[InputSpec], orientation: int
) -> None:
    body = body_of(height, width, quality=95, exif=oriented(orientation))
    small = reduced(body, *inputs)
    assert len(small) <= len(body)
    for each in inputs:
        before, after = (seen(each_body, each).astype(int) for each_body in (body, small))
        assert np.abs(before - after).mean() < 4.0


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_grey_and_transparent_images_are_made_smaller_too(kind: str) -> None:
    pixels = Image.fromarray(scene(500, 700)).convert("L" if kind == "JPEG" else "RGBA")
    small = reduced(encode(pixels, kind))
    assert probe(small).height == DETAIL * 64


def test_what_would_not_get_smaller_travels_as_it_is() -> None:
    flat = encode(Image.new("RGB", (700, 700)), "WEBP")
    assert Reducer((spec(340),), MOST).saves(probe(flat))
    assert reduced(flat, spec(340)) is flat


def test_an_image_cut_off_is_refused() -> None:
    body = body_of(720, 1280)
    with pytest.raises(BadImage):
        reduced(body[: len(body) // 2])


def test_an_image_larger_than_allowed_is_refused() -> None:
    body = body_of(720, 1280)
    with pytest.raises(TooLarge):
        Reducer((spec(),), 1000).reduced(body, probe(body))
