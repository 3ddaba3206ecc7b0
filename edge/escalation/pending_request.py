"""One escalation under way, and the interim answers to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from edge.escalation.reply_validation import Escalated
from hawkvision.core.escalation_api import EscalationRequest
from hawkvision.core.trace_context import TraceContext


@dataclass(slots=True)
class PartialResults:
    """The interim answers to a progressive request."""

    latest: Escalated | None = None
    first_ms: float | None = None
    """Round trip of the first of them, in milliseconds."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first."""

    def add(self, answer: Escalated) -> None:
        """Record an answer that more members of the ensemble agreed on than on the one before."""
        self.latest = answer
        self.first_ms = answer.round_trip_ms if self.first_ms is None else self.first_ms
        self.arrived.set()


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """One escalation; the fields are the arguments of `DatacenterClient.infer`."""

    body: bytes
    request: EscalationRequest
    trace: TraceContext
    timeout_s: float
    lossless: bool
    probe: bool
    """Whether no caller waits for it."""
    parts: PartialResults = field(default_factory=PartialResults)
