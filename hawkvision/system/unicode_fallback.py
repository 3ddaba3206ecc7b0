"""Text for terminals: those without Unicode, for example under `LC_ALL=C`, and text that is not ours."""

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
    """The text in ASCII: symbols spelt out, letters without accents, `?` for the rest."""
    spelt = unicodedata.normalize("NFKD", text.translate(_PLAIN))
    return "".join(c if c.isascii() else "?" for c in spelt if not unicodedata.combining(c))


def on_one_line(text: str) -> str:
    """The text with `?` for line breaks and whatever else a terminal would act on, such as in names of files."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _spelt(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


def write_anything() -> None:
    """Let standard output and error accept any text; characters outside their encoding are replaced as in `plain`."""
    codecs.register_error(_HANDLER, _spelt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
