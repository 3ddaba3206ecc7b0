"""One edge node: from a picture and a target to an answer, wherever it is found.

    bytes ─ probe ─ route(target) ─┬─ worker: decode, resize, infer, score ─ decide ─┬─ accept ──────────────► answer
                                   │                                                └─ escalate ─┐
                                   └─ direct (target only the best rung can meet) ───────────────┴─ uplink ─► answer
                                                                                                    │ late, down
                                                                                                    └─ degraded ► answer

Beside that way run the controllers (`edge.monitoring.streams`), which raise thresholds and void promises when traffic
is not as certified, and the audits (`edge.monitoring.audits`), which tell them.

The node holds no protocol: doors (`edge.servers.http`) give it bytes and a `ClassifyRequest`, and take an `Answer` or
an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from edge.escalation.client import Uplink
from edge.inference.edge_stage import EdgeResult, Look, Looked, Rung
from edge.inference.worker_pool import WorkerPool
from edge.monitoring.audits import Auditor
from edge.monitoring.certification import Certification, Source
from edge.monitoring.streams import Streams, Watched
from edge.policies.baseline import Rival
from edge.serving.admission import Admission, Turns
from edge.serving.request_handler import Call
from hawkvision.cascade.certification.profile import CERTIFIED_DROPS
from hawkvision.cascade.policy import Policy, Route, uncertified, unmonitored, weakened
from hawkvision.cascade.versions import CertifiedVersions
from hawkvision.core.clock import Clock
from hawkvision.core.errors import DeadlineMissed, EscalationFailed, ManifestError, NotFound
from hawkvision.core.escalation_api import HopReply
from hawkvision.core.escalation_api import Rung as ServedRung
from hawkvision.core.logs import Transitions
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace import TraceContext
from hawkvision.core.types import (
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
from hawkvision.imaging.preprocessing import ImageHeader, probe
from hawkvision.models.fingerprints import parts_of

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
        versions: CertifiedVersions,
        pool: WorkerPool[EdgeResult],
        uplink: Uplink | None,
        clock: Clock,
        metrics: EdgeMetrics,
        max_pixels: int,
        admission: Admission,
        dc_timeout_s: float,
        streams: Streams,
        auditor: Auditor,
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
            versions: which computations its certificates are about.
            pool: where pictures are decoded and inferred.
            uplink: the datacenter, or None for a node that answers alone.
            clock: for deadlines and timings.
            metrics: where to count.
            max_pixels: largest picture accepted.
            admission: of pictures, by what they cost.
            dc_timeout_s: longest wait for the datacenter without a deadline.
            streams: the controllers; closed with the node.
            auditor: of accepted answers; closed with the node.
            source: of the certificates.
            rival: who decides in place of HawkVision's own way, by the routes of `policy`; closed with the node.
        """
        self.task = task
        self.labels = labels
        self.rung = rung
        self.best = best
        self.policy = policy
        self.versions = versions
        self.pool = pool
        self.uplink = uplink
        self.metrics = metrics
        self.clock = clock
        self.max_pixels = max_pixels
        self.admission = admission
        self.dc_timeout_s = dc_timeout_s
        self.streams = streams
        self.auditor = auditor
        auditor.certified = self.certified
        self.source = source
        self.rival = rival
        self._calls = Call if rival is None else rival.calls
        self._report = Transitions(log, dict.fromkeys(self._stages, CERTIFIED))
        self._served: dict[str, ServedRung] | None = None
        """By name, what the datacenter says that it serves; None before it has said so."""
        self._stated: dict[str, str | None] = {}
        """By stage of the datacenter, what its newest whole answer states that it was computed by."""
        self._verdicts: tuple[CertifiedVersions, dict[str | None, bool]] = (versions, {})
        """Of `references_certified`, by intermediate stage, until more is known."""
        self._watcher = asyncio.create_task(self._watch_datacenter()) if uplink else None
        metrics.queue_length.set_function(lambda: pool.waiting)
        metrics.certificates_valid.labels(task).set_function(lambda: float(self.certificates_valid))
        self._promised = {status: metrics.promises.labels(task, status.value) for status in PromiseStatus}
        self._observe_queue = metrics.queue_duration.labels(task).observe
        self._observe_infer = metrics.inference_duration.labels(task, rung.name).observe
        self._count_second_look = metrics.second_looks.labels(task).inc

    @property
    def certificates_valid(self) -> bool:
        """Whether the certificates are about the edge stage, and about the datacenter's as far as is known."""
        known = self._served is None or all(map(self._as_certified, self._stages))
        return self.versions.holds(self.rung.name, self.rung.fingerprint) and known

    @property
    def _stages(self) -> tuple[str, ...]:
        """Those of the datacenter that certificates are about."""
        middle = self.policy.pair.middle
        return (self.best,) if middle is None else (self.best, middle.name)

    def serves(self, rung: str) -> bool:
        """Whether the datacenter says that it serves this stage as it was certified; each answer is looked at, too.

        What its replicas have stated counts, and before they have, what its settings say.
        """
        found = None if self._served is None else self._served.get(rung)
        if found is None:
            return False
        if found.ran is None:
            return self.versions.models_of(rung, found.fingerprint)
        return self.versions.holds(rung, found.ran)

    def _as_certified(self, rung: str) -> bool:
        """Whether all that its replicas last stated, in the listing and with an answer, says so; and they did."""
        found = None if self._served is None else self._served.get(rung)
        listed = None if found is None else found.ran
        if rung in self._stated:
            return self.versions.holds(rung, self._stated[rung]) and (listed is None or self.serves(rung))
        return self.versions.holds(rung, listed)

    def certified(self, reply: HopReply, received: Received = WHOLE) -> bool:
        """Whether a whole answer was computed by its stage as certified; `received` is what it looked at.

        What it states is remembered, and logged where it is other than before.
        """
        if not reply.complete:
            return False
        name, states = reply.model, reply.fingerprint
        if self._stated.get(name, CERTIFIED) != states:
            self._stated[name] = states
            self._note(name)
        return self.versions.holds(name, states, whole=reply.whole and received == WHOLE)

    def passed_over_certified(self, reply: HopReply, received: Received) -> bool:
        """Whether the intermediate stage that was passed over was the certified one."""
        middle, passed = self.policy.pair.middle, reply.passed_over
        if middle is None or passed is None:
            return False
        return self.versions.holds(middle.name, passed.fingerprint, whole=reply.whole and received == WHOLE)

    def edge_certified(self, route: Route, received: Received = WHOLE) -> bool:
        """Whether the edge stage is run as certified; of no consequence where it is not asked."""
        if route.direct:
            return True
        name, fingerprint = self.rung.name, self.rung.fingerprint
        if route.first_only:
            name, fingerprint = self.rung.first.name, self.rung.first_fingerprint
        return self.versions.holds(name, fingerprint, whole=received == WHOLE)

    def references_certified(self, route: Route) -> bool:
        """Whether the stages of the datacenter that a route's certificate is about are those certified.

        Before anything is known of them, they are not known to be others.
        """
        versions, verdicts = self._verdicts
        if versions is not self.versions:
            self._verdicts = _, verdicts = self.versions, {}
        middle = None if route.middle is None else route.middle.rung
        found = verdicts.get(middle)
        if found is None:
            unknown = self._served is None and not self._stated
            found = unknown or (self._as_certified(self.best) and (middle is None or self._as_certified(middle)))
            verdicts[middle] = found
        return found

    def adopt(self, found: Certification) -> None:
        """Other certificates are in force from now on. Requests under way will claim nothing.

        Raises:
            ManifestError: if they are about other models of the edge stage than those that are loaded.
        """
        rung = self.rung
        for name, fingerprint in ((rung.name, rung.fingerprint), (rung.first.name, rung.first_fingerprint)):
            stage = found.versions.stages.get(name)
            if fingerprint is not None and stage is not None and stage != parts_of(fingerprint)[0]:
                raise ManifestError(
                    f"the profile is about {name} with fingerprint {stage}, but loaded is "
                    f"{parts_of(fingerprint)[0]}: restart the node to load other models"
                )
        self.rung = replace(rung, temperature=found.temperature, score=found.score)
        self.policy, self.versions, self.source = found.policy, found.versions, found.source
        self.streams.adopt(found.policy.profiles)
        for name in self._stages:
            self._note(name)

    def watched(self, route: Route, stream: str | None, caller: str = "", received: Received = WHOLE) -> Watched:
        """What watches a caller's request; nothing where no certificate stands behind it, or for other versions."""
        controls = route.controls if self.edge_certified(route, received) else None
        return self.streams.watched(stream, controls, caller)

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
        watched = self.watched(route, request.stream, caller, received)
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
        rung = call.stage
        look = Look(
            rung, call.body, call.header, call.request.top_k, self.max_pixels, self.clock, call.route.temperature,
            self.pool.alone, call.route.first_only, must_end, self.admission.rates, call.cost,
        )  # fmt: skip
        result, queue_ms = await self.queued(call, look, rung)
        self._observe_queue(queue_ms * 1e-3)
        self._observe_infer(result.infer_ms * 1e-3)
        if result.again:
            self._count_second_look()
        return Looked(result, queue_ms, rung.first.name if call.route.first_only else rung.name)

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

    def promise(
        self, route: Route, tier: Tier, watched: Watched, *, degraded: bool = False, version: bool = True
    ) -> AccuracyPromise:
        """The promise as it can be made of what computed the answer, and with the traffic that comes.

        A certificate whose stream has an alarm is void. One that is about other versions claims nothing. Where too few
        audits take place, or none can, nothing is claimed of answers that a stage below the reference may give. An
        answer of the datacenter is held to nothing before the datacenter has said which models it runs.

        Args:
            route: of the target.
            tier: where the answer came from.
            watched: what watches the request.
            degraded: whether the answer fell short of the target.
            version: whether what computed it is what the route's certificate is about (`as_certified`).
        """
        promise = route.promise
        if promise.max_drop is None and promise.status is not PromiseStatus.HELD:
            return weakened(promise) if degraded else promise  # nothing certified is claimed
        if watched.void:
            return replace(weakened(promise), status=PromiseStatus.VOID)
        if not version:
            return uncertified(promise)
        if degraded or (tier is Tier.DC and self._served is None):
            return weakened(promise)
        if route.controls is not None and (self._served is None or not watched.monitored):
            return unmonitored(promise)
        return promise

    def as_certified(self, route: Route, received: Received = WHOLE, reply: HopReply | None = None) -> bool:
        """Whether what computed an answer, and runs as its reference, is what the certificates in force are about.

        Args:
            route: of the target.
            received: what of the caller's image was looked at.
            reply: the datacenter's, if it is that one's answer.
        """
        if not self.edge_certified(route, received):
            return False
        if reply is not None and not self.certified(reply, received):
            return False
        if reply is not None and route.direct:
            return reply.model == self.best
        return self.references_certified(route)

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
        self._served = {rung.name: rung for rung in served.rungs}
        for name in self._stages:
            self._note(name)
        return True

    def _note(self, name: str) -> None:
        """Something about a stage of the datacenter may have changed: log it if certificates are about that."""
        self._verdicts = (self.versions, {})
        if self.uplink is None or name not in self._stages:
            return
        rung, models = (self._served or {}).get(name), self.versions.stages.get(name)
        if self._as_certified(name) or (name not in self._stated and self.serves(name)):
            message = "guarantees restored: %s serves %s as it was certified"
            self._report.note(name, CERTIFIED, logging.INFO, message, self.uplink.url, name)
            return
        listed = None if rung is None else rung.ran or rung.fingerprint
        states = self._stated.get(name, listed)
        if self.serves(name):  # so what answers is other than what is announced
            found = "answers that do not state by what" if states is None else f"answers of {states}"
        else:
            found = "no such rung" if rung is None else f"it with fingerprint {listed}"
        self._report.note(
            name, (states, listed), logging.WARNING,
            "guarantees suspended: certificates are about %s with fingerprint %s, %s serves %s",
            name, models, self.uplink.url, found,
        )  # fmt: skip

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
