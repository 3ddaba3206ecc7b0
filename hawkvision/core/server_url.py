"""URLs of servers, and the path below which a server answers. Each setting and option that takes one checks it here."""

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
