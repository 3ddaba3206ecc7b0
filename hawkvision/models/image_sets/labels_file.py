"""Labels in a file of their own: a CSV file with the columns `file` and `label`, for any part of a folder's images."""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from hawkvision.core.errors import ConfigError
from hawkvision.models.image_sets.folder_classes import MAX_BYTES, expected_classes
from hawkvision.models.image_sets.labelled_images import UnlabelledImages, copies_of

MOST_NAMED: Final = 5
"""So many of the rows that cannot be used are named in the error."""


def read_labels(path: Path, images: UnlabelledImages, numbers: Mapping[str, int]) -> list[int | None]:
    """The class of each image (n,) of a folder; None for those without a label, and for copies of another image.

    Other columns are ignored, and so are rows with an empty label.

    Args:
        path: the file; each row names an image as it is called in the folder.
        images: of the folder.
        numbers: the class index of each name that a label may have.

    Raises:
        ConfigError: naming rows whose file or class is unknown or that contradict others; if there is no label at all.
    """
    first = copies_of(images.bodies)
    places = {Path(name).name: int(first[index]) for index, name in enumerate(images.files)}
    found: list[int | None] = [None] * len(images)
    unusable = []
    for line, file, label in _rows(path):
        place = places.get(file, places.get(unicodedata.normalize("NFC", file)))
        number = numbers.get(label, numbers.get(unicodedata.normalize("NFC", label)))
        if place is None:
            unusable.append(f"line {line}: no image is called {file!r}")
        elif number is None:
            unusable.append(f"line {line}: {label!r} is no class")
        elif found[place] not in (None, number):
            unusable.append(f"line {line}: {file!r}, or a copy of it, has another label above")
        else:
            found[place] = number
    if unusable:
        more = f"; and {len(unusable) - MOST_NAMED} more" if len(unusable) > MOST_NAMED else ""
        raise ConfigError(
            f"{path}: {len(unusable)} rows cannot be used: {'; '.join(unusable[:MOST_NAMED])}{more}; expected names of "
            f"images in {images.name!r}, and as label {expected_classes(numbers)}"
        )
    if all(number is None for number in found):
        raise ConfigError(f"{path}: no row has a label; expected one in the column `label`, or --unlabelled")
    return found


def _rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, file and label of each row with a label.

    Raises:
        ConfigError: if the file cannot be read, or lacks a column.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path}: expected a file of at most {MAX_BYTES} bytes, got {size}")
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            if not {"file", "label"} <= set(rows.fieldnames or ()):
                raise ConfigError(f"{path}: expected a first line with the columns file,label, got {rows.fieldnames}")
            for row in rows:
                name, label = ((row[column] or "").strip() for column in ("file", "label"))
                if label:
                    yield rows.line_num, name, label
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a CSV file in UTF-8: {error}") from None
