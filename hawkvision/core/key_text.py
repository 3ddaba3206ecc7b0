"""What a key looks like as text, wherever it comes from: a setting, a variable, a file, a command line."""

from __future__ import annotations

from typing import Final

from hawkvision.core.errors import ConfigError

MIN_KEY_CHARACTERS: Final = 16
"""Of a key that a server asks for: 64 bits where it is hexadecimal. Their hashes are stored and proofs of them sent, so
a key must be too long to be found by trying; those that `hawkvision keys add` makes have 256 bits."""
MAX_KEY_CHARACTERS: Final = 1024
"""Headers hold 64 KiB, and a hello of the datagram transport much less."""
ADVICE: Final = "`openssl rand -hex 32` or `hawkvision keys add` makes a good one"


def clean_key(text: str, where: str) -> str:
    """A key that is sent: without the line end that files and variables give it.

    Raises:
        ConfigError: if what is left could not be sent in a header; names `where` and never the key.
    """
    key = text.rstrip()
    if not key:
        raise ConfigError(f"{where}: expected a key, got an empty text; {ADVICE}")
    if len(key) > MAX_KEY_CHARACTERS:
        raise ConfigError(f"{where}: expected a key of at most {MAX_KEY_CHARACTERS} characters, got {len(key)}")
    for place, character in enumerate(key, 1):
        if not "!" <= character <= "~":
            raise ConfigError(
                f"{where}: expected visible ASCII characters without blanks, got U+{ord(character):04X} as character "
                f"{place} of {len(key)}"
            )
    return key


def own_key(text: str, where: str) -> str:
    """A key that a server asks its callers for: clean, and long enough.

    Raises:
        ConfigError: as `clean_key`, and for fewer than `MIN_KEY_CHARACTERS`.
    """
    key = clean_key(text, where)
    if len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"{where}: expected a key of at least {MIN_KEY_CHARACTERS} characters, got {len(key)}; {ADVICE}"
        )
    return key
