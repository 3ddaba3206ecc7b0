"""How a server is asked: one picture, one target, one reply; whatever the protocol.

An `Asker` never raises for what a server does: a load test goes on when a server refuses, breaks off or times out, and
says so in its report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from hawkvision.types import PromiseStatus


class Replied(msgspec.Struct, frozen=True):
    """What came back; the fields are those of `loadgen.record.Outcome`."""

    status: int
    error: str = ""
    index: int | None = None
    confidence: float | None = None
    tier: str = ""
    model: str = ""
    escalated: bool = False
    degraded: bool = False
    promise: PromiseStatus | None = None
    max_drop: float | None = None
    received_fraction: float = 1.0
    sent_bytes: int = 0


class Asker(Protocol):
    """A client of one protocol, used by one event loop."""

    async def open(self) -> None:
        """Connect, so that the first request pays for no handshake.

        Raises:
            HawkVisionError: if there is nobody.
        """

    async def ask(self, picture: bytes, fields: Mapping[str, str]) -> Replied:
        """Send one picture with its target's fields."""

    async def close(self) -> None:
        """Disconnect."""
