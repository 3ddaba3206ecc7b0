"""The interface of a transport to the datacenter, and why one fails.

A transport carries bytes and reports why it failed; it does not interpret replies. `edge.escalation.client` chooses the
transport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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


def ignore_interim(_: bytes) -> None:
    """Does nothing with an interim body."""


class EscalationTransport(Protocol):
    """A transport to the datacenter."""

    breaker: CircuitBreaker
    """Whether requests are let through; holds the round trips until the first answer."""
    rest: ResponseTimes
    """Times from the first answer to a progressive request until the last."""

    async def send(
        self,
        body: bytes,
        request: EscalationRequest,
        trace: TraceContext,
        timeout_s: float,
        *,
        lossless: bool,
        on_interim: Callable[[bytes], None] = ignore_interim,
    ) -> tuple[int, bytes]:
        """Send an image; gives the reply's HTTP status and body.

        Args:
            body: the image.
            request: what is asked.
            trace: the span of this request.
            timeout_s: longest wait for the reply.
            lossless: send the image's bytes unchanged.
            on_interim: called with each interim body of a progressive request as soon as it arrives.

        Raises:
            TransportBroken: if the transport does not work.
            ReplyLate: if no reply came in time.
            RequestError: what is wrong with the image, if the transport had to decode it.
        """
        ...
