"""Classes that are found by name as entry points of installed packages."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TypeVar

from hawkvision.core.errors import ManifestError

ClassT = TypeVar("ClassT")


def names(group: str) -> tuple[str, ...]:
    """The names in a group of entry points, sorted. Nothing is loaded."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def load(group: str, name: str, base: type[ClassT], word: str) -> type[ClassT]:
    """The class of that name, which errors call by `word`.

    Others are not loaded, so that one that is broken does not disturb them.

    Raises:
        ManifestError: if it is not installed, installed twice, cannot be loaded or is no subclass of `base`.
    """
    found = {entry.value: entry for entry in entry_points(group=group, name=name)}
    what = f"{word} {name!r}"
    if not found:
        raise ManifestError(f"{what} is not installed; there are {', '.join(names(group)) or 'none'}")
    if len(found) > 1:
        raise ManifestError(f"{what} is installed more than once: {', '.join(sorted(found))}")
    (entry,) = found.values()
    try:
        loaded = entry.load()
    except Exception as error:
        raise ManifestError(f"{what}: entry point of {group}: {type(error).__name__}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ManifestError(f"{what}: entry point of {group}: {entry.value} is no {base.__name__}")
    return loaded
