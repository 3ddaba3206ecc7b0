"""Interpolations of libraries: images are what the library itself makes of them, and boxes lie where objects are."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from hawkvision.core.types import Pixels
from hawkvision.imaging.decoding_cost import DecodingScales
from hawkvision.imaging.image_header import ImageFormat, ImageHeader
from hawkvision.imaging.placement import MOST_SCALED, placement, whole_scaled
from hawkvision.imaging.preprocessing import load_input, preprocess
from hawkvision.models.manifest import InputSpec

SIDE = 64
SHAPES = [(75, 100), (101, 83), (64, 900), (250, 375), (20, 30), (1, 1), (72, 72), (5, 50)]


def spec(interpolation: Any, height: int = SIDE, width: int = SIDE, **options: Any) -> InputSpec:
    return InputSpec(
        height=height, width=width, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation=interpolation, **options
    )


def noise(height: int, width: int) -> Pixels:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def resized_and_cropped(pixels: Pixels, resize: int, crop: int, method: Image.Resampling) -> Pixels:
    """torchvision's `Resize` and `CenterCrop` of an image."""
    image = Image.fromarray(pixels)
    width, height = image.size
    longer = int(resize * max(width, height) / min(width, height))
    size = (resize, longer) if width <= height else (longer, resize)
    left, top = round((size[0] - crop) / 2), round((size[1] - crop) / 2)
    return np.asarray(image.resize(size, method).crop((left, top, left + crop, top + crop)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
def test_a_crop_is_what_torchvision_makes_of_the_image(shape: tuple[int, int], method: str) -> None:
    pixels = noise(*shape)
    found = preprocess(pixels, spec(f"pillow_{method}", crop_fraction=SIDE / 73))
    np.testing.assert_array_equal(found, resized_and_cropped(pixels, 73, SIDE, Image.Resampling[method.upper()]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("method", "flag"),
    [("bilinear", cv2.INTER_LINEAR), ("bicubic", cv2.INTER_CUBIC), ("area", cv2.INTER_AREA)],
)
def test_a_stretched_image_is_what_opencv_makes_of_it(shape: tuple[int, int], method: str, flag: int) -> None:
    pixels = noise(*shape)
    found = preprocess(pixels, spec(f"opencv_{method}", 48, 80, fit="stretch"))
    np.testing.assert_array_equal(found, cv2.resize(pixels, (80, 48), interpolation=flag))


def test_a_letterboxed_image_lies_on_grey_as_opencv_scales_it() -> None:
    pixels = noise(300, 400)
    found = preprocess(pixels, spec("opencv_bilinear", fit="letterbox"))
    assert (found[:8] == 114).all()
    assert (found[-8:] == 114).all()
    np.testing.assert_array_equal(found[8:-8], cv2.resize(pixels, (64, 48), interpolation=cv2.INTER_LINEAR))


def test_a_large_jpeg_is_decoded_whole_before_a_library_scales_it() -> None:
    body = io.BytesIO()
    Image.fromarray(noise(640, 640)).save(body, "JPEG", quality=95)
    found, _ = load_input(body.getvalue(), spec("pillow_bilinear", fit="stretch"), max_pixels=1_000_000)
    decoded = Image.open(body).convert("RGB")
    np.testing.assert_array_equal(found, np.asarray(decoded.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))


@pytest.mark.parametrize("shape", [(300, 400), (401, 333), (60, 90)])
def test_places_in_a_crop_are_places_in_the_image(shape: tuple[int, int]) -> None:
    height, width = shape
    chosen = spec("pillow_bilinear", crop_fraction=SIDE / 73)
    across = np.broadcast_to(np.linspace(0, 255, width), shape)
    down = np.broadcast_to(np.linspace(0, 255, height)[:, None], shape)
    found = preprocess(np.stack([across, down, across], axis=2).round().astype(np.uint8), chosen)
    placed = placement(ImageHeader(ImageFormat.PNG, width, height, 1, 3), chosen)
    for x, y in ((10, 20), (50, 40)):
        centre = np.array([x + 0.5, y + 0.5, x + 0.5, y + 0.5]) / SIDE
        expected = placed.to_image(centre)[:2] * (width, height) - 0.5
        seen = found[y, x, :2] / 255 * (width - 1, height - 1)
        assert np.abs(expected - seen).max() < 1.5 * max(1, width / 255)


def test_a_very_long_image_is_cropped_before_it_is_scaled() -> None:
    chosen = spec("pillow_bilinear")
    assert whole_scaled(2, 2 * MOST_SCALED, chosen) is None
    assert preprocess(noise(2, 200_000), chosen).shape == (SIDE, SIDE, 3)


def test_the_copies_of_pillow_are_part_of_an_images_cost() -> None:
    header = ImageHeader(ImageFormat.JPEG, 4000, 3000, 1, 3)

    def bytes_of(interpolation: str) -> int:
        return DecodingScales([spec(interpolation)], 50_000_000, 50_000_000).cost(b"", header).bytes

    assert bytes_of("pillow_bilinear") - bytes_of("opencv_bilinear") >= 4 * header.pixels
    assert bytes_of("opencv_bilinear") > bytes_of("bilinear"), "decoded whole"
