"""What every client is: one image and one target in, one reply out, whatever the protocol.

A `RequestClient` never raises for what a server does: if a server refuses, breaks off or times out, the load test goes
on and its report says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from hawkvision.core.types import AccuracyStatus


class ClientReply(msgspec.Struct, frozen=True):
    """What came back; the fields are those of `loadgen.workload.record.RequestOutcome`, and the prediction."""

    status: int
    error: str = ""
    index: int | None = None
    confidence: float | None = None
    tier: str = ""
    model: str = ""
    escalated: bool = False
    degraded: bool = False
    guarantee: AccuracyStatus | None = None
    max_drop: float | None = None
    received_fraction: float = 1.0
    sent_bytes: int = 0
    prediction: Any = None
    """Of the task's kind; None if the reply has none, or the kind is not known."""

    def recorded(self) -> dict[str, Any]:
        """The fields that are recorded."""
        fields = msgspec.structs.asdict(self)
        del fields["prediction"]
        return fields


class RequestTimes:
    """When one request may be sent, was sent, and was answered: by `time.monotonic`, taken where it happens.

    What the generator does before the first byte leaves and after the last has come, it does on its own account.
    """

    __slots__ = ("done", "due", "sent")

    def __init__(self, due: float = 0.0) -> None:
        """Not to be sent before `due`, which is at most a fraction of a millisecond ahead: who sends stands still."""
        self.due = due
        self.sent: float | None = None
        """None until it is."""
        self.done: float | None = None
        """None until the reply is whole."""

    def send(self) -> None:
        """Called right before the first byte leaves: wait until it is time. Of several attempts the first counts."""
        while (now := time.monotonic()) < self.due:
            pass
        if self.sent is None:
            self.sent = now


class RequestClient(Protocol):
    """A client of one protocol, used by one event loop."""

    async def open(self) -> None:
        """Connect, so that the first request pays for no handshake.

        Raises:
            HawkVisionError: if no server answers.
        """

    async def ask(self, image: bytes, fields: Mapping[str, str], times: RequestTimes) -> ClientReply:
        """Send one image with its target's fields, not before it is due, and say in `times` when it left and came."""

    async def close(self) -> None:
        """Disconnect."""
