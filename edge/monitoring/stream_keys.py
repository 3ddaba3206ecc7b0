"""Names of callers and keys of streams. Streams are known by hashes, so that names from callers take bounded memory."""

from __future__ import annotations

import functools
import hashlib
from typing import Final

from hawkvision.servers.keyfile import ANYBODY, SINGLE
from hawkvision.transport.protocol.handshake_limits import network_of

KEY: Final = "key "
"""Begins the name of a caller that is known by its API key; others are known by their addresses."""


@functools.lru_cache(4096)
def caller_of(key: str, address: str) -> str:
    """Whose evidence a request is: an API key's that a key file names; else its address's, of IPv6 the /64."""
    if key not in (ANYBODY, SINGLE):
        return f"{KEY}{key}"
    try:
        return network_of(address)
    except ValueError:  # not an IP address
        return address


def stream_key(stream: str | None, caller: str = "") -> bytes:
    """The 16 bytes of a caller, or of a stream that it names: a stream belongs to its caller."""
    if stream is None:
        return hashlib.blake2b(caller.encode(), digest_size=16, person=b"caller").digest()
    salt = hashlib.blake2b(caller.encode(), digest_size=16).digest()
    return hashlib.blake2b(stream.encode(), digest_size=16, salt=salt, person=b"stream").digest()
