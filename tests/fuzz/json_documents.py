"""Documents of JSON that differ from a good one at one place, and values that may stand anywhere."""

from __future__ import annotations

import copy
from typing import Any, Final, TypeAlias, cast

from hypothesis import strategies as st

Path: TypeAlias = tuple[str | int, ...]

EDGES: Final[st.SearchStrategy[Any]] = st.sampled_from(
    [None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**40, -(2**63), 0.0, -0.5, 1e-9, 1.5, 1e308, -1e308, "", "a", [], {}]
)
"""Values at which parsers break."""
VALUES: Final = EDGES | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
"""Anything that JSON can state."""


def places(document: Any, path: Path = ()) -> list[Path]:
    """The paths of all keys and items in a document."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [found for key, each in inner for found in ((*path, key), *places(each, (*path, key)))]


@st.composite
def altered(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three of its values replaced, removed or repeated."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        found = places(changed)
        if not found:
            break
        *path, end = draw(st.sampled_from(found))
        table, last = changed, cast("Any", end)
        for key in path:
            table = table[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "repeat"])):
            case "remove":
                del table[last]
            case "repeat" if isinstance(table, list):
                table += [copy.deepcopy(table[last])] * draw(st.sampled_from([1, 2, 150]))
            case _:
                table[last] = draw(VALUES)
    return changed
