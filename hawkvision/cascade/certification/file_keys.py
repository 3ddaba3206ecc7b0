"""Keys of profiles and site certificates: what older formats called them, and what hashes still call them."""

from __future__ import annotations

from typing import Any, Final

RENAMED_KEYS: Final = {
    "rungs": "stages",
    "middle": "intermediate",
    "middle_score": "intermediate_score",
    "middle_watch": "intermediate_watch",
    "middle_threshold": "intermediate_threshold",
    "hop_ms": "escalation_ms",
}
"""Old keys (profiles up to format 4, site certificates of format 1) and their present names."""

_FIRST_KEYS: Final = {new: old for old, new in RENAMED_KEYS.items()}
_NAMES: Final = frozenset({"models"})
"""Members whose own keys are names of models, which no format renames."""


def in_present_words(content: Any) -> Any:
    """The content of a file of an older format, under the keys of the newest one."""
    if isinstance(content, dict):
        return {
            RENAMED_KEYS.get(key, key): value if key in _NAMES else in_present_words(value)
            for key, value in content.items()
        }
    if isinstance(content, list):
        return [in_present_words(each) for each in content]
    return content


def in_first_words(content: Any) -> Any:
    """Content to be hashed, under the keys of the first format, so that a renamed key changes no hash."""
    if isinstance(content, dict):
        return {_FIRST_KEYS.get(key, key): in_first_words(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [in_first_words(each) for each in content]
    return content
