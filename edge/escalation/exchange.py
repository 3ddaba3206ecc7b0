"""One exchange with the datacenter: send a request, check the reply, and record what the outcome says of the link."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from edge.escalation.http_transport import KEY_REFUSED
from edge.escalation.reply_validation import Escalated, checked, refused
from edge.escalation.transport import (
    Escalation,
    EscalationTransport,
    ReplyLate,
    TooLargeForDatagrams,
    TransportBroken,
)
from edge.escalation.transport_selector import TransportSelector
from hawkvision.core import errors
from hawkvision.core.clock import Clock
from hawkvision.core.errors import EscalationFailed, RequestError
from hawkvision.network.circuit_breaker import BreakerState
from hawkvision.network.response_time import OutstandingRequest
from hawkvision.network.transport_choice import Transport
from hawkvision.tasks.kind import TaskKind

MEAN_GAIN: Final = 0.05
"""Weight of the newest round trip in the mean that `/v1/targets` shows; no decision depends on it."""
OWN_AMONG: Final = 5
"""Answers whose median tells what the datacenter usually takes; after a queue there, three without one suffice."""
OWN_SHARE: Final = 0.5
"""A late reply is the link's fault if the datacenter itself usually takes no more than this share of the wait, and a
round trip of an empty link what is left at most."""


class Exchanges:
    """The exchanges with one datacenter, over whichever transport each of them uses."""

    def __init__(
        self,
        url: str,
        selector: TransportSelector,
        kind: TaskKind[Any],
        clock: Clock,
        failed: Callable[[], None],
        probe: Callable[[Escalation], None],
    ) -> None:
        """Prepare.

        Args:
            url: the ingress, for errors.
            selector: the transports; it learns which replies over TCP were late.
            kind: of the task, which reads the replies.
            clock: for round trips.
            failed: called when a connection fails.
            probe: called with a request that was late while the circuit breaker is open.
        """
        self.key_refused: str | None = None
        """Why the datacenter refuses our key; None as long as it accepts it."""
        self.overloaded_at = -math.inf
        """When the datacenter last refused an image because it was overloaded."""
        self._url = url
        self._selector = selector
        self._kind = kind
        self._clock = clock
        self._on_failure = failed
        self._probe = probe
        self._mean_ms: dict[tuple[Transport, str], float] = {}
        self._own_ms: deque[float] = deque(maxlen=OWN_AMONG)
        """What the datacenter took by itself for the last complete answers."""

    def mean_ms(self, transport: Transport, stage: str) -> float | None:
        """Smoothed round trip of a stage's answers over a transport; None before the first."""
        return self._mean_ms.get((transport, stage))

    async def run(self, carrier: EscalationTransport, escalation: Escalation) -> Escalated:
        """The reply over this transport, or over HTTP if the image is too large for datagrams.

        Raises:
            RequestError: what the datacenter found wrong with the image.
            EscalationFailed: for everything else, a timeout included.
        """
        try:
            return await self._run(carrier, escalation)
        except TooLargeForDatagrams:
            return await self._run(self._selector.http, escalation)

    async def _run(self, carrier: EscalationTransport, escalation: Escalation) -> Escalated:
        request, timeout_s, times = escalation.request, escalation.timeout_s, carrier.breaker.times
        started = self._clock.now()
        self._selector.mark_used(started)
        bound_ms = times.bound_ms()
        expected = bound_ms is not None and bound_ms <= timeout_s * 1e3
        sent = times.sent(started)

        def escalated(payload: bytes) -> Escalated:
            reply = checked(payload, request, self._kind, self._url)
            return Escalated(reply, (self._clock.now() - started) * 1e3)

        def on_interim(payload: bytes) -> None:
            with suppress(EscalationFailed):  # the final reply decides whether the exchange fails
                escalation.add_interim(escalated(payload))

        try:
            status, payload = await carrier.send(escalation, on_interim)
            if status != 200:
                raise self._refusal(carrier, escalation, status, payload, sent)
            answer = escalated(payload)
        except ReplyLate:
            if escalation.interim is None:
                self._record_late(carrier, escalation, sent, expected=expected)
                raise
            answer = escalation.interim
        except TransportBroken:
            self._record_failure(carrier)
            if escalation.interim is None:
                raise
            return escalation.interim
        except asyncio.CancelledError:
            times.cancelled(sent, self._clock.now())
            raise
        else:
            if answer.reply.complete:
                self._record_mean(carrier, answer)
        finally:
            times.dropped(sent)
        self._record_answer(carrier, escalation, answer, sent, expected=expected)
        return answer

    def _record_answer(
        self,
        carrier: EscalationTransport,
        escalation: Escalation,
        answer: Escalated,
        sent: OutstandingRequest,
        *,
        expected: bool,
    ) -> None:
        """Record a reply, with a deadline or without; `expected`: it should have been on time."""
        carrier.breaker.replied(sent.sent)
        now, first_ms = self._clock.now(), escalation.first_ms
        carrier.breaker.times.answered(sent, answer.until_first_ms, now)
        if first_ms is not None:
            first = carrier.rest.sent(sent.sent + first_ms * 1e-3)
            if answer.reply.complete:
                carrier.rest.answered(first, answer.round_trip_ms - first_ms, now)
            else:
                carrier.rest.given_up(first, max(0.0, escalation.timeout_s * 1e3 - first_ms), now)
        self._record_tcp(carrier, escalation, late=False, expected=expected)

    def _record_mean(self, carrier: EscalationTransport, answer: Escalated) -> None:
        """Update the means. The number of stages is bounded: a checked reply names one that was asked."""
        key = Transport.TCP if carrier is self._selector.http else Transport.DATAGRAM, answer.reply.model
        before = self._mean_ms.get(key, answer.round_trip_ms)
        self._mean_ms[key] = before + MEAN_GAIN * (answer.round_trip_ms - before)
        self._own_ms.append(answer.datacenter_ms)

    def _record_late(
        self, carrier: EscalationTransport, escalation: Escalation, sent: OutstandingRequest, *, expected: bool
    ) -> None:
        """Record that no reply came in time; `expected`: one should have come long before."""
        now, timeout_ms = self._clock.now(), escalation.timeout_s * 1e3
        if escalation.request.deadline_ms is None:
            self._record_failure(carrier)  # even without a deadline it did not answer
            return
        # The wait counts for at most the timeout, however late the timer fired.
        waited_ms = min((now - sent.sent) * 1e3, timeout_ms)
        carrier.breaker.times.given_up(sent, waited_ms, now, probe=escalation.probe)
        self._record_tcp(carrier, escalation, late=True, expected=expected)
        if (
            carrier is self._selector.carrier
            and not escalation.probe
            and carrier.breaker.state(now) is BreakerState.OPEN
        ):
            self._probe(escalation)

    def _record_tcp(self, carrier: EscalationTransport, escalation: Escalation, *, late: bool, expected: bool) -> None:
        """Tell the selector of a request over TCP with a deadline which only the bytes on the link can have missed."""
        if carrier is not self._selector.http or escalation.request.deadline_ms is None:
            return
        if (rtt_s := self._selector.least_rtt_s) is None:
            return
        own_ms, timeout_ms = statistics.median(self._own_ms or (0.0,)), escalation.timeout_s * 1e3
        if own_ms <= OWN_SHARE * timeout_ms and own_ms + rtt_s * 1e3 <= timeout_ms:
            self._selector.record_tcp(late=late, expected=expected)

    def _record_failure(self, carrier: EscalationTransport) -> None:
        carrier.breaker.failed(self._clock.now())
        self._on_failure()

    def _refusal(
        self,
        carrier: EscalationTransport,
        escalation: Escalation,
        status: int,
        payload: bytes,
        sent: OutstandingRequest,
    ) -> RequestError | EscalationFailed:
        """Record a reply other than 200, and translate it."""
        fault, said = refused(status, payload)
        if fault is not None:
            carrier.breaker.replied(sent.sent)
            return fault
        if status in KEY_REFUSED:
            self.key_refused = said
        if status == errors.DeadlineMissed.status:
            # It is alive but too busy. A refusal at once (429) is not recorded: it caused no wait.
            now = self._clock.now()
            carrier.breaker.times.given_up(sent, (now - sent.sent) * 1e3, now, probe=escalation.probe)
        elif status in (errors.Overloaded.status, errors.TooLarge.status):
            carrier.breaker.replied(sent.sent)
            if status == errors.Overloaded.status:
                self.overloaded_at = self._clock.now()
        else:
            self._record_failure(carrier)
        return EscalationFailed(f"{self._url} refused with HTTP {status}: {said[:200]}")
