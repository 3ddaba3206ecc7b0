"""Draws the objects that answers name into copies of their images: `hawkvision detect --draw`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hawkvision.core.errors import ConfigError, HawkVisionError

if TYPE_CHECKING:
    from hawkvision.client.batch import Outcome


def drawing_files(draw: Path, files: Sequence[Path]) -> list[Path]:
    """Where each image is drawn: below the folder `draw`, or of one image into that file. Makes the folder.

    Raises:
        ConfigError: if there can be no such folder or file, two images have one name, or an image would be overwritten.
    """
    from hawkvision.reports.drawing import can_write

    into_file = can_write(draw) and not draw.is_dir()
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
        from hawkvision.reports.drawing import LabelledBox, draw_boxes

        objects = outcome.to_json()["objects"]
        boxes = [LabelledBox(f"{o['label']} {o['confidence']:.2f}", o["index"], o["box"]) for o in objects]
        try:
            draw_boxes(file, boxes, drawn[number])
        except (HawkVisionError, OSError) as error:
            yield file, error
        else:
            yield file, outcome
