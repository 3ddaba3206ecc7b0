"""An escalation, the interface of the transports that carry it, and why one fails.

A transport carries bytes and reports why it failed; it does not interpret replies. `edge.escalation.client` chooses the
transport.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import NamedTuple, Protocol

from edge.escalation.reply_validation import Escalated
from hawkvision.core.errors import EscalationFailed
from hawkvision.core.escalation_api import EscalationRequest
from hawkvision.core.trace_context import TraceContext
from hawkvision.network.circuit_breaker import CircuitBreaker
from hawkvision.network.response_time import ResponseTimes


class TransportBroken(EscalationFailed):
    """The transport does not work: the connection was refused or broke off, or there is none."""


class KeyRefused(EscalationFailed):
    """The datacenter does not know our key, or the key may not ask for inference."""


class ReplyLate(EscalationFailed):
    """No reply came within the timeout."""


class TooLargeForDatagrams(EscalationFailed):
    """The image does not fit the datagram transport; another transport may carry it."""


class Ingress(NamedTuple):
    """How the datacenter is reached."""

    url: str
    api_key: str | None = None
    connections: int = 8
    """HTTP connections at most."""
    tls: ssl.SSLContext | None = None
    """For https; None trusts the system's authorities."""


class Escalation:
    """One image on its way to the datacenter, and the interim answers to it."""

    def __init__(
        self,
        body: bytes,
        request: EscalationRequest,
        trace: TraceContext,
        timeout_s: float,
        lossless: bool = False,
        *,
        probe: bool = False,
    ) -> None:
        """Prepare to send.

        Args:
            body: the image, from `DatacenterClient.prepare_image`.
            request: what is asked; with `intermediate`, the reply's `model` says which stage answered.
            trace: the span of this request.
            timeout_s: longest wait. A progressive request then ends with its latest interim answer, if there is one.
            lossless: forbid the datagram transport to send less than `body`; else the reply says what was received.
            probe: whether no caller waits for it.
        """
        self.body = body
        self.request = request
        self.trace = trace
        self.timeout_s = timeout_s
        self.lossless = lossless
        self.probe = probe
        self.interim: Escalated | None = None
        """The latest interim answer to a progressive request."""
        self.first_ms: float | None = None
        """Round trip of the first of them, in milliseconds."""
        self.begun = asyncio.Event()
        """Set with the first of them."""

    def add_interim(self, answer: Escalated) -> None:
        """Record an answer that more members of the ensemble agreed on than on the one before."""
        self.interim = answer
        self.first_ms = answer.round_trip_ms if self.first_ms is None else self.first_ms
        self.begun.set()


def ignore_interim(_: bytes) -> None:
    """Does nothing with an interim body."""


class EscalationTransport(Protocol):
    """A transport to the datacenter."""

    breaker: CircuitBreaker
    """Whether requests are let through; holds the round trips until the first answer."""
    rest: ResponseTimes
    """Times from the first answer to a progressive request until the last."""

    async def send(
        self, escalation: Escalation, on_interim: Callable[[bytes], None] = ignore_interim
    ) -> tuple[int, bytes]:
        """Send an image; gives the reply's HTTP status and body.

        Cancelled, it lets the datacenter drop the image, unless to tell it so would cost the next image time.

        Args:
            escalation: what is sent, and how long its reply is awaited.
            on_interim: called with each interim body of a progressive request as soon as it arrives.

        Raises:
            TransportBroken: if the transport does not work.
            ReplyLate: if no reply came in time.
            RequestError: what is wrong with the image, if the transport had to decode it.
        """
        ...
