"""The way to the datacenter tier: the caller's image goes there by HTTP or as datagrams, and what the link is like.

    infer ─► transport in use ─┬─ TCP ──► HttpTransport ──┬─► reply checked ─► Escalated
                ▲              └─ DATAGRAM ► DatagramTransport ─┘
                └── `edge.escalation.transport_selector` ◄── probes, losses, escalations that were late

Failures never reach the caller as errors: `EscalationFailed` tells the node to answer by itself. Only what the
datacenter found wrong with the image is the caller's to know. Replies are checked before anybody believes them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from edge.escalation.datagram_transport import TooLargeForDatagrams
from edge.escalation.http_transport import (
    KEY_REFUSED,
    EscalationTransport,
    HttpTransport,
    KeyRefused,
    ReplyLate,
    TransportBroken,
)
from edge.escalation.link_report import LinkReport, LinkState
from edge.escalation.pending_request import Question
from edge.escalation.probes import Probes
from edge.escalation.reply_validation import Escalated, checked, refused
from edge.escalation.transport_selector import Wanted, Ways
from edge.serving.admission import Admission
from hawkvision.core import errors
from hawkvision.core.clock import Clock
from hawkvision.core.errors import DeadlineMissed, EscalationFailed, Overloaded, RequestError
from hawkvision.core.escalation_api import EscalationReply, EscalationRequest, StageList
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace import TraceContext
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.preprocessing import ImageHeader
from hawkvision.network.circuit_breaker import CircuitBreaker, State
from hawkvision.network.response_time import MIN_ON_TIME_PROBABILITY, Request
from hawkvision.network.transport_choice import Transport
from hawkvision.system.memory import to_the_end
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant

log = logging.getLogger("hawkvision.edge")

WAITING_PER_CONNECTION: Final = 4
"""Escalations that may wait for each connection; the next one fails at once, for it would only wait longer."""
PACE_GAIN: Final = 0.05
"""Weight of the newest round trip in what `/v1/targets` shows; it decides nothing."""
UNMEASURED_MS: Final = 40.0
"""A round trip that `/v1/targets` shows before the first: a metropolitan link and 10 ms of work. It decides nothing."""
SPARED_S: Final = 0.01
"""How long before the end of its wait who has something takes that: a busy machine makes waits longer than they should
be, and who holds an answer need not be late."""
OWN_SHARE: Final = 0.5
"""An escalation was late for no fault of the datacenter's if that usually takes no more than this share of the wait."""


class WaitAbandoned(EscalationFailed):
    """Too few answers that take so long come in time; the edge's own is given instead."""


class Uplink:
    """One datacenter ingress. Escalations under way are bounded; those beyond a connection each wait for one."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        connections: int,
        classes: int,
        clock: Clock,
        *,
        transport: Wanted = "tcp",
        min_on_time_probability: float = MIN_ON_TIME_PROBABILITY,
        reducer: Reducer | None = None,
        metrics: EdgeMetrics | None = None,
        admission: Admission | None = None,
        tls: ssl.SSLContext | None = None,
        congestion: CongestionFactory = LossTolerant,
    ) -> None:
        """Prepare, and look for the datagram transport in the background if it is wanted.

        Args:
            url: of the ingress.
            api_key: of the ingress, over either transport.
            connections: HTTP connections.
            classes: what a reply's indices must stay below.
            clock: for round trips.
            transport: how images travel, see `Ways`.
            min_on_time_probability: how likely a reply on time must be to be waited for, see `ResponseTimes`.
            reducer: makes images as small as the stages that are asked look at them; None sends them as they are.
            metrics: where to count.
            admission: from which memory is taken to make images smaller; None has no bound.
            congestion: makes the congestion controller of datagrams.
        """
        self.url = url.rstrip("/")
        self._report = LinkReport(self.url, clock)
        self._key_refused: str | None = None
        """What the datacenter says against our key; None if it takes it, as far as is known."""
        http = HttpTransport(self.url, api_key, connections, tls=tls, ended=self._connection_ended)
        self._ways = Ways(http, api_key, transport, clock, self._switched, self._probed, metrics, congestion)
        escalation_transports: tuple[EscalationTransport | None, ...] = (http, self._ways.datagram)
        for escalation_transport in escalation_transports:
            if escalation_transport is not None:
                for times in (escalation_transport.breaker.times, escalation_transport.rest):
                    times.min_on_time_probability = min_on_time_probability
        self._reducer = reducer
        self._admission = admission
        self._classes = classes
        self._clock = clock
        self._connections = connections
        self._most_pending = connections * (1 + WAITING_PER_CONNECTION)
        self._pending = 0
        self._probes = Probes(self._ask, self.report, clock, metrics)
        self._given_up: set[asyncio.Task[Escalated]] = set()
        """Escalations that go on though nobody waits any more; of those pending, so bounded like them."""
        self._closed = False
        self._pace_ms: dict[tuple[Transport, str], float] = {}
        self._dc_ms = 0.0
        self._metrics = metrics
        if metrics is not None:
            metrics.datacenter_up.set_function(lambda: float(self.up))
            metrics.datacenter_doubted.set_function(lambda: float(self.up and self.state is not State.CLOSED))
            for state in State:
                metrics.circuit_breaker.labels(state.value).set_function(partial(self._is, state))

    @property
    def transport(self) -> Transport:
        """What the next image goes over."""
        return self._ways.transport

    @property
    def link(self) -> CircuitBreaker:
        """The HTTP connections' breaker. Whoever watches the datacenter over HTTP tells it what came of that."""
        return self._ways.http.breaker

    @property
    def up(self) -> bool:
        """Whether the next image has a link to go over, and will be let in."""
        return self._breaker.connected and self._key_refused is None

    @property
    def state(self) -> State:
        """Of the circuit breaker of the way that the next image goes."""
        return self._breaker.state(self._clock.now())

    @property
    def lost(self) -> asyncio.Event:
        """Set when a link goes down, is doubted, or a connection ends, for whoever watches the datacenter."""
        return self._report.lost

    def report(self) -> None:
        """Log what has changed about the way that images go; to be called whenever something may have."""
        state = LinkState(self.transport, self._breaker.connected, self.state, self._key_refused)
        self._report.report(state, self.loss)

    @property
    def _breaker(self) -> CircuitBreaker:
        return self._ways.escalation_transport.breaker

    def _is(self, state: State) -> float:
        return float(self.state is state)

    def _probed(self) -> None:
        """Probes are of datagrams: of another transport they say nothing before the datacenter was first asked."""
        if self._report.begun or self.transport is Transport.DATAGRAM:
            self.report()

    def _connection_ended(self) -> None:
        if not self._closed and self.up:
            self._report.connection_ended()

    @property
    def idle(self) -> bool:
        """Whether the link is up and a connection is free: whoever sends now lets nobody wait."""
        return self.up and self._pending + self._ways.http.running_out < self._connections

    @property
    def quiet(self) -> bool:
        """Whether no escalation is under way, whose deadline would have to be watched."""
        return not self._pending

    @property
    def loss(self) -> float | None:
        """Share of datagrams that the link loses; None while that is not known, or nobody measures it."""
        return self._ways.loss

    @property
    def rtt_s(self) -> float | None:
        """The link's own round trip, without the datacenter's work; None as for `loss`."""
        return self._ways.rtt_s

    def bound_ms(self) -> float | None:
        """What a first answer would hardly take longer than; None while the datacenter is left alone, having failed."""
        bound_ms = self._breaker.times.bound_ms()
        return None if not self.up else UNMEASURED_MS if bound_ms is None else bound_ms

    def admits(self, within_ms: float) -> bool:
        """Whether a reply within that time is likely enough to be waited for; else `try_out` finds out more."""
        return self._key_refused is None and self._breaker.admits(within_ms, self._clock.now())

    @property
    def trial_s(self) -> float:
        """How long a trial is waited for: the longest of recent callers' times."""
        return self._breaker.longest_ms * 1e-3

    async def as_sent(self, body: bytes, header: ImageHeader, until: float = math.inf) -> bytes:
        """What an image travels as: itself, or where that is much larger than anybody looks at it, a smaller one.

        Formats that not every tier reads are left behind.

        Args:
            body: the image.
            header: of it.
            until: on the loop's clock; it is not begun if it cannot be made smaller by then.

        Raises:
            BadImage, TooLarge: if it must be made smaller, and cannot be read.
            EscalationFailed: if there is no time or memory for that.
        """
        reducer = self._reducer
        if reducer is None or (header.format.native and not reducer.saves(header)):
            return body
        if self._admission is None:
            return await asyncio.to_thread(reducer.reduced, body, header)
        try:
            async with self._admission.beside(body, header, reducer.least_side(header), until):
                running = asyncio.get_running_loop().run_in_executor(None, reducer.reduced, body, header)
                return await to_the_end(running)
        except (Overloaded, DeadlineMissed) as error:
            raise EscalationFailed(f"the image could not be made smaller: {error}") from None

    def carries_whole(self, body: bytes, deadline_s: float, *, surely: bool = False) -> bool:
        """Whether an image travels as it is in any case; over a lossy link it need not, see `DatagramLink`."""
        datagram = self._ways.datagram
        return (
            datagram is None
            or self._ways.escalation_transport is not datagram
            or datagram.carries_whole(body, deadline_s, surely=surely)
        )

    def mean_ms(self, stage: str) -> float:
        """Smoothed round trip of the answers that a stage gave; before its first, that of all."""
        found = self._pace_ms.get((self.transport, stage))
        return found or self._breaker.times.mean_ms or UNMEASURED_MS

    async def infer(
        self,
        body: bytes,
        request: EscalationRequest,
        trace: TraceContext,
        timeout_s: float,
        *,
        exact: bool = False,
        patient: bool = True,
    ) -> Escalated:
        """Ask the datacenter about an image, whose bytes are sent; `as_sent` makes them fewer.

        With `request.middle`, the reply's `model` says which stage answered.
        Over a lossy link it may look at less than `body`, and the reply says so; `exact` forbids that, at the price of
        more datagrams and more time. Who is not `patient` waits only while a reply is likely enough (`ResponseTimes`),
        and the escalation itself goes on, and is learned from, until `timeout_s`. A progressive request ends with what
        has come by then, if anything has.

        Raises:
            RequestError: what the datacenter found wrong with the image.
            EscalationFailed: for everything else, a timeout included.
        """
        question = Question(body, request, trace, timeout_s, exact, probe=False)
        asking = self._ask(question)
        return await (asking if patient else self._while_likely(asking, self._ways.escalation_transport, question))

    def _ask(self, question: Question) -> Coroutine[Any, Any, Escalated]:
        """It counts as pending at once, and until it is over.

        Raises:
            EscalationFailed: if too many are already.
        """
        if self._pending >= self._most_pending:
            raise EscalationFailed(f"{self._pending} escalations are already on their way")
        self._pending += 1
        if self._metrics is not None:
            self._metrics.uplink_bytes.inc(len(question.body))
        return self._asked(self._ways.escalation_transport, question)

    async def _asked(self, escalation_transport: EscalationTransport, question: Question) -> Escalated:
        try:
            try:
                return await self._infer(escalation_transport, question)
            except TooLargeForDatagrams:
                return await self._infer(self._ways.http, question)
        finally:
            self._pending -= 1
            self.report()

    async def _while_likely(
        self, asking: Coroutine[Any, Any, Escalated], escalation_transport: EscalationTransport, question: Question
    ) -> Escalated:
        """Its outcome if that comes while it is likely enough, or what has come by then; it goes on alone.

        Raises:
            WaitAbandoned: if nothing has.
        """
        parts, times = question.parts, escalation_transport.breaker.times
        worth_ms = times.worth_ms(question.timeout_s * 1e3, self._clock.now())
        task, first = asyncio.create_task(asking), asyncio.create_task(parts.came.wait())
        try:
            await asyncio.wait({task, first}, timeout=worth_ms * 1e-3, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and parts.first_ms is not None:
                left_ms = max(0.0, (question.timeout_s - SPARED_S) * 1e3 - parts.first_ms)
                rest_ms = escalation_transport.rest.worth_ms(left_ms, self._clock.now())
                await asyncio.wait({task}, timeout=rest_ms * 1e-3)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            first.cancel()
        if task.done():
            return task.result()
        self._given_up.add(task)
        task.add_done_callback(self._came_too_late)
        if parts.latest is not None:
            return parts.latest
        raise WaitAbandoned(f"there is no answer after {worth_ms:.0f} ms; few of those that take so long come in time")

    def _came_too_late(self, task: asyncio.Task[Escalated]) -> None:
        self._given_up.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, (EscalationFailed, RequestError)):
            log.error("an escalation that was given up broke off", exc_info=error)

    def try_out(
        self,
        body: bytes,
        header: ImageHeader,
        asked: Callable[[bool], EscalationRequest],
        trace: TraceContext,
    ) -> bool:
        """Escalate behind the caller's back, to learn whether it would be in time; False where that is not due.

        One at a time, and only while a connection is free. `asked` is told whether the image travels as it is.
        """
        timeout_s = self.trial_s

        async def sent() -> Question:
            reduced = await self.as_sent(body, header)
            exact = self.carries_whole(reduced, timeout_s)
            return Question(reduced, asked(exact), trace, timeout_s, exact, probe=True)

        return self._probe(sent)

    def _probe(self, made: Callable[[], Awaitable[Question]]) -> bool:
        """Begin to ask what is `made`, behind everybody's back, if that is due; whether it has begun."""
        return not self._closed and self.idle and self._probes.begin(self._breaker, made)

    async def _again(self, question: Question) -> Question:
        """A copy of what was asked, to be waited for as long as a trial is."""
        request = msgspec.structs.replace(question.request, deadline_ms=self._breaker.longest_ms)
        return Question(question.body, request, question.trace.child(), self.trial_s, question.exact, probe=True)

    async def stages(self) -> StageList:
        """What the datacenter serves. Once it has refused our key, it must also show that it takes it by now.

        Raises:
            EscalationFailed: if it does not say, or still refuses the key.
        """
        try:
            served = await self._ways.http.stages()
            if self._key_refused is not None:
                await self._ways.http.check_key()
        except KeyRefused as error:
            self._key_refused = str(error)
            raise
        self._key_refused = None
        return served

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        self._report.close()
        await self._probes.close()
        background = list(self._given_up)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._ways.close()

    # ----------------------------------------------------------------------------------------- escalations

    def _switched(self) -> None:
        self._probes.cancel()
        self.report()

    async def _infer(self, escalation_transport: EscalationTransport, question: Question) -> Escalated:
        request, timeout_s, times = question.request, question.timeout_s, escalation_transport.breaker.times
        started = self._clock.now()
        self._ways.asked(started)
        bound_ms = times.bound_ms()
        early = bound_ms is not None and bound_ms <= timeout_s * 1e3
        under_way = times.sent(started)

        def escalated(payload: bytes) -> Escalated:
            reply = checked(payload, request, self._classes, self.url)
            return Escalated(reply, (self._clock.now() - started) * 1e3)

        def hear(payload: bytes) -> None:
            with suppress(EscalationFailed):  # if the last one is no better, that says so
                question.parts.add(escalated(payload))

        try:
            status, payload = await escalation_transport.send(
                question.body, request, question.trace, timeout_s, exact=question.exact, hear=hear
            )
            if status != 200:
                raise self._refusal(escalation_transport, question, status, payload, under_way)
            answer = escalated(payload)
        except ReplyLate:
            if question.parts.latest is None:
                self._was_late(escalation_transport, question, under_way, early=early)
                raise
            answer = question.parts.latest
        except TransportBroken:
            self._failed(escalation_transport)
            if question.parts.latest is None:
                raise
            return question.parts.latest
        else:
            if answer.reply.complete:
                self._learn_pace(escalation_transport, answer.reply, answer.round_trip_ms)
        finally:
            times.dropped(under_way)
        self._was_answered(escalation_transport, question, answer, under_way, early=early)
        return answer

    def _was_answered(
        self,
        escalation_transport: EscalationTransport,
        question: Question,
        answer: Escalated,
        under_way: Request,
        *,
        early: bool,
    ) -> None:
        """Learn from it; `early`: it should have been in time. Who has no deadline asks for more, and tells nothing."""
        if question.request.deadline_ms is None:
            return
        now, first_ms = self._clock.now(), question.parts.first_ms
        escalation_transport.breaker.times.answered(under_way, answer.until_first_ms, now)
        if first_ms is not None:
            first = escalation_transport.rest.sent(under_way.sent + first_ms * 1e-3)
            if answer.reply.complete:
                escalation_transport.rest.answered(first, answer.round_trip_ms - first_ms, now)
            else:
                escalation_transport.rest.given_up(first, max(0.0, question.timeout_s * 1e3 - first_ms), now)
        if escalation_transport is self._ways.http and early:
            self._ways.over_tcp(late=False)

    def _learn_pace(
        self, escalation_transport: EscalationTransport, reply: EscalationReply, round_trip_ms: float
    ) -> None:
        """Per transport and stage that answered; replies are checked, so a certificate names them all."""
        key = Transport.TCP if escalation_transport is self._ways.http else Transport.DATAGRAM, reply.model
        before = self._pace_ms.get(key, round_trip_ms)
        self._pace_ms[key] = before + PACE_GAIN * (round_trip_ms - before)
        own_ms = reply.timing_ms.total
        self._dc_ms += PACE_GAIN * (own_ms - self._dc_ms) if self._dc_ms else own_ms

    def _was_late(
        self, escalation_transport: EscalationTransport, question: Question, under_way: Request, *, early: bool
    ) -> None:
        """Learn from it; `early`: it should have been back long before."""
        now, timeout_ms = self._clock.now(), question.timeout_s * 1e3
        if question.request.deadline_ms is None:
            self._failed(escalation_transport)  # nobody hurried it, and still it did not answer
            return
        # No longer than allowed, by however much the timer was late.
        escalation_transport.breaker.times.given_up(
            under_way, min((now - under_way.sent) * 1e3, timeout_ms), now, probe=question.probe
        )
        if escalation_transport is self._ways.http and early:
            self._ways.over_tcp(late=self._dc_ms <= OWN_SHARE * timeout_ms)
        if (
            escalation_transport is self._ways.escalation_transport
            and not question.probe
            and escalation_transport.breaker.state(now) is State.OPEN
        ):
            self._probe(partial(self._again, question))

    def _failed(self, escalation_transport: EscalationTransport) -> None:
        escalation_transport.breaker.connected = False
        self._report.lost.set()

    def _refusal(
        self,
        escalation_transport: EscalationTransport,
        question: Question,
        status: int,
        payload: bytes,
        under_way: Request,
    ) -> RequestError | EscalationFailed:
        """What a reply other than 200 means here."""
        fault, said = refused(status, payload)
        if fault is not None:
            return fault
        if status in KEY_REFUSED:
            self._key_refused = said
        if status == errors.DeadlineMissed.status:
            # Alive but too busy. One that refused at once (429) has made nobody wait.
            now = self._clock.now()
            escalation_transport.breaker.times.given_up(
                under_way, (now - under_way.sent) * 1e3, now, probe=question.probe
            )
        elif status not in (errors.Overloaded.status, errors.TooLarge.status):
            self._failed(escalation_transport)
        return EscalationFailed(f"{self.url} refused with HTTP {status}: {said[:200]}")
