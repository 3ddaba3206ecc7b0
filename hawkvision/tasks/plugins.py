"""Classes by name: HawkVision's own in a table, those of other packages as entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from hawkvision.core.errors import ManifestError

ClassT = TypeVar("ClassT")


def names(own: Mapping[str, type], group: str) -> tuple[str, ...]:
    """The names of our own and in a group of entry points, sorted. Nothing is loaded."""
    return tuple(sorted({*own, *(entry.name for entry in entry_points(group=group))}))


def load(own: Mapping[str, type[ClassT]], group: str, name: str, base: type[ClassT], word: str) -> type[ClassT]:
    """The class of that name, which errors call by `word`. Nobody else's class takes the place of one of our own.

    Others are not loaded, so that one that is broken does not disturb them.

    Raises:
        ManifestError: if it is not installed, installed twice, cannot be loaded or is no subclass of `base`.
    """
    if name in own:
        return own[name]
    found = {entry.value: entry for entry in entry_points(group=group, name=name)}
    what = f"{word} {name!r}"
    if not found:
        raise ManifestError(f"{what} is not installed; there are {', '.join(names(own, group))}")
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
