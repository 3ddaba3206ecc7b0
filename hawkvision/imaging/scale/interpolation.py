"""Scales images as the interpolations of `InputSpec` say.

    bilinear, bicubic, area    OpenCV's; `preprocessing` averages areas instead when shrinking by more than two
    opencv_*                   as `cv2.resize` does at any factor; bilinear is also TensorFlow's and Keras' `resize`
    pillow_*                   as Pillow's `Image.resize`, whose filters widen with the factor; torchvision's `Resize`

The last two groups are exact: they scale the whole decoded image, in one step.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, Final

import cv2
import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels
from hawkvision.imaging.scale import bicubic
from hawkvision.models.input_spec import Interpolation

_OPENCV: Final[Mapping[str, int]] = {
    "bilinear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "opencv_bilinear": cv2.INTER_LINEAR,
    "opencv_bicubic": cv2.INTER_CUBIC,
    "opencv_area": cv2.INTER_AREA,
}
_PILLOW: Final[Mapping[str, str]] = {"pillow_bilinear": "BILINEAR", "pillow_bicubic": "BICUBIC"}
MISSING: Final = "Pillow is not installed, which this interpolation needs: pip install 'hawkvision[formats]'"


def scaled(pixels: Pixels, height: int, width: int, interpolation: Interpolation) -> Pixels:
    """The image (h, w, 3) as (height, width, 3).

    Raises:
        BackendError: if the interpolation needs Pillow, and it is not installed.
    """
    if pixels.shape[:2] == (height, width):
        return np.ascontiguousarray(pixels)
    if interpolation == "bicubic":
        return bicubic.scaled(pixels, width, height)
    if interpolation in _PILLOW:
        return _by_pillow(pixels, height, width, _PILLOW[interpolation])
    made: Pixels = cv2.resize(pixels, (width, height), interpolation=_OPENCV[interpolation])
    return made


def _by_pillow(pixels: Pixels, height: int, width: int, method: str) -> Pixels:
    pillow = _pillow()
    resized = pillow.fromarray(np.ascontiguousarray(pixels)).resize((width, height), pillow.Resampling[method])
    made: Pixels = np.asarray(resized)
    return made


@functools.cache
def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise BackendError(MISSING) from None
