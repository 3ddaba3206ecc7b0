"""The bytes of the datagram transport; `WIRE.md` beside this file specifies them.

Codecs only: bytes to values and back. Whatever cannot be is a `WireError`, and costs nobody else anything.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from hawkvision.core.errors import HawkVisionError

MAX_DATAGRAM: Final = 1200
"""UDP payload, the least that every path of QUIC carries (RFC 9000 §14)."""
HEADER_BYTES: Final = 12
TAG_BYTES: Final = 16
FRAGMENT_HEADER_BYTES: Final = 22
OVERHEAD: Final = HEADER_BYTES + FRAGMENT_HEADER_BYTES + TAG_BYTES
FRAGMENT_ROOM: Final = MAX_DATAGRAM - OVERHEAD
"""Bytes of a symbol in one datagram."""


class Drop(StrEnum):
    """Why a datagram was dropped."""

    MALFORMED = "malformed"
    """Neither protocol's, or of frames that break their format."""
    NO_SESSION = "no_session"
    """Sealed, for a session that there is not: of a stranger, or of the time before a restart."""
    BAD_SEAL = "bad_seal"
    """Forged or damaged."""
    REPLAYED = "replayed"
    """Seen before, or too late to tell."""
    NO_CONNECTION = "no_connection"
    """QUIC, for a connection that there is not."""
    BAD_TOKEN = "bad_token"  # noqa: S105  a reason
    """QUIC, with a token that is forged, another's or old."""
    CROWDED = "crowded"
    """QUIC, from a stranger, while more are answered or half inside than may be."""


class WireError(HawkVisionError):
    """What arrived is not what the wire format says."""

    code = "wire_error"
