"""What terminals need: text without Unicode, for example under `LC_ALL=C`, text that is not ours, and commands whose
output nobody reads any more, as in `hawkvision classify --json … | head -1`.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import sys
import unicodedata
from collections.abc import Iterator
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


@contextlib.contextmanager
def quiet_without_reader() -> Iterator[None]:
    """End the command in the block with status 1 and without a traceback once its output has no reader.

    Output that is still buffered is written at the end of the block, where a failure can still be handled.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE or not _without_reader():
            raise
        # The interpreter flushes standard output once more when it ends.
        discarded = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discarded, sys.stdout.fileno())
        os.close(discarded)
        sys.exit(1)


def _without_reader() -> bool:
    """Whether standard output or error is a pipe or socket that the other end has closed.

    A broken pipe of any other kind, such as a connection to a server, is not the output's.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the stream has no file, or is closed
            asked = select.poll()
            asked.register(stream.fileno(), 0)
            if any(state & (select.POLLERR | select.POLLHUP) for _, state in asked.poll(0)):
                return True
    return False
