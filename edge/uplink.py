"""The way to the datacenter tier: the caller's picture goes there by HTTP or as datagrams, and what the link is like.

    infer ─► transport in use ─┬─ TCP ──► HttpHop ──┬─► reply checked ─► Escalated
                ▲              └─ LOSSY ► LossyHop ─┘
                └── `edge.ways` ◄── probes, losses, escalations that were late

Failures never reach the caller as errors: `EscalationFailed` tells the node to answer by itself. Only what the
datacenter found wrong with the picture is the caller's to know. Replies are checked before anybody believes them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from edge.admission import Admission
from edge.arrival import Sending, sending, watch
from edge.hops import Hop, HopBroken, HopLate, HttpHop
from edge.lossy_hop import TooLargeForDatagrams
from edge.replies import checked, refused
from edge.waiting import Escalated, SoFar, while_hopeful
from edge.ways import Wanted, Ways
from hawkvision import errors
from hawkvision.cascade.choice import Transport
from hawkvision.cascade.link import LinkEstimate
from hawkvision.cascade.patience import GIVE_UP_BELOW
from hawkvision.clock import Clock
from hawkvision.errors import DeadlineMissed, EscalationFailed, Overloaded, RequestError
from hawkvision.hop import HopReply, HopRequest, Rungs
from hawkvision.logs import Transitions
from hawkvision.memory import to_the_end
from hawkvision.metrics import EdgeMetrics
from hawkvision.trace import TraceContext
from hawkvision.vision.image import ImageHeader
from hawkvision.vision.reduce import Reducer

log = logging.getLogger("hawkvision.edge")

WAITING_PER_CONNECTION: Final = 4
"""Escalations that may wait for each connection; the next one fails at once, for it would only wait longer."""
PACE_GAIN: Final = 0.05
"""Weight of the newest round trip in what `/v1/targets` shows; slower than the link's estimate, which decides."""
SPARED_S: Final = 0.01
"""How long before the end of its wait who has something takes that: a busy machine makes waits longer than they should
be, and who holds an answer need not be late. With half of it, 0.6 % of answers over a crowded network were."""
LOOK_AGAIN_S: Final = 1.0
"""Between two looks at the datacenter for connections that end: a tier that closes each after its answer is no reason
to ask it all the time."""
QUICKEST_AMONG: Final = 64
"""Answers of which the quickest says how early a picture must arrive."""
OWN_SHARE: Final = 0.5
"""An escalation was late for no fault of the datacenter's if that usually takes no more than this share of the wait."""


class GivenUp(EscalationFailed):
    """Hardly any answer that takes so long comes in time; the edge's own is given instead."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked, as the arguments of `Uplink.infer` say, and what has come of it."""

    body: bytes
    request: HopRequest
    trace: TraceContext
    timeout_s: float
    exact: bool
    patient: bool
    so_far: SoFar
    picture: Sending | None
    """If whoever waits would like to know whether it arrives."""


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
        give_up_below: float = GIVE_UP_BELOW,
        reducer: Reducer | None = None,
        metrics: EdgeMetrics | None = None,
        admission: Admission | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare, and look for the lossy transport in the background if it is wanted.

        Args:
            url: of the ingress.
            api_key: of the ingress, over either transport.
            connections: HTTP connections.
            classes: what a reply's indices must stay below.
            clock: for round trips.
            transport: how pictures travel, see `Ways`.
            give_up_below: how little hope of an answer in time ends an impatient wait, see `Patience`.
            reducer: makes pictures as small as the rungs that are asked look at them; None sends them as they are.
            metrics: where to count.
        from hawkvision.logs import Transitions
            admission: from which memory is taken to make pictures smaller; None has no bound.
        """
        self.url = url.rstrip("/")
        self.lost = asyncio.Event()
        """Set when a link goes down, is doubted, or a connection ends, for whoever watches the datacenter."""
        self._reported = Transitions(log, {"transport": Transport.TCP, "doubt": False})
        self._noted: tuple[Transport, bool, bool] | None = None
        """What was last reported: the transport, whether its link is up, whether it is doubted."""
        self._ended_at = -math.inf
        self._looking: asyncio.TimerHandle | None = None
        """To have the datacenter looked at, for a connection has ended."""
        http = HttpHop(self.url, api_key, connections, tls=tls, ended=self._connection_ended)
        self._ways = Ways(http, api_key, transport, clock, self._switched, self._probed, metrics)
        hops: tuple[Hop | None, ...] = (http, self._ways.lossy)
        for hop in hops:
            if hop is not None:
                hop.link.set_give_up_below(give_up_below)
        self._reducer = reducer
        self._admission = admission
        self._classes = classes
        self._clock = clock
        self._connections = connections
        self._most_pending = connections * (1 + WAITING_PER_CONNECTION)
        self._pending = 0
        self._trial: asyncio.Task[None] | None = None
        self._given_up: set[asyncio.Task[Escalated]] = set()
        """Escalations that go on though nobody waits any more; of those pending, so bounded like them."""
        self._watching: set[asyncio.Task[None]] = set()
        """Looks for pictures that arrive; each ends with its exchange."""
        self._closed = False
        self._pace_ms: dict[tuple[Transport, str], float] = {}
        self._dc_ms = 0.0
        self._since_arrival_ms: dict[Hop, deque[float]] = {
            hop: deque(maxlen=QUICKEST_AMONG) for hop in hops if hop is not None
        }
        """From when a picture was seen to have arrived, how long its first answer took: work, and no way there."""
        self._rest_ms = 0.0
        """How much later than its first members a whole rung answers."""
        self._metrics = metrics
        if metrics is not None:
            metrics.datacenter_up.set_function(lambda: float(self.up))
            metrics.datacenter_doubted.set_function(lambda: float(self._ways.hop.link.doubtful))

    @property
    def transport(self) -> Transport:
        """What the next picture goes over."""
        return self._ways.transport

    @property
    def link(self) -> LinkEstimate:
        """The HTTP connections' estimate. Whoever watches the datacenter over HTTP tells it what came of that."""
        return self._ways.http.link

    @property
    def up(self) -> bool:
        """Whether the next picture has a link to go over."""
        return self._ways.hop.link.up

    def report(self) -> None:
        """Log what has changed about the way that pictures go; to be called whenever something may have."""
        link, transport = self._ways.hop.link, self.transport
        now = (transport, link.up, link.doubtful)
        before, self._noted = self._noted, now
        if before == now:
            return
        note, good, bad = self._reported.note, logging.INFO, logging.WARNING
        loss = "" if self.loss is None else f", loss {self.loss:.3f}"
        note("transport", transport, good, "pictures go to %s over %s%s", self.url, transport.value, loss)
        if link.up:
            again = "reached" if before is None else "back"
            note("datacenter", True, good, "datacenter %s: %s answers", again, self.url)
        else:
            note("datacenter", False, bad, "datacenter lost: %s does not answer", self.url)
        if link.doubtful:
            note("doubt", True, bad, "datacenter doubted: answers of %s are late for most deadlines", self.url)
            self.lost.set()
        else:
            note("doubt", False, good, "datacenter trusted again: answers of %s are in time", self.url)

    def _probed(self) -> None:
        """Probes are of datagrams: of another transport they say nothing before the datacenter was first asked."""
        if self._noted is not None or self.transport is Transport.LOSSY:
            self.report()

    def _connection_ended(self) -> None:
        """The datacenter may have ended, too: have it looked at, once in `LOOK_AGAIN_S` at most."""
        if self._closed or self._looking is not None or not self.up:
            return

        def look() -> None:
            self._looking = None
            self._ended_at = self._clock.now()
            self.lost.set()

        wait_s = max(0.0, LOOK_AGAIN_S - (self._clock.now() - self._ended_at))
        self._looking = asyncio.get_running_loop().call_later(wait_s, look)

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

    def predict_ms(self) -> float | None:
        """What a whole answer would hardly take longer than; None while the datacenter is left alone, having failed."""
        predicted_ms = self._ways.hop.link.predict_ms(self._clock.now())
        return None if predicted_ms is None else predicted_ms + self._rest_ms

    def expect_ms(self) -> float | None:
        """What an answer is likely to take, of some of a rung's members if that will do; None likewise."""
        return self._ways.hop.link.expect_ms(self._clock.now())

    def doubts(self, wait_ms: float) -> bool:
        """Whether escalations were late so often that nobody should wait so long; `try_out` finds out more."""
        return self._ways.hop.link.doubts(wait_ms)

    @property
    def trial_s(self) -> float:
        """How long a trial should be given: a little less than others have waited in vain."""
        return self._ways.hop.link.trial_ms * 1e-3

    async def as_sent(self, body: bytes, header: ImageHeader, until: float = math.inf) -> bytes:
        """What a picture travels as: itself, or where that is much larger than anybody looks at it, a smaller one.

        Formats that not every tier reads are left behind.

        Args:
            body: the picture.
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
            raise EscalationFailed(f"the picture could not be made smaller: {error}") from None

    def carries_whole(self, body: bytes, deadline_s: float, *, surely: bool = False) -> bool:
        """Whether a picture travels as it is in any case; over a lossy link it need not, see `LossyLink`."""
        lossy = self._ways.lossy
        return lossy is None or self._ways.hop is not lossy or lossy.carries_whole(body, deadline_s, surely=surely)

    def mean_ms(self, rung: str) -> float:
        """Smoothed round trip of the answers that a rung gave; before its first, that of all."""
        return self._pace_ms.get((self.transport, rung), self._ways.hop.link.mean_ms)

    async def infer(
        self,
        body: bytes,
        request: HopRequest,
        trace: TraceContext,
        timeout_s: float,
        *,
        exact: bool = False,
        patient: bool = True,
    ) -> Escalated:
        """Ask the datacenter about a picture, whose bytes are sent; `as_sent` makes them fewer.

        With `request.middle`, the reply's `model` says which rung answered.
        Over a lossy link it may look at less than `body`, and the reply says so; `exact` forbids that, at the price of
        more datagrams and more time. Who is not `patient` waits only as long as there is hope (`Patience`), while the
        escalation itself goes on, and is learned from, until `timeout_s`. A progressive request ends with what has come
        by then, if anything has.

        Raises:
            RequestError: what the datacenter found wrong with the picture.
            EscalationFailed: for everything else, a timeout included.
        """
        if self._pending >= self._most_pending:
            raise EscalationFailed(f"{self._pending} escalations are already on their way")
        self._pending += 1
        if self._metrics is not None:
            self._metrics.uplink_bytes.inc(len(body))
        hop = self._ways.hop
        # Of a picture that is coded anew, part will do: whether all of it arrives says little.
        whole = exact or hop is self._ways.http
        watched = whole and not patient and hop.link.patience_for_arrival.give_up_below > 0.0
        picture = Sending() if watched else None
        question = _Question(body, request, trace, timeout_s, exact, patient, SoFar(), picture)
        asking = self._asked(hop, question)
        return await (asking if patient else self._while_hopeful(asking, hop.link, question))

    async def _asked(self, hop: Hop, question: _Question) -> Escalated:
        watching = None
        if question.picture is not None:
            watching = asyncio.create_task(self._watched(hop, question.picture, question))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
        sending.set(question.picture)
        try:
            answer = await self._infer(hop, question)
            watching = None  # it was there, and whoever watches learns that at the next look
        except TooLargeForDatagrams:
            if watching is not None:
                watching.cancel()
            sending.set(None)
            answer = await self._infer(self._ways.http, question)
        finally:
            self._pending -= 1
            self.report()
            if watching is not None:
                watching.cancel()
        return answer

    async def _watched(self, hop: Hop, picture: Sending, question: _Question) -> None:
        """It must arrive so early that the quickest answer would be in time."""
        latest_ms = question.timeout_s * 1e3 - min(self._since_arrival_ms[hop], default=0.0)
        await watch(picture, hop.link.patience_for_arrival, latest_ms, self._clock)

    async def _while_hopeful(
        self, asking: Coroutine[Any, Any, Escalated], link: LinkEstimate, question: _Question
    ) -> Escalated:
        """Its outcome if that comes while there is hope, or what has come by then; it goes on alone.

        Raises:
            GivenUp: if nothing has.
        """
        timeout_s, so_far, picture, started = question.timeout_s, question.so_far, question.picture, self._clock.now()
        stuck = None if picture is None else picture.stuck
        first_s = link.patience.worth_ms(timeout_s * 1e3, self._clock.now()) * 1e-3

        def rest_s(first_ms: float) -> float:
            left_ms = (timeout_s - SPARED_S) * 1e3 - first_ms
            return link.patience_for_rest.worth_ms(max(0.0, left_ms), self._clock.now()) * 1e-3

        task = asyncio.create_task(asking)
        try:
            if await while_hopeful(task, so_far, first_s, rest_s, stuck):
                return task.result()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        self._given_up.add(task)
        task.add_done_callback(self._came_too_late)
        if so_far.latest is not None:
            return so_far.latest
        why = "the picture has not arrived" if stuck is not None and stuck.is_set() else "there is no answer"
        now = self._clock.now()
        waited_ms = (now - started) * 1e3
        so_far.given_up = True
        link.gave_up(waited_ms, now)
        self.report()
        raise GivenUp(f"{why} after {waited_ms:.0f} ms; few of those that take so long come in time")

    def _came_too_late(self, task: asyncio.Task[Escalated]) -> None:
        self._given_up.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, (EscalationFailed, RequestError)):
            log.error("an escalation that was given up broke off", exc_info=error)

    def try_out(
        self,
        body: bytes,
        header: ImageHeader,
        asked: Callable[[bool], HopRequest],
        trace: TraceContext,
        timeout_s: float,
    ) -> bool:
        """Escalate behind the caller's back, to learn whether it would be in time; False where that cannot be now.

        One at a time, and only while a connection is free. `asked` is told whether the picture travels as it is.
        """
        if self._closed or not self.idle or not (self._trial is None or self._trial.done()):
            return False

        async def trying() -> Escalated:
            sent = await self.as_sent(body, header)
            exact = self.carries_whole(sent, timeout_s)
            return await self.infer(sent, asked(exact), trace, timeout_s, exact=exact)

        self._trial = asyncio.create_task(_unwatched(trying))
        return True

    async def rungs(self) -> Rungs:
        """What the datacenter serves.

        Raises:
            EscalationFailed: if it does not say.
        """
        return await self._ways.http.rungs()

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        self._reported.close()
        background = [task for task in (self._trial, *self._given_up, *self._watching) if task is not None]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._ways.close()

    # ----------------------------------------------------------------------------------------- escalations

    def _switched(self) -> None:
        if self._trial is not None:
            self._trial.cancel()
        self.report()

    async def _infer(self, hop: Hop, question: _Question) -> Escalated:
        request, timeout_s = question.request, question.timeout_s
        started = self._clock.now()
        self._ways.asked(started)
        predicted_ms = hop.link.predict_ms(started)
        early = predicted_ms is not None and predicted_ms <= timeout_s * 1e3

        def escalated(payload: bytes) -> Escalated:
            reply = checked(payload, request, self._classes, self.url)
            return Escalated(reply, (self._clock.now() - started) * 1e3)

        def hear(payload: bytes) -> None:
            with suppress(EscalationFailed):  # if the last one is no better, that says so
                question.so_far.hear(escalated(payload))

        try:
            status, payload = await hop.send(
                question.body, request, question.trace, timeout_s, exact=question.exact, hear=hear
            )
        except HopBroken:
            self._failed(hop)
            if question.so_far.latest is not None:
                return question.so_far.latest
            raise
        except HopLate:
            if question.so_far.latest is not None:
                self._was_answered(hop, question, question.so_far.latest, started, early=early)
                return question.so_far.latest
            # No longer than allowed, by however much the timer was late: else trials would lengthen what is doubted.
            waited_s = min(self._clock.now() - started, timeout_s)
            if not question.patient:
                hop.link.patience.late(waited_s * 1e3, self._clock.now())
            self._was_late(hop, question, waited_s, early=early)
            raise
        if status != 200:
            raise self._refusal(hop, question, status, payload, started)
        try:
            answer = escalated(payload)
        except EscalationFailed:
            self._failed(hop)
            raise
        self._was_answered(hop, question, answer, started, early=early)
        return answer

    def _was_answered(self, hop: Hop, question: _Question, answer: Escalated, started: float, *, early: bool) -> None:
        """Learn from it; `early`: it should have been in time."""
        now, first_ms, picture = self._clock.now(), answer.until_first_ms, question.picture
        within_ms = question.timeout_s * 1e3
        hop.link.succeeded(first_ms, now, within_ms=within_ms, awaited=not question.so_far.given_up)
        if not question.patient:
            came_ms = question.so_far.first_ms  # none if the first was lost, or all that came
            hop.link.patience.answered(answer.round_trip_ms if came_ms is None else came_ms, now)
            if came_ms is not None and answer.reply.complete:
                hop.link.patience_for_rest.answered(answer.round_trip_ms - came_ms, now)
            elif came_ms is not None:
                hop.link.patience_for_rest.late(min(now - started, question.timeout_s) * 1e3 - came_ms, now)
            if picture is not None and picture.arrived_at is not None:
                heard_ms = answer.round_trip_ms if came_ms is None else came_ms
                self._since_arrival_ms[hop].append(max(0.0, heard_ms - (picture.arrived_at - started) * 1e3))
        if hop is self._ways.http and question.request.deadline_ms is not None and early:
            self._ways.over_tcp(late=False)
        if answer.reply.complete:
            self._rest_ms += PACE_GAIN * (answer.round_trip_ms - first_ms - self._rest_ms)
            self._learn_pace(hop, answer.reply, answer.round_trip_ms)

    def _learn_pace(self, hop: Hop, reply: HopReply, round_trip_ms: float) -> None:
        """Per transport and rung that answered; replies are checked, so a certificate names them all."""
        key = Transport.TCP if hop is self._ways.http else Transport.LOSSY, reply.model
        before = self._pace_ms.get(key, round_trip_ms)
        self._pace_ms[key] = before + PACE_GAIN * (round_trip_ms - before)
        own_ms = reply.timing_ms.total
        self._dc_ms += PACE_GAIN * (own_ms - self._dc_ms) if self._dc_ms else own_ms

    def _was_late(self, hop: Hop, question: _Question, waited_s: float, *, early: bool) -> None:
        """Learn from it; `early`: it should have been back long before."""
        waited_ms = waited_s * 1e3
        hop.link.late(waited_ms, self._clock.now(), awaited=not question.so_far.given_up)
        if question.request.deadline_ms is None:
            self._failed(hop)  # nobody hurried it, and still it did not answer
        elif hop is self._ways.http and early:
            self._ways.over_tcp(late=self._dc_ms <= OWN_SHARE * waited_ms)

    def _failed(self, hop: Hop) -> None:
        hop.link.failed()
        self.lost.set()

    def _refusal(
        self, hop: Hop, question: _Question, status: int, payload: bytes, started: float
    ) -> RequestError | EscalationFailed:
        """What a reply other than 200 means here."""
        fault, said = refused(status, payload)
        if fault is not None:
            return fault
        if status in (429, 504):
            now = self._clock.now()
            # Alive but too busy: the next request may try, with a longer round trip in mind. Over a lossy link the
            # picture may as well not have arrived.
            if status == 429 or hop is self._ways.http:
                hop.link.busy(now)
            if status == 504:
                hop.link.late((now - started) * 1e3, now, awaited=not question.so_far.given_up)
        elif status != errors.TooLarge.status:
            self._failed(hop)
        return EscalationFailed(f"{self.url} refused with HTTP {status}: {said[:200]}")


async def _unwatched(trying: Callable[[], Awaitable[Escalated]]) -> None:
    """Try, for what the link learns of it; nobody awaits this."""
    try:
        await trying()
    except (EscalationFailed, RequestError) as error:
        log.debug("trial failed: %s", error)
    except Exception:  # nobody would hear of it
        log.exception("trial broke off")
