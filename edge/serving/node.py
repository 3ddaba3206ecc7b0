"""One edge node: from an image and a target to an answer, wherever it is found.

    bytes ─ probe ─ route(target) ─┬─ worker: decode, resize, infer, score ─ decide ─┬─ accept ──────────────► answer
                                   │                                                └─ escalate ─┐
                                   └─ direct (target only the reference stage can meet) ────────────┴─ uplink ─► answer
                                                                                                    │ late, down
                                                                                                    └─ degraded ► answer

Beside that way run the controllers (`edge.monitoring.streams`), which raise thresholds and void guarantees when traffic
is not as certified, and the audits (`edge.monitoring.audits`), which tell them.

The node holds no protocol: servers (`edge.servers.http`) give it bytes and a `ClassifyRequest`, and take an `Answer` or
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
from edge.inference.edge_stage import EdgeResult, Look, Looked, Stage
from edge.inference.worker_pool import WorkerPool
from edge.monitoring.audits import Auditor
from edge.monitoring.certification import Certification, Source
from edge.monitoring.streams import Streams, Watched
from edge.policies.baseline import BaselinePolicy
from edge.serving.admission import Admission, Turns
from edge.serving.request_handler import Call
from hawkvision.cascade.certification.profile import CERTIFIED_DROPS
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import Route, uncertified, unmonitored, without_guarantee
from hawkvision.cascade.versions import CertifiedVersions
from hawkvision.core.clock import Clock
from hawkvision.core.errors import DeadlineMissed, EscalationFailed, ManifestError, NotFound
from hawkvision.core.escalation_api import EscalationReply
from hawkvision.core.escalation_api import Stage as ServedStage
from hawkvision.core.logs import Transitions
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace import TraceContext
from hawkvision.core.types import (
    WHOLE,
    AccuracyGuarantee,
    AccuracyStatus,
    Answer,
    ClassifyRequest,
    MaxAccuracyDrop,
    OnMiss,
    Quality,
    Received,
    Target,
    Tier,
)
from hawkvision.imaging.preprocessing import ImageHeader, probe
from hawkvision.models.fingerprints import parts_of

log = logging.getLogger("hawkvision.edge")

STAGES_INTERVAL_S: Final = 5.0
"""How often the node asks what the datacenter serves while the link is up and nothing happens: it finds a model that
was replaced behind a proxy, and a silent link. Where escalations fail or are doubted, or a connection ends, it asks at
once."""
CERTIFIED: Final = "certified"
"""The state of a stage that the datacenter serves as it was certified."""
FIRST_PROBE_S: Final = 0.1
LONGEST_PROBE_S: Final = 5.0
PROBE_SHARE: Final = 0.05
"""How often it asks while the link is down, or has not been up yet: after this share of the time that it has been down,
between the first interval and the longest. A tier that takes 20 s to start is found at most a second later."""
LISTED_TARGETS: Final[tuple[Target, ...]] = (*Quality, *map(MaxAccuracyDrop, CERTIFIED_DROPS))
"""What `/v1/targets` lists; every certificate stands behind one of them."""


class EdgeNode:
    """Answers images for one task. Made and used on one event loop."""

    def __init__(
        self,
        *,
        task: str,
        labels: Sequence[str],
        stage: Stage,
        best: str,
        policy: Policy,
        versions: CertifiedVersions,
        pool: WorkerPool[EdgeResult],
        uplink: Uplink | None,
        clock: Clock,
        metrics: EdgeMetrics,
        max_pixels: int,
        admission: Admission,
        datacenter_timeout_s: float,
        streams: Streams,
        auditor: Auditor,
        source: Source | None = None,
        baseline: BaselinePolicy | None = None,
    ) -> None:
        """Make a node of loaded parts.

        Args:
            task: what it answers.
            labels: class names in index order.
            stage: the edge stage.
            best: name of the cascade's reference stage, asked on escalation.
            policy: of this pair.
            versions: which computations its certificates are about.
            pool: where images are decoded and inferred.
            uplink: the datacenter, or None for a node that answers alone.
            clock: for deadlines and timings.
            metrics: where to count.
            max_pixels: largest image accepted.
            admission: of images, by what they cost.
            datacenter_timeout_s: longest wait for the datacenter without a deadline.
            streams: the controllers; closed with the node.
            auditor: of accepted answers; closed with the node.
            source: of the certificates.
            baseline: who decides in place of HawkVision's own way, by the routes of `policy`; closed with the node.
        """
        self.task = task
        self.labels = labels
        self.stage = stage
        self.best = best
        self.policy = policy
        self.versions = versions
        self.pool = pool
        self.uplink = uplink
        self.metrics = metrics
        self.clock = clock
        self.max_pixels = max_pixels
        self.admission = admission
        self.datacenter_timeout_s = datacenter_timeout_s
        self.streams = streams
        self.auditor = auditor
        auditor.certified = self.certified
        self.source = source
        self.baseline = baseline
        self._calls = Call if baseline is None else baseline.calls
        self._report = Transitions(log, dict.fromkeys(self._stages, CERTIFIED))
        self._served: dict[str, ServedStage] | None = None
        """By name, what the datacenter says that it serves; None before it has said so."""
        self._stated: dict[str, str | None] = {}
        """By stage of the datacenter, what its newest whole answer states that it was computed by."""
        self._verdicts: tuple[CertifiedVersions, dict[str | None, bool]] = (versions, {})
        """Of `references_certified`, by intermediate stage, until more is known."""
        self._watcher = asyncio.create_task(self._watch_datacenter()) if uplink else None
        metrics.queue_length.set_function(lambda: pool.waiting)
        metrics.certificates_valid.labels(task).set_function(lambda: float(self.certificates_valid))
        self._guaranteed = {status: metrics.guarantees.labels(task, status.value) for status in AccuracyStatus}
        self._observe_queue = metrics.queue_duration.labels(task).observe
        self._observe_infer = metrics.inference_duration.labels(task, stage.name).observe
        self._count_ensemble_run = metrics.ensemble_runs.labels(task).inc

    @property
    def certificates_valid(self) -> bool:
        """Whether the certificates are about the edge stage, and about the datacenter's as far as is known."""
        known = self._served is None or all(map(self._as_certified, self._stages))
        return self.versions.holds(self.stage.name, self.stage.fingerprint) and known

    @property
    def _stages(self) -> tuple[str, ...]:
        """Those of the datacenter that certificates are about."""
        intermediate = self.policy.pair.intermediate
        return (self.best,) if intermediate is None else (self.best, intermediate.name)

    def serves(self, stage: str) -> bool:
        """Whether the datacenter says that it serves this stage as it was certified; each answer is looked at, too.

        What its replicas have stated counts, and before they have, what its settings say.
        """
        found = None if self._served is None else self._served.get(stage)
        if found is None:
            return False
        if found.ran is None:
            return self.versions.models_of(stage, found.fingerprint)
        return self.versions.holds(stage, found.ran)

    def _as_certified(self, stage: str) -> bool:
        """Whether all that its replicas last stated, in the listing and with an answer, says so; and they did."""
        found = None if self._served is None else self._served.get(stage)
        listed = None if found is None else found.ran
        if stage in self._stated:
            return self.versions.holds(stage, self._stated[stage]) and (listed is None or self.serves(stage))
        return self.versions.holds(stage, listed)

    def certified(self, reply: EscalationReply, received: Received = WHOLE) -> bool:
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

    def passed_over_certified(self, reply: EscalationReply, received: Received) -> bool:
        """Whether the intermediate stage that was passed over was the certified one."""
        intermediate, passed = self.policy.pair.intermediate, reply.passed_over
        if intermediate is None or passed is None:
            return False
        return self.versions.holds(intermediate.name, passed.fingerprint, whole=reply.whole and received == WHOLE)

    def edge_certified(self, route: Route, received: Received = WHOLE) -> bool:
        """Whether the edge stage is run as certified; of no consequence where it is not asked."""
        if route.direct:
            return True
        name, fingerprint = self.stage.name, self.stage.fingerprint
        if route.first_only:
            name, fingerprint = self.stage.first.name, self.stage.first_fingerprint
        return self.versions.holds(name, fingerprint, whole=received == WHOLE)

    def references_certified(self, route: Route) -> bool:
        """Whether the stages of the datacenter that a route's certificate is about are those certified.

        Before anything is known of them, they are not known to be others.
        """
        versions, verdicts = self._verdicts
        if versions is not self.versions:
            self._verdicts = _, verdicts = self.versions, {}
        intermediate = None if route.intermediate is None else route.intermediate.stage
        found = verdicts.get(intermediate)
        if found is None:
            unknown = self._served is None and not self._stated
            found = unknown or (
                self._as_certified(self.best) and (intermediate is None or self._as_certified(intermediate))
            )
            verdicts[intermediate] = found
        return found

    def adopt(self, found: Certification) -> None:
        """Other certificates are in force from now on. Requests under way will claim nothing.

        Raises:
            ManifestError: if they are about other models of the edge stage than those that are loaded.
        """
        stage = self.stage
        for name, fingerprint in ((stage.name, stage.fingerprint), (stage.first.name, stage.first_fingerprint)):
            certified = found.versions.stages.get(name)
            if fingerprint is not None and certified is not None and certified != parts_of(fingerprint)[0]:
                raise ManifestError(
                    f"the profile is about {name} with fingerprint {certified}, but loaded is "
                    f"{parts_of(fingerprint)[0]}: restart the node to load other models"
                )
        self.stage = replace(stage, temperature=found.temperature, score=found.score)
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
        """Answer one image.

        Args:
            body: the encoded image, as it was received.
            request: what is asked.
            started: clock time of the first byte.
            trace: the request's span; the datacenter gets a child.
            hang_up: returns when the caller is gone; waited for only while the datacenter is.
            received: what of the caller's image `body` is.
            header: of `body`, if it was probed already.
            caller: whose evidence this is: `KEY` and the name of its API key, or its address.
            turns: of the request whose image this is, one of several, which was admitted as a whole.

        Raises:
            CallerGone: if nobody waits for the answer any more.
            RequestError: the caller's fault (image, target, task).
            ServiceError: shed, shutting down, or the deadline missed with `on_miss=fail`.
        """
        call = self._call(body, request, started, trace, hang_up, received, header, caller)
        if turns is not None:
            call.turns, call.admitted = turns, turns.admitted
        try:
            if call.cannot_meet_target:
                raise call.missed()
            answer = await (self._admitted(call) if call.cost.heavy and turns is None else call.answer())
        except DeadlineMissed:
            self.metrics.deadline_misses.labels(self.task).inc()
            raise
        if answer.deadline_met is False:
            self.metrics.deadline_misses.labels(self.task).inc()
            if request.on_miss is OnMiss.FAIL:
                raise call.missed()
        self._guaranteed[answer.accuracy.status].inc()
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
        """The edge's answer to what is there of an image while more of it is on its way, if it may be believed.

        Believed is what `classify` would accept from the edge in time. One look, and nothing is escalated.

        Raises:
            RequestError, ServiceError: as `classify`.
        """
        answer = await self._call(body, request, started, trace, None, received, None, caller).early()
        if answer is not None:
            self._guaranteed[answer.accuracy.status].inc()
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
        """The request on its way; refused here, on the loop, is what can be refused from the image's header.

        Raises:
            RequestError: for another task, an unreachable target, or an image that is none or too large.
        """
        if request.task is not None and request.task != self.task:
            raise NotFound(f"task {request.task!r} is not served here; this node serves {self.task!r}")
        route = self.policy.route(request.target, received)
        header = header or probe(body)
        cost = self.admission.cost(body, header)
        watched = self.watched(route, request.stream, caller, received)
        return self._calls(self, body, header, cost, request, route, watched, started, trace, hang_up, received)

    async def _admitted(self, call: Call) -> Answer:
        """The answer to a heavy image, if it is let in."""
        with self.admission.admit([call.cost]) as call.admitted:
            return await call.answer()

    async def at_edge(self, call: Call, must_end: float | None = None) -> Looked:
        """What the edge stage says; on a worker, earliest deadline first, with others where images wait.

        Second looks are left out where they would end after `must_end`.

        Raises:
            Overloaded: if the queue is full.
            DeadlineMissed: if the image cannot be decoded by the deadline, and nobody wants it late.
            RequestError: if the image is broken.
        """
        stage = call.edge_stage
        look = Look(
            stage, call.body, call.header, call.request.top_k, self.max_pixels, self.clock, call.route.temperature,
            self.pool.alone, call.route.first_only, must_end, self.admission.rates, call.cost,
        )  # fmt: skip
        result, queue_ms = await self.queued(call, look, stage)
        self._observe_queue(queue_ms * 1e-3)
        self._observe_infer(result.infer_ms * 1e-3)
        if result.again:
            self._count_ensemble_run()
        return Looked(result, queue_ms, stage.first.name if call.route.first_only else stage.name)

    async def queued(self, call: Call, look: Look, stage: Stage) -> tuple[EdgeResult, float]:
        """What came of a look, and how long it waited, in its request's turn.

        Raises:
            Overloaded, DeadlineMissed, RequestError: as `at_edge`.
        """
        if call.turns is None:
            return await self._in_line(call, look, stage)
        async with call.turns.of(call.cost):
            return await self._in_line(call, look, stage)

    async def _in_line(self, call: Call, look: Look, stage: Stage) -> tuple[EdgeResult, float]:
        cost, admission = call.cost, self.admission
        if not cost.heavy:
            return await self.pool.submit(look, call.deadline, stage.look_together, cost)
        useless = call.deadline is not None and call.request.on_miss is not OnMiss.WAIT
        admission.check_time(cost.heavy_s, call.slack_ms(), call.request.on_miss)
        looking = self.pool.submit(look, call.deadline, stage.look_together, cost, late_is_useless=useless)
        try:
            return await looking
        except DeadlineMissed:
            admission.count_late()
            raise
        finally:
            if call.admitted is not None:
                admission.decoded(call.admitted, cost.heavy_s)

    def guarantee(
        self, route: Route, tier: Tier, watched: Watched, *, degraded: bool = False, version: bool = True
    ) -> AccuracyGuarantee:
        """The guarantee as it can be made of what computed the answer, and with the traffic that comes.

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
        guarantee = route.guarantee
        if guarantee.max_drop is None and guarantee.status is not AccuracyStatus.CERTIFIED:
            return without_guarantee(guarantee) if degraded else guarantee  # nothing certified is claimed
        if watched.suspended:
            return replace(without_guarantee(guarantee), status=AccuracyStatus.SUSPENDED)
        if not version:
            return uncertified(guarantee)
        if degraded or (tier is Tier.DATACENTER and self._served is None):
            return without_guarantee(guarantee)
        if route.controls is not None and (self._served is None or not watched.monitored):
            return unmonitored(guarantee)
        return guarantee

    def as_certified(self, route: Route, received: Received = WHOLE, reply: EscalationReply | None = None) -> bool:
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
                    async with asyncio.timeout(STAGES_INTERVAL_S):
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
            served = await uplink.stages()
        except EscalationFailed as error:
            log.debug("datacenter: %s", error)
            return False
        self._served = {stage.name: stage for stage in served.stages}
        for name in self._stages:
            self._note(name)
        return True

    def _note(self, name: str) -> None:
        """Something about a stage of the datacenter may have changed: log it if certificates are about that."""
        self._verdicts = (self.versions, {})
        if self.uplink is None or name not in self._stages:
            return
        stage, models = (self._served or {}).get(name), self.versions.stages.get(name)
        if self._as_certified(name) or (name not in self._stated and self.serves(name)):
            message = "guarantees restored: %s serves %s as it was certified"
            self._report.note(name, CERTIFIED, logging.INFO, message, self.uplink.url, name)
            return
        listed = None if stage is None else stage.ran or stage.fingerprint
        states = self._stated.get(name, listed)
        if self.serves(name):  # so what answers is other than what is announced
            found = "answers that do not state by what" if states is None else f"answers of {states}"
        else:
            found = "no such stage" if stage is None else f"it with fingerprint {listed}"
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
        self.stage.close()
        if self.baseline is not None:
            await self.baseline.close()
        await self.streams.close()
