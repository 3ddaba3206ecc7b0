"""Draws the objects that answers name into copies of their images: `hawkvision detect --draw`."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hawkvision.core.errors import BadImage, ConfigError, HawkVisionError
from hawkvision.system.terminal import plain

if TYPE_CHECKING:
    from hawkvision.client.batch import Outcome

DRAWN: Final = (".jpg", ".jpeg", ".png", ".webp")
"""Endings of files that boxes are drawn into."""
GOLDEN: Final = 0.618034
"""Share of the colour wheel between two classes, so that neighbouring indices differ."""
LEAST_TEXT: Final = 0.4
"""Scale of the text on small images."""


def drawing_files(draw: Path, files: Sequence[Path]) -> list[Path]:
    """Where each image is drawn: below the folder `draw`, or of one image into that file. Makes the folder.

    Raises:
        ConfigError: if there can be no such folder or file, two images have one name, or an image would be overwritten.
    """
    into_file = draw.suffix.lower() in DRAWN and not draw.is_dir()
    if into_file and len(files) > 1:
        raise ConfigError(f"--draw: expected a folder for {len(files)} images, got the file {draw}")
    if not into_file and len(files) == 1 and draw.suffix and not draw.is_dir():
        raise ConfigError(f"--draw: {draw}: expected a folder, or a name that ends in .jpg, .png or .webp")
    if not into_file and len({file.name for file in files}) < len(files):
        raise ConfigError("--draw: expected images of different names, because one folder takes all of them")
    drawn = [draw] if into_file else [draw / file.name for file in files]
    images = {file.resolve() for file in files}
    for each in drawn:
        if each.resolve() in images:
            raise ConfigError(f"--draw: {each} is one of the images; expected a place that overwrites none")
    folder = draw.parent if into_file else draw
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--draw: {folder}: {error.strerror}") from None
    return drawn


def drawing(outcomes: Iterable[tuple[Path, Outcome]], drawn: Sequence[Path] | None) -> Iterator[tuple[Path, Outcome]]:
    """The outcomes; each answer is drawn, and is an error if that fails. With None nothing is drawn."""
    for number, (file, outcome) in enumerate(outcomes):
        if drawn is None or isinstance(outcome, Exception):
            yield file, outcome
            continue
        try:
            _draw(outcome.to_json()["objects"], file, drawn[number])
        except (HawkVisionError, OSError) as error:
            yield file, error
        else:
            yield file, outcome


def _draw(objects: Iterable[Mapping[str, Any]], source: Path, target: Path) -> None:
    """Write the upright image of `source` with the objects' boxes, labelled in ASCII, in the format of `target`.

    Raises:
        BadImage: if the image cannot be read, or not be written in that format.
        OSError: if a file cannot be read or written.
    """
    import cv2
    import numpy as np

    pixels = cv2.imdecode(np.frombuffer(source.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise BadImage(f"{source}: boxes are drawn into JPEG, PNG and WebP images")
    height, width = pixels.shape[:2]
    line = max(1, round(min(height, width) / 250))
    scale = max(LEAST_TEXT, min(height, width) / 900)
    for each in objects:
        text = plain(f"{each['label']} {each['confidence']:.2f}")
        x1, y1, x2, y2 = each["box"]
        left, top, right, bottom = round(x1 * width), round(y1 * height), round(x2 * width), round(y2 * height)
        colour = [round(255 * part) for part in colorsys.hsv_to_rgb(each["index"] * GOLDEN % 1.0, 0.9, 0.75)][::-1]
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
