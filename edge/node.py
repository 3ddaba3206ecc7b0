"""One edge node: from a picture and a target to an answer, wherever it is found.

    bytes ─ probe ─ route(target) ─┬─ worker: decode, resize, infer, score ─ decide ─┬─ accept ──────────────► answer
                                   │                                                └─ escalate ─┐
                                   └─ direct (target only the best rung can meet) ───────────────┴─ uplink ─► answer
                                                                                                    │ late, down
                                                                                                    └─ degraded ► answer

Beside that way run the controllers (`edge.streams`), which raise thresholds and void promises when traffic is not as
certified, and the audits (`edge.audits`), which tell them.

The node holds no protocol: doors (`edge.app`) give it bytes and a `ClassifyRequest`, and take an `Answer` or an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from edge.admission import Admission, Turns
from edge.audits import Auditor
from edge.call import Call
from edge.policies.rival import Rival
from edge.rung import EdgeResult, Look, Looked, Rung
from edge.streams import Streams, Watched
from edge.uplink import Uplink
from edge.workers import WorkerPool
from hawkvision.cascade.policy import Policy, Route, unmonitored, weakened
from hawkvision.cascade.profile import CERTIFIED_DROPS
from hawkvision.clock import Clock
from hawkvision.errors import DeadlineMissed, EscalationFailed, NotFound
from hawkvision.logs import Transitions
from hawkvision.metrics import EdgeMetrics
from hawkvision.trace import TraceContext
from hawkvision.types import (
    WHOLE,
    AccuracyPromise,
    Answer,
    ClassifyRequest,
    MaxAccuracyDrop,
    OnMiss,
    PromiseStatus,
    Quality,
    Received,
    Target,
    Tier,
)
from hawkvision.vision.image import ImageHeader, probe

log = logging.getLogger("hawkvision.edge")

RUNGS_INTERVAL_S: Final = 5.0
"""How often the node asks what the datacenter serves while the link is up and nothing happens: it finds a model that
was replaced behind a proxy, and a silent link. Where escalations fail or are doubted, or a connection ends, it asks at
once."""
CERTIFIED: Final = "certified"
"""The state of a rung that the datacenter serves as it was certified."""
FIRST_PROBE_S: Final = 0.1
LONGEST_PROBE_S: Final = 5.0
PROBE_SHARE: Final = 0.05
"""How often it asks while the link is down, or has not been up yet: after this share of the time that it has been down,
between the first interval and the longest. A tier that takes 20 s to start is found at most a second later."""
LISTED_TARGETS: Final[tuple[Target, ...]] = (*Quality, *map(MaxAccuracyDrop, CERTIFIED_DROPS))
"""What `/v1/targets` lists; every certificate stands behind one of them."""


class Source(NamedTuple):
    """The pictures that certificates were made from."""

    name: str
    sha256: str
    as_of: str | None
    """Date of a site's own certification; None for those that came with the profile."""


class EdgeNode:
    """Answers pictures for one task. Made and used on one event loop."""

    def __init__(
        self,
        *,
        task: str,
        labels: Sequence[str],
        rung: Rung,
        best: str,
        policy: Policy,
        pool: WorkerPool[EdgeResult],
        uplink: Uplink | None,
        clock: Clock,
        metrics: EdgeMetrics,
        max_pixels: int,
        admission: Admission,
        dc_timeout_s: float,
        streams: Streams,
        auditor: Auditor,
        certified: bool = True,
        expected: Mapping[str, str],
        source: Source | None = None,
        rival: Rival | None = None,
    ) -> None:
        """Make a node of loaded parts.

        Args:
            task: what it answers.
            labels: class names in index order.
            rung: the edge rung.
            best: name of the ladder's best rung, asked on escalation.
            policy: of this pair.
            pool: where pictures are decoded and inferred.
            uplink: the datacenter, or None for a node that answers alone.
            clock: for deadlines and timings.
            metrics: where to count.
            max_pixels: largest picture accepted.
            admission: of pictures, by what they cost.
            dc_timeout_s: longest wait for the datacenter without a deadline.
            streams: the controllers; closed with the node.
            auditor: of accepted answers; closed with the node.
            certified: whether the profile's certificates hold for the loaded edge model.
            expected: fingerprint of each datacenter rung that the certificates hold for.
            source: of the certificates.
            rival: who decides in place of HawkVision's own way, by the routes of `policy`; closed with the node.
        """
        self.task = task
        self.labels = labels
        self.rung = rung
        self.best = best
        self.policy = policy
        self.pool = pool
        self.uplink = uplink
        self.metrics = metrics
        self.clock = clock
        self.max_pixels = max_pixels
        self.admission = admission
        self.dc_timeout_s = dc_timeout_s
        self.streams = streams
        self.auditor = auditor
        self._certified = certified
        self._expected = expected
        self.source = source
        self.rival = rival
        self._calls = Call if rival is None else rival.calls
        self._report = Transitions(log, dict.fromkeys(expected, CERTIFIED))
        self._matches: dict[str, bool] = {}  # by rung; empty before the datacenter has said what it serves
        self._watcher = asyncio.create_task(self._watch_datacenter()) if uplink else None
        metrics.queue_length.set_function(lambda: pool.waiting)
        metrics.certificates_valid.labels(task).set_function(lambda: float(self.certificates_valid))
        self._promised = {status: metrics.promises.labels(task, status.value) for status in PromiseStatus}
        self._observe_queue = metrics.queue_duration.labels(task).observe
        self._observe_infer = metrics.inference_duration.labels(task, rung.name).observe
        self._count_second_look = metrics.second_looks.labels(task).inc

    @property
    def certificates_valid(self) -> bool:
        """Whether the certificates were made for the edge model, and for the datacenter's as far as is known."""
        return self._certified and all(self._matches.values())

    def serves(self, rung: str) -> bool:
        """Whether the datacenter is known to run this rung as it was certified."""
        return self._matches.get(rung, False)

    def watched(self, route: Route, stream: str | None, caller: str = "") -> Watched:
        """What watches a caller's request; nothing where no certificate stands behind it, or for other models."""
        return self.streams.watched(stream, route.controls if self._certified else None, caller)

    async def classify(
        self,
        body: bytes,
        request: ClassifyRequest,
        started: float,
        trace: TraceContext,
        hang_up: Callable[[], Awaitable[object]] | None = None,
        *,
        received: Received = WHOLE,
        header: ImageHeader | None = None,
        caller: str = "",
        turns: Turns | None = None,
    ) -> Answer:
        """Answer one picture.

        Args:
            body: the encoded picture, as it was received.
            request: what is asked.
            started: clock time of the first byte.
            trace: the request's span; the datacenter gets a child.
            hang_up: returns when the caller is gone; waited for only while the datacenter is.
            received: what of the caller's picture `body` is.
            header: of `body`, if it was probed already.
            caller: whose evidence this is: `KEY` and the name of its API key, or its address.
            turns: of the request whose picture this is, one of several, which was admitted as a whole.

        Raises:
            CallerGone: if nobody waits for the answer any more.
            RequestError: the caller's fault (picture, target, task).
            ServiceError: shed, shutting down, or the deadline missed with `on_miss=fail`.
        """
        call = self._call(body, request, started, trace, hang_up, received, header, caller)
        if turns is not None:
            call.turns, call.admitted = turns, turns.admitted
        try:
            if call.hopeless:
                raise call.missed()
            answer = await (self._admitted(call) if call.cost.heavy and turns is None else call.answer())
        except DeadlineMissed:
            self.metrics.deadline_misses.labels(self.task).inc()
            raise
        if answer.deadline_met is False:
            self.metrics.deadline_misses.labels(self.task).inc()
            if request.on_miss is OnMiss.FAIL:
                raise call.missed()
        self._promised[answer.accuracy.status].inc()
        return answer

    async def look_early(
        self,
        body: bytes,
        request: ClassifyRequest,
        started: float,
        trace: TraceContext,
        received: Received,
        caller: str = "",
    ) -> Answer | None:
        """The edge's answer to what is there of a picture while more of it is on its way, if it may be believed.

        Believed is what `classify` would accept from the edge in time. One look, and nothing is escalated.

        Raises:
            RequestError, ServiceError: as `classify`.
        """
        answer = await self._call(body, request, started, trace, None, received, None, caller).early()
        if answer is not None:
            self._promised[answer.accuracy.status].inc()
        return answer

    def _call(
        self,
        body: bytes,
        request: ClassifyRequest,
        started: float,
        trace: TraceContext,
        hang_up: Callable[[], Awaitable[object]] | None,
        received: Received,
        header: ImageHeader | None,
        caller: str,
    ) -> Call:
        """The request on its way; refused here, on the loop, is what can be refused from the picture's header.

        Raises:
            RequestError: for another task, an unreachable target, or a picture that is none or too large.
        """
        if request.task is not None and request.task != self.task:
            raise NotFound(f"task {request.task!r} is not served here; this node serves {self.task!r}")
        route = self.policy.route(request.target, received)
        header = header or probe(body)
        cost = self.admission.cost(body, header)
        watched = self.watched(route, request.stream, caller)
        return self._calls(self, body, header, cost, request, route, watched, started, trace, hang_up, received)

    async def _admitted(self, call: Call) -> Answer:
        """The answer to a heavy picture, if it is let in."""
        with self.admission.admit([call.cost]) as call.admitted:
            return await call.answer()

    async def at_edge(self, call: Call, must_end: float | None = None) -> Looked:
        """What the edge rung says; on a worker, earliest deadline first, with others where pictures wait.

        Second looks are left out where they would end after `must_end`.

        Raises:
            Overloaded: if the queue is full.
            DeadlineMissed: if the picture cannot be decoded by the deadline, and nobody wants it late.
            RequestError: if the picture is broken.
        """
        look = Look(
            self.rung, call.body, call.header, call.request.top_k, self.max_pixels, self.clock, call.route.temperature,
            self.pool.alone, call.route.first_only, must_end, self.admission.rates, call.cost,
        )  # fmt: skip
        result, queue_ms = await self.queued(call, look, self.rung)
        self._observe_queue(queue_ms * 1e-3)
        self._observe_infer(result.infer_ms * 1e-3)
        if result.again:
            self._count_second_look()
        return Looked(result, queue_ms, self.rung.first.name if call.route.first_only else self.rung.name)

    async def queued(self, call: Call, look: Look, rung: Rung) -> tuple[EdgeResult, float]:
        """What came of a look, and how long it waited, in its request's turn.

        Raises:
            Overloaded, DeadlineMissed, RequestError: as `at_edge`.
        """
        if call.turns is None:
            return await self._in_line(call, look, rung)
        async with call.turns.of(call.cost):
            return await self._in_line(call, look, rung)

    async def _in_line(self, call: Call, look: Look, rung: Rung) -> tuple[EdgeResult, float]:
        cost, admission = call.cost, self.admission
        if not cost.heavy:
            return await self.pool.submit(look, call.deadline, rung.look_together, cost)
        useless = call.deadline is not None and call.request.on_miss is not OnMiss.WAIT
        admission.check_time(cost.heavy_s, call.slack_ms(), call.request.on_miss)
        looking = self.pool.submit(look, call.deadline, rung.look_together, cost, late_is_useless=useless)
        try:
            return await looking
        except DeadlineMissed:
            admission.count_late()
            raise
        finally:
            if call.admitted is not None:
                admission.decoded(call.admitted, cost.heavy_s)

    def promise(self, route: Route, tier: Tier, watched: Watched, *, degraded: bool = False) -> AccuracyPromise:
        """The promise as it can be made with the models that are loaded and the traffic that comes.

        A certificate made for other models is void, and so is one whose stream has an alarm. Where too few audits take
        place, or none can, nothing is claimed of answers that a stage below the reference may give. An answer of the
        datacenter is held to nothing before the datacenter has said which models it runs.

        Args:
            route: of the target.
            tier: where the answer came from.
            watched: what watches the request.
            degraded: whether the answer fell short of the target.
        """
        promise = route.promise
        if promise.max_drop is None and promise.status is not PromiseStatus.HELD:
            return weakened(promise) if degraded else promise  # nothing certified is claimed
        if watched.void or not self._certified_for(route):
            return replace(weakened(promise), status=PromiseStatus.VOID)
        if degraded or (tier is Tier.DC and not self._matches):
            return weakened(promise)
        if route.controls is not None and (not self._matches or not watched.monitored):
            return unmonitored(promise)
        return promise

    def _certified_for(self, route: Route) -> bool:
        """Whether the rungs that a route's certificate is about are those that run, as far as is known."""
        middle = None if route.middle is None else route.middle.rung
        return (
            self._certified
            and self._matches.get(self.best, True)
            and (middle is None or self._matches.get(middle, True))
        )

    async def _watch_datacenter(self) -> None:
        """Know what the datacenter serves, and bring a lost link back; callers' requests are never the probes."""
        assert self.uplink is not None
        uplink, link, lost = self.uplink, self.uplink.link, self.uplink.lost
        down_since: float | None = None
        while True:
            lost.clear()
            if await self._check_datacenter(uplink):
                link.connected = True
                uplink.report()
                down_since = None
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RUNGS_INTERVAL_S):
                        await lost.wait()
            else:
                link.connected = False
                uplink.report()
            if not link.connected:
                now = self.clock.now()
                down_since = now if down_since is None else down_since
                await asyncio.sleep(min(max(FIRST_PROBE_S, PROBE_SHARE * (now - down_since)), LONGEST_PROBE_S))

    async def _check_datacenter(self, uplink: Uplink) -> bool:
        """Whether it answered."""
        try:
            served = await uplink.rungs()
        except EscalationFailed as error:
            log.debug("datacenter: %s", error)
            return False
        found = {rung.name: rung for rung in served.rungs}
        for name, fingerprint in self._expected.items():
            rung = found.get(name)
            matches = rung is not None and rung.fingerprint == fingerprint
            self._matches[name] = matches
            if not matches:
                self._report.note(
                    name,
                    rung,
                    logging.WARNING,
                    "guarantees suspended: certificates are about %s with fingerprint %s, %s serves %s",
                    name,
                    fingerprint,
                    uplink.url,
                    "no such rung" if rung is None else f"it with fingerprint {rung.fingerprint}",
                )
            else:
                message = "guarantees restored: %s serves %s as it was certified"
                self._report.note(name, CERTIFIED, logging.INFO, message, uplink.url, name)
        return True

    async def close(self) -> None:
        """Stop watching and auditing, finish what is queued, close connections, the backend and the state file."""
        if self._watcher:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await self.auditor.close()
        await asyncio.to_thread(self.pool.close)
        if self.uplink:
            await self.uplink.close()
        self.rung.close()
        if self.rival is not None:
            await self.rival.close()
        await self.streams.close()
