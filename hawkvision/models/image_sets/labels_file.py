"""Labels in a file of their own: a CSV file with the columns `file` and `label`, for any part of a folder's images.

A label is a class, `neither` for one that none of the answers shown is, or `cannot_tell`, which is as good as none. A
column `again` has what was said of the image another time.
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from hawkvision.core.errors import ConfigError
from hawkvision.models.image_sets.folder_classes import MAX_BYTES, expected_classes
from hawkvision.models.image_sets.labelled_images import LabelledImages, UnlabelledImages, copies_of

COLUMNS: Final = ("file", "label", "again")
NEITHER, CANNOT_TELL = "neither", "cannot_tell"
Words: TypeAlias = tuple[str, str]
"""Both labels of an image as they are written; empty where there is none."""
MOST_NAMED: Final = 5
"""So many of the rows that cannot be used are named in the error."""


def read_labels(path: Path, images: UnlabelledImages, numbers: Mapping[str, int]) -> list[int | None]:
    """The class of each image (n,) of a folder; None for those without a label, and for copies of another image.

    The class after the last is that of `NEITHER`. There is none where two labels contradict each other.

    Args:
        path: the file; each row names an image as it is called in the folder.
        images: of the folder.
        numbers: the class index of each name that a label may have.

    Raises:
        ConfigError: as `read_words`; if there is no label at all.
    """
    found: list[int | None] = [None] * len(images)
    for place, words in read_words(path, images, numbers).items():
        found[place] = agreed(words, numbers)
    if all(number is None for number in found):
        raise ConfigError(f"{path}: no row has a label; expected one in the column `label`, or --unlabelled")
    return found


def read_words(path: Path, images: LabelledImages | UnlabelledImages, numbers: Mapping[str, int]) -> dict[int, Words]:
    """Both labels of each image that has one, as they are written, by the image's index; of copies, the first's.

    Other columns are ignored, and so are rows with an empty label.

    Raises:
        ConfigError: naming rows whose file or class is unknown or that contradict others.
    """
    first = copies_of(images.bodies)
    places = {Path(name).name: int(first[index]) for index, name in enumerate(images.files)}
    found: dict[int, Words] = {}
    unusable = []
    for line, file, *words in _rows(path):
        label, again = words
        place = places.get(file, places.get(unicodedata.normalize("NFC", file)))
        unknown = next((word for word in words if not _known(word, numbers)), None)
        if place is None:
            unusable.append(f"line {line}: no image is called {file!r}")
        elif unknown is not None:
            unusable.append(f"line {line}: {unknown!r} is no class")
        elif place in found and not _alike(found[place], (label, again), numbers):
            unusable.append(f"line {line}: {file!r}, or a copy of it, has another label above")
        else:
            found[place] = label, again or found.get(place, ("", ""))[1]
    if unusable:
        more = f"; and {len(unusable) - MOST_NAMED} more" if len(unusable) > MOST_NAMED else ""
        raise ConfigError(
            f"{path}: {len(unusable)} rows cannot be used: {'; '.join(unusable[:MOST_NAMED])}{more}; expected names of "
            f"images in {images.name!r}, and as label {expected_classes(numbers)}"
        )
    return found


def class_of(word: str, numbers: Mapping[str, int]) -> int | None:
    """The class that a label says; None if it does not tell."""
    named = numbers.get(word, numbers.get(unicodedata.normalize("NFC", word)))
    return max(numbers.values()) + 1 if named is None and word == NEITHER else named


def agreed(words: Words, numbers: Mapping[str, int]) -> int | None:
    """The class that both labels say; None if they contradict each other, or do not tell."""
    label, again = words
    found = class_of(label, numbers)
    return None if again and class_of(again, numbers) != found else found


def _alike(one: Words, other: Words, numbers: Mapping[str, int]) -> bool:
    """Whether two rows of an image say the same, as far as both say anything."""
    return all(class_of(a, numbers) == class_of(b, numbers) for a, b in zip(one, other, strict=True) if a and b)


def _known(word: str, numbers: Mapping[str, int]) -> bool:
    return word in ("", CANNOT_TELL) or class_of(word, numbers) is not None


def _rows(path: Path) -> Iterator[tuple[int, str, str, str]]:
    """Line, file and both labels of each row with a label.

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
                name, label, again = ((row.get(column) or "").strip() for column in COLUMNS)
                if label:
                    yield rows.line_num, name, label, again
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a CSV file in UTF-8: {error}") from None
