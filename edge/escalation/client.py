"""The client of the datacenter tier: sends images by HTTP or as datagrams, and knows the state of the link.

    infer ─► transport in use ─┬─ TCP ──────► HttpTransport ──────┬─► reply checked ─► Escalated
                ▲              └─ DATAGRAM ─► DatagramTransport ──┘
                └── `edge.escalation.transport_selector` ◄── probes, losses, late replies

A failure never reaches the caller: `EscalationFailed` tells the node to answer by itself. The caller hears only of a
fault that the datacenter finds in the image. Every reply is checked before it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from edge.escalation.background import Probes, Waits
from edge.escalation.exchange import Exchanges
from edge.escalation.http_transport import HttpTransport
from edge.escalation.image_reducer import ImageReducer
from edge.escalation.link_report import LinkReport, LinkState
from edge.escalation.reply_validation import Escalated
from edge.escalation.transport import Escalation, EscalationTransport, Ingress, KeyRefused
from edge.escalation.transport_selector import TransportSelector, Wanted
from hawkvision.core.clock import Clock
from hawkvision.core.errors import EscalationFailed
from hawkvision.core.escalation_api import StageList
from hawkvision.core.metrics import LinkMetrics
from hawkvision.network.circuit_breaker import BreakerState, CircuitBreaker
from hawkvision.network.response_time import MIN_ON_TIME_PROBABILITY
from hawkvision.network.transport_choice import Transport
from hawkvision.tasks.kind import TaskKind
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant

WAITING_PER_CONNECTION: Final = 4
"""Escalations that may wait for each connection; a further one fails at once, because it would wait even longer."""
OVERLOADED_S: Final = 0.25
"""How long a refusal tells that the datacenter has no time either."""
UNMEASURED_MS: Final = 40.0
"""Round trip that `/v1/targets` shows before the first is measured; no decision depends on it."""


class DatacenterClient:
    """Sends requests to one datacenter ingress. The number of pending requests is bounded."""

    def __init__(
        self,
        ingress: Ingress,
        kind: TaskKind[Any],
        clock: Clock,
        *,
        transport: Wanted = "tcp",
        min_on_time_probability: float = MIN_ON_TIME_PROBABILITY,
        reducer: ImageReducer | None = None,
        metrics: LinkMetrics | None = None,
        congestion: CongestionFactory = LossTolerant,
    ) -> None:
        """Prepare, and look for the datagram transport in the background if it is wanted.

        Args:
            ingress: of the datacenter.
            kind: of the task, which reads the replies.
            clock: for round trips.
            transport: how images travel, see `TransportSelector`.
            min_on_time_probability: callers wait while a reply on time is at least so likely, see `ResponseTimes`.
            reducer: reduces images to the size that the stages use; None sends them as they are.
            metrics: where to count.
            congestion: makes the congestion controller of datagrams.
        """
        http = HttpTransport(ingress, on_end=self._connection_ended)
        self.url = http.url
        self._report = LinkReport(self.url, clock)
        self._selector = TransportSelector(
            http, ingress.api_key, transport, clock, self._switched, self._probed, metrics, congestion
        )
        self.min_on_time_probability = min_on_time_probability
        carriers: tuple[EscalationTransport | None, ...] = (http, self._selector.datagram)
        for carrier in carriers:
            if carrier is not None:
                for times in (carrier.breaker.times, carrier.rest):
                    times.min_on_time_probability = min_on_time_probability
        self._exchanges = Exchanges(self.url, self._selector, kind, clock, self._report.lost.set, self._probe_with_copy)
        self.prepare_image = (reducer or ImageReducer()).prepare
        """See `ImageReducer.prepare`; called before `infer`."""
        self._clock = clock
        self._connections = ingress.connections
        self._max_pending = ingress.connections * (1 + WAITING_PER_CONNECTION)
        self._pending = 0
        self._probes = Probes(self._send, self.report, clock, metrics)
        self._waits = Waits(clock)
        self._closed = False
        self._metrics = metrics
        if metrics is not None:
            metrics.up.set_function(lambda: float(self.up))
            metrics.doubted.set_function(lambda: float(self.up and self.state is not BreakerState.CLOSED))
            for state in BreakerState:
                metrics.circuit_breaker(state.value).set_function(partial(self._is, state))

    # ------------------------------------------------------------------------------------- state of the link

    @property
    def transport(self) -> Transport:
        """The transport that the next image takes."""
        return self._selector.transport

    @property
    def link(self) -> CircuitBreaker:
        """The circuit breaker of the HTTP connections; polling the datacenter updates it."""
        return self._selector.http.breaker

    @property
    def up(self) -> bool:
        """Whether the transport in use is connected and the datacenter accepts our key."""
        return self._breaker.connected and self._exchanges.key_refused is None

    @property
    def state(self) -> BreakerState:
        """State of the circuit breaker of the transport in use."""
        return self._breaker.state(self._clock.now())

    @property
    def lost(self) -> asyncio.Event:
        """Set when a link goes down, its circuit breaker opens, or a connection ends."""
        return self._report.lost

    @property
    def idle(self) -> bool:
        """Whether the link is up and a connection is free, so that a new request delays no other."""
        return self.up and self._pending + self._selector.http.draining < self._connections

    @property
    def overloaded(self) -> bool:
        """Whether the datacenter has refused an image for overload within the last `OVERLOADED_S`."""
        return self._clock.now() - self._exchanges.overloaded_at < OVERLOADED_S

    @property
    def loss(self) -> float | None:
        """Share of datagrams that the link loses; None while it is not measured."""
        return self._selector.loss

    @property
    def rtt_s(self) -> float | None:
        """The link's round trip in seconds, without the datacenter's work; None while it is not measured."""
        return self._selector.rtt_s

    @property
    def round_trip_ms(self) -> float | None:
        """Smoothed round trip of answers, with the datacenter's work; None before the first."""
        return self._breaker.times.mean_ms

    @property
    def probe_timeout_s(self) -> float:
        """How long a probe waits: the longest of recent callers' deadlines."""
        return self._breaker.longest_ms * 1e-3

    def bound_ms(self) -> float | None:
        """Upper bound of a first answer's round trip; None while the link is down."""
        bound_ms = self._breaker.times.bound_ms()
        return None if not self.up else UNMEASURED_MS if bound_ms is None else bound_ms

    def mean_ms(self, stage: str) -> float:
        """Smoothed round trip of a stage's answers in milliseconds; before its first, of all answers."""
        found = self._exchanges.mean_ms(self.transport, stage)
        return found or self._breaker.times.mean_ms or UNMEASURED_MS

    def admits(self, within_ms: float) -> bool:
        """Whether the circuit breaker lets a request through that must be answered within that time."""
        return self._exchanges.key_refused is None and self._breaker.admits(within_ms, self._clock.now())

    def gain(self, within_ms: float, later_ms: Sequence[float]) -> float:
        """How much likelier a reply in time is if an image leaves now than if it leaves later (`ResponseTimes.gain`).

        0 where nothing should be sent that may not be needed: a link that is doubted or full, an overloaded datacenter.
        """
        if self.overloaded or not self.idle:
            return 0.0
        return self._breaker.times.gain(within_ms, later_ms, self._clock.now())

    def fits_lossless(self, body: bytes, deadline_s: float, *, strict: bool = False) -> bool:
        """Whether an image travels unchanged without `lossless`; see `DatagramLink.fits_lossless`."""
        datagram = self._selector.datagram
        return (
            datagram is None
            or self._selector.carrier is not datagram
            or datagram.fits_lossless(body, deadline_s, strict=strict)
        )

    def report(self) -> None:
        """Log what has changed about the link; called whenever something may have."""
        state = LinkState(self.transport, self._breaker.connected, self.state, self._exchanges.key_refused)
        self._report.report(state, self.loss)

    # --------------------------------------------------------------------------------------------- requests

    async def infer(self, escalation: Escalation, *, wait_full_deadline: bool = True) -> Escalated:
        """Send an image and wait for the reply.

        Args:
            escalation: the image, and what is asked.
            wait_full_deadline: whether to wait until the timeout. Otherwise the wait ends as soon as a reply on time
                is too unlikely (`ResponseTimes`), while the request itself continues and its outcome is recorded.

        Raises:
            RequestError: what the datacenter found wrong with the image.
            EscalationFailed: for everything else, a timeout included.
        """
        reply = self._send(escalation)
        if wait_full_deadline:
            return await reply
        return await self._waits.while_likely(reply, self._selector.carrier, escalation)

    def probe_with(self, prepare: Callable[[], Awaitable[Escalation]]) -> bool:
        """Send a copy of a caller's request, which `prepare` makes, to learn whether it would be on time.

        Runs in the background, one at a time, and only while a connection is free.

        Returns: whether a probe was due and has started.
        """
        return not self._closed and self.idle and self._probes.begin(self._breaker, prepare)

    async def stages(self, task: str | None = None) -> StageList:
        """What the datacenter serves of a task. If it has refused our key, it must accept it first.

        Raises:
            EscalationFailed: if it does not answer, or still refuses the key.
        """
        try:
            served = await self._selector.http.stages(task)
            if self._exchanges.key_refused is not None:
                await self._selector.http.check_key()
        except KeyRefused as error:
            self._exchanges.key_refused = str(error)
            raise
        self._exchanges.key_refused = None
        return served

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        self._report.close()
        await self._probes.close()
        await self._waits.close()
        await self._selector.close()

    def _send(self, escalation: Escalation) -> Coroutine[Any, Any, Escalated]:
        """The reply; the request counts as pending from this call until the reply is awaited to its end.

        Raises:
            EscalationFailed: if too many requests are pending.
        """
        if self._pending >= self._max_pending:
            raise EscalationFailed(f"{self._pending} escalations are already on their way")
        self._pending += 1
        if self._metrics is not None:
            self._metrics.sent_bytes.inc(len(escalation.body))
        return self._reply(self._selector.carrier, escalation)

    async def _reply(self, carrier: EscalationTransport, escalation: Escalation) -> Escalated:
        try:
            return await self._exchanges.run(carrier, escalation)
        finally:
            self._pending -= 1
            self.report()

    # --------------------------------------------------------------------------------------------- the link

    @property
    def _breaker(self) -> CircuitBreaker:
        return self._selector.carrier.breaker

    def _is(self, state: BreakerState) -> float:
        return float(self.state is state)

    def _probe_with_copy(self, late: Escalation) -> None:
        """Start a probe with a copy of a request that was late, if one is due."""

        async def copied() -> Escalation:
            request = msgspec.structs.replace(late.request, deadline_ms=self._breaker.longest_ms)
            return Escalation(late.body, request, late.trace.child(), self.probe_timeout_s, late.lossless, probe=True)

        self.probe_with(copied)

    def _probed(self) -> None:
        """Datagrams were probed; this says nothing about TCP, so before the first report it changes nothing there."""
        if self._report.begun or self.transport is Transport.DATAGRAM:
            self.report()

    def _switched(self) -> None:
        self._probes.cancel()
        self.report()

    def _connection_ended(self) -> None:
        if not self._closed and self.up:
            self._report.connection_ended()
