"""What still breaks the rules of the house. Each entry is a debt: an empty table is the goal."""

from __future__ import annotations

from typing import Final

PENDING_IMPORTS: Final[frozenset[tuple[str, str]]] = frozenset()
"""(room, room that it must not import)."""

PENDING_ROOMS: Final[frozenset[str]] = frozenset()
"""Folders without a row, and rows without a folder."""

PENDING_CYCLES: Final[frozenset[str]] = frozenset()
"""Modules that may stand in a cycle of one another."""

PENDING_CLASSES: Final[frozenset[str]] = frozenset()
"""Classes that may be longer than the limit."""

PENDING_DUPLICATED: Final = 0
"""As many duplicated class names, where the limit is lower."""

PENDING_FILE_LINES: Final = 0
"""The 95th percentile of the lines of a file, where the limit is lower."""

PENDING_WORDS: Final[tuple[str, ...]] = ()
"""Beginnings of paths whose files may still have old words."""
