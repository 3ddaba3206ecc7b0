"""Reads text files with or without a byte-order mark."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Final

_WIDE_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode_text(data: bytes) -> str:
    """The text of a file in UTF-8, with or without a byte-order mark, or in UTF-16 with one.

    Raises:
        UnicodeDecodeError: if it is neither.
    """
    return data.decode("utf-16" if data.startswith(_WIDE_MARKS) else "utf-8-sig")


def read_text(path: Path) -> str:
    """The text of a file, with every line end as a newline.

    Raises:
        OSError: if it cannot be read.
        UnicodeDecodeError: as `decode_text`.
    """
    return decode_text(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")
