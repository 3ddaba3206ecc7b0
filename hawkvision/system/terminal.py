"""Text for terminals and files that take less than Unicode, as under `LC_ALL=C` or in a Windows console."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata
from typing import Final

_PLAIN: Final = str.maketrans(
    {
        "≤": "<=",
        "≥": ">=",
        "±": "+-",
        "×": "x",
        "·": ".",
        "µ": "u",
        "–": "-",
        "—": "-",
        "−": "-",
        "…": "...",
        "→": "->",
        "←": "<-",
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
    }
)
_HANDLER: Final = "hawkvision.plain"


def plain(text: str) -> str:
    """The text in ASCII: signs spelt out, letters without their accents, `?` for the rest."""
    spelt = unicodedata.normalize("NFKD", text.translate(_PLAIN))
    return "".join(c if c.isascii() else "?" for c in spelt if not unicodedata.combining(c))


def _spelt(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


def write_anything() -> None:
    """Let standard output and error take any text from now on, spelt out where their encoding has no such signs."""
    codecs.register_error(_HANDLER, _spelt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
