"""What is asked of the datacenter, and what has come of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from edge.escalation.reply_validation import Escalated
from hawkvision.core.escalation_api import EscalationRequest
from hawkvision.core.trace import TraceContext


@dataclass(slots=True)
class PartialResults:
    """What has come of a progressive request while the last is still awaited."""

    latest: Escalated | None = None
    first_ms: float | None = None
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, answer: Escalated) -> None:
        """Another one, of more members."""
        self.latest = answer
        self.first_ms = answer.round_trip_ms if self.first_ms is None else self.first_ms
        self.came.set()


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """One escalation, as the arguments of `DatacenterClient.infer` say."""

    body: bytes
    request: EscalationRequest
    trace: TraceContext
    timeout_s: float
    lossless: bool
    probe: bool
    parts: PartialResults = field(default_factory=PartialResults)
