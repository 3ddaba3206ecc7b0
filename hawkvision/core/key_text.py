"""Checks of keys as text, from a setting, a variable, a file or a command line."""

from __future__ import annotations

from typing import Final

from hawkvision.core.errors import ConfigError

MIN_KEY_CHARACTERS: Final = 16
"""Fewest characters of a server's key, 64 bits if it is hexadecimal. Hashes of keys are stored and proofs sent, so a
key must be too long to guess. Keys of `hawkvision keys add` have 256 bits."""
MAX_KEY_CHARACTERS: Final = 1024
"""Most characters of a key; it must fit into a hello of the datagram transport."""
ADVICE: Final = "`openssl rand -hex 32` or `hawkvision keys add` makes a good one"


def clean_key(text: str, where: str) -> str:
    """A key to send, without the line end that files and variables add.

    Raises:
        ConfigError: if a header cannot carry it; the message names `where`, never the key.
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
    """A key that a server requires: clean and long enough.

    Raises:
        ConfigError: as `clean_key`, and for fewer than `MIN_KEY_CHARACTERS`.
    """
    key = clean_key(text, where)
    if len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"{where}: expected a key of at least {MIN_KEY_CHARACTERS} characters, got {len(key)}; {ADVICE}"
        )
    return key
