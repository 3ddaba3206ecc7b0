"""The status of a response, and the rounds of repair that both ends reckon with."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

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
