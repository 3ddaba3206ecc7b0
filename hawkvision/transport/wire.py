"""The bytes of the lossy transport; `WIRE.md` beside this file specifies them.

Codecs only: bytes to values and back. Whatever cannot be is a `WireError`, and costs nobody else anything.
"""

from __future__ import annotations

from typing import Final

from hawkvision.errors import HawkVisionError

MAX_DATAGRAM: Final = 1200
"""UDP payload, the least that every path of QUIC carries (RFC 9000 §14)."""
HEADER_BYTES: Final = 12
TAG_BYTES: Final = 16
FRAGMENT_HEADER_BYTES: Final = 22
OVERHEAD: Final = HEADER_BYTES + FRAGMENT_HEADER_BYTES + TAG_BYTES
FRAGMENT_ROOM: Final = MAX_DATAGRAM - OVERHEAD
"""Bytes of a symbol in one datagram."""


class WireError(HawkVisionError):
    """What arrived is not what the wire format says."""

    code = "wire_error"
