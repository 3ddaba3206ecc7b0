"""Which class the directories of a labelled folder hold: by label, index, class id (a WordNet id), or a class map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.errors import MALFORMED, ConfigError
from hawkvision.core.text_files import read_text

CLASS_IDS: Final = "class_ids.txt"
"""In a task's folder, if its classes have ids: one a line, in the order of the labels."""
MAX_BYTES: Final = 16 << 20
"""The longest class map, or list of class ids."""


def class_numbers(labels: Sequence[str]) -> dict[str, int]:
    """The class index of each label, and of each index as text.

    Where labels are numbers other than their own indices, as in 1, 2, 3, an index would be taken for a label. Then only
    labels name classes.
    """
    found = {label: index for index, label in enumerate(labels)}
    indices = {str(index): index for index in range(len(labels))}
    if any(indices.get(label, index) != index for label, index in found.items()):
        return found
    return indices | found


def expected_classes(numbers: Mapping[str, int]) -> str:
    """What names a class by `class_numbers`, for errors."""
    first = next((name for name, index in numbers.items() if index == 0 and name != "0"), "0")
    last = max(numbers.values())
    return f"a label such as {first!r}" + (f", or an index from 0 to {last}" if "0" in numbers else "")


def directory_classes(labels: Sequence[str], task_folder: Path, class_map: Path | None = None) -> dict[str, int]:
    """The class index of each name that a class directory may have beyond its label and its index.

    Args:
        labels: the task's, in index order.
        task_folder: of the task's manifest; its class ids are used where it has any.
        class_map: names of directories and their classes: JSON (`{"DIRECTORY": LABEL or INDEX}`, or
            `{"INDEX": ["DIRECTORY", …]}`), or lines `DIRECTORY,LABEL` (comma or tab).

    Raises:
        ConfigError: for a class map that cannot be read, or that names no class of the task.
    """
    numbers = class_numbers(labels)
    ids = task_folder / CLASS_IDS
    found = {}
    if ids.is_file():
        found = {each: index for index, each in enumerate(_text(ids).split())}
        if len(found) != len(labels):
            raise ConfigError(f"{ids}: expected {len(labels)} different class ids, one a line, got {len(found)}")
    if class_map is not None:
        for directory, name in _read_map(class_map).items():
            index = numbers.get(name, found.get(name))
            if index is None:
                raise ConfigError(
                    f"{class_map}: {directory!r}: {name!r} is no class; expected {expected_classes(numbers)}"
                )
            found[directory] = index
    return found


def _read_map(path: Path) -> dict[str, str]:
    text = _text(path)
    return _json_map(path, text) if text.lstrip().startswith("{") else _line_map(path, text)


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path}: expected a file of at most {MAX_BYTES} bytes, got {size}")
        return read_text(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8: {error}") from None


def _json_map(path: Path, text: str) -> dict[str, str]:
    try:
        entries: Mapping[str, str | int | list[str]] = msgspec.json.decode(text, type=dict[str, str | int | list[str]])
    except MALFORMED as error:
        raise ConfigError(f"{path}: expected an object of directories and classes: {error}") from None
    found = {}
    for key, value in entries.items():
        if isinstance(value, list):  # keras' imagenet_class_index.json: {"0": ["n01440764", "tench"]}
            found.update(dict.fromkeys(value[:1], key))
        else:
            found[key] = str(value)
    return found


def _line_map(path: Path, text: str) -> dict[str, str]:
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        separator = "\t" if "\t" in line else ","
        directory, _, name = (part.strip() for part in line.partition(separator))
        if not directory or not name:
            raise ConfigError(f"{path}:{number}: expected DIRECTORY,LABEL, got {line[:80]!r}")
        if directory in found:
            raise ConfigError(f"{path}:{number}: directory {directory!r} comes twice")
        found[directory] = name
    return found
