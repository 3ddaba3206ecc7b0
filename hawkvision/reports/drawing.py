"""Draws labelled boxes into images, for people."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import cv2
import numpy as np

from hawkvision.core.errors import BadImage
from hawkvision.system.unicode_fallback import plain

GOLDEN: Final = 0.618034
"""Share of the colour wheel between two classes, so that neighbouring indices differ."""
LEAST_TEXT: Final = 0.4
"""Scale of the text on small images."""


class LabelledBox(NamedTuple):
    """What is drawn of one object."""

    text: str
    class_index: int
    """Of its class, which chooses the colour."""
    corners: tuple[float, float, float, float]
    """x1, y1, x2, y2: fractions of the width and height of the upright image."""


def can_write(target: Path) -> bool:
    """Whether the name of a file says a format that `draw_boxes` writes."""
    return target.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp")


def draw_boxes(source: Path, boxes: Iterable[LabelledBox], target: Path) -> None:
    """Write the upright image of `source` with boxes to `target`, in the format that its name says.

    Labels are written in ASCII, as `plain` spells them.

    Raises:
        BadImage: if the image cannot be read, or not be written in that format.
        OSError: if a file cannot be read or written.
    """
    pixels = cv2.imdecode(np.frombuffer(source.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise BadImage(f"{source}: boxes are drawn into JPEG, PNG and WebP images")
    height, width = pixels.shape[:2]
    line = max(1, round(min(height, width) / 250))
    scale = max(LEAST_TEXT, min(height, width) / 900)
    for label, class_index, (x1, y1, x2, y2) in boxes:
        text = plain(label)
        left, top, right, bottom = round(x1 * width), round(y1 * height), round(x2 * width), round(y2 * height)
        colour = _colour(class_index)
        cv2.rectangle(pixels, (left, top), (right, bottom), colour, line)
        (across, up), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, line)
        base = max(top, up + 2 * line)
        cv2.rectangle(pixels, (left, base - up - 2 * line), (left + across, base), colour, cv2.FILLED)
        white = (255, 255, 255)
        cv2.putText(pixels, text, (left, base - line), cv2.FONT_HERSHEY_SIMPLEX, scale, white, line, cv2.LINE_AA)
    try:
        done, written = cv2.imencode(target.suffix or ".jpg", pixels)
    except cv2.error:
        done = False
    if not done:
        raise BadImage(f"{target}: expected a name that ends in .jpg, .png or .webp")
    target.write_bytes(written.tobytes())


def _colour(index: int) -> tuple[int, int, int]:
    """A dark colour of a class, as blue, green, red."""
    red, green, blue = colorsys.hsv_to_rgb(index * GOLDEN % 1.0, 0.9, 0.75)
    return round(255 * blue), round(255 * green), round(255 * red)
