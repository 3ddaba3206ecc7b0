"""The bytes of the datagram transport; `WIRE.md` beside this file specifies them.

Codecs only: bytes to values and back. Whatever cannot be is a `WireError`, and costs nobody else anything.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
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


MAX_NACKS: Final = 4
"""Rounds of requests for missing fragments, each only if its repair would still arrive in time."""
REPAIR_GROWTH: Final = 1.5
"""The growth of the wait for a repair from round to round."""


class Status(IntEnum):
    """The status of a response; a number never gets another meaning (`WIRE.md` §6)."""

    OK = 0
    REFUSED = 1
    """The application's own error, in the body."""
    OVERLOADED = 2
    EXPIRED = 3
    """Too little arrived before the deadline."""
    BROKEN = 4
    """The fragments do not fit together, or the response is too long."""
    NO_TEMPLATE = 5
    """The request that the fragments name was never registered."""
