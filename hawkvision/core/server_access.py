"""How a server is reached: its URL and its key, each checked as text wherever a setting or option gives one."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from hawkvision.core.errors import ConfigError

EXPECTED: Final = "http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]"
_PATH: Final = re.compile(r"(/[\w.~!$&'()*+,;=:@%-]+)*/?", re.ASCII)
"""The characters of RFC 3986 §3.3, without empty segments."""
_PREFIX: Final = re.compile(r"(/[\w.~-]+)+", re.ASCII)
_MOVES: Final = {".", ".."}


def check_server_url(where: str, url: str) -> SplitResult:
    """The parts of a server's URL. Its path, if any, goes before each path of the API.

    Args:
        where: the setting, option or argument, for errors.
        url: the URL; a slash at its end makes no difference.

    Raises:
        ConfigError: if it is no such URL, or has a query, a fragment, a user name or a password.
    """
    expected = f"{where}: expected {EXPECTED}, got "
    if "@" in re.split(r"[/?#]", url.partition("//")[2])[0]:
        raise ConfigError(f"{expected}one with a user name or password, which logs would show; keys have settings")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # an unclosed bracket, or a malformed port
        raise ConfigError(f"{expected}{url!r} ({error})") from None
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise ConfigError(f"{expected}{url!r} with a query or a fragment")
    named = parts.scheme in ("http", "https") and parts.hostname and port != 0
    # urlsplit drops tabs and newlines, and accepts blanks.
    if not named or any(character.isspace() for character in url):
        raise ConfigError(f"{expected}{url!r}")
    if _PATH.fullmatch(parts.path) is None or not _MOVES.isdisjoint(parts.path.split("/")):
        raise ConfigError(f"{expected}{url!r}, whose path is malformed")
    return parts


def check_route_prefix(where: str, prefix: str) -> None:
    """Check the path below which a server answers.

    Raises:
        ConfigError: if it is neither `/` nor a path without a slash at its end.
    """
    if prefix == "/":
        return
    segments = prefix.split("/")
    if _PREFIX.fullmatch(prefix) is None or not _MOVES.isdisjoint(segments):
        raise ConfigError(
            f"{where}: expected / or a path such as /vision, of letters, digits and ._~-, without a slash at its end, "
            f"got {prefix!r}"
        )
    if segments[1] == "-":
        raise ConfigError(f"{where}: {prefix!r} is not free: Ray Serve answers below /- itself")


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
