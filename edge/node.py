"""One edge node: from a picture and a target to an answer, wherever it is found.

    bytes ─ probe ─ route(target) ─┬─ worker: decode, resize, infer, score ─ decide ─┬─ accept ──────────────► answer
                                   │                                                └─ escalate ─┐
                                   └─ direct (target only the best rung can meet) ───────────────┴─ uplink ─► answer
                                                                                                    │ late, down
                                                                                                    └─ degraded ► answer

The node holds no protocol: doors (`edge.app`) give it bytes and a `ClassifyRequest`, and take an `Answer` or an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from edge.uplink import Escalated, Uplink
from edge.workers import WorkerPool
from hawkvision.cascade.policy import (
    ANSWER_MARGIN_MS,
    Accept,
    Decision,
    Escalate,
    Miss,
    Policy,
    Route,
    decide,
    weakened,
)
from hawkvision.cascade.profile import RungProfile
from hawkvision.cascade.scores import Score, softmax, top_classes
from hawkvision.clock import Clock
from hawkvision.errors import DeadlineMissed, EscalationFailed, ManifestError, NotFound, RequestError, TooLarge
from hawkvision.hop import HopRequest
from hawkvision.manifest import InputSpec, Manifest
from hawkvision.metrics import EdgeMetrics
from hawkvision.trace import TraceContext, random_hex
from hawkvision.types import (
    AccuracyPromise,
    Answer,
    ClassifyRequest,
    OnMiss,
    Prediction,
    PromiseStatus,
    Reason,
    Tier,
    Timing,
)
from hawkvision.vision.backend import Backend
from hawkvision.vision.image import ImageHeader, load_input, probe

log = logging.getLogger("hawkvision.edge")

RUNGS_INTERVAL_S: Final = 15.0
"""How often the node asks what the datacenter serves while the link is up: it finds a replaced model."""
FIRST_PROBE_S: Final = 0.25
LONGEST_PROBE_S: Final = 5.0
"""How often it asks while the link is down: the interval doubles from the first to the longest."""


class CallerGone(Exception):
    """The caller hung up; nobody waits for the answer."""


@dataclass(frozen=True, slots=True)
class Rung:
    """The loaded edge rung: all that turns a picture into scored classes."""

    name: str
    backend: Backend
    spec: InputSpec
    temperature: float
    score: Score


@dataclass(frozen=True, slots=True)
class EdgeResult:
    """What the edge rung says of one picture; classes most probable first."""

    indices: tuple[int, ...]
    confidences: tuple[float, ...]
    score: float
    decode_ms: float
    infer_ms: float


@dataclass(frozen=True, slots=True)
class Looked:
    """An edge result and how long the picture waited for a worker."""

    result: EdgeResult
    queue_ms: float


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
        dc_timeout_s: float,
        certified: bool = True,
        expected_fingerprint: str = "",
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
            dc_timeout_s: longest wait for the datacenter without a deadline.
            certified: whether the profile's certificates hold for the loaded edge model.
            expected_fingerprint: of the best rung that the certificates hold for.
        """
        self.task = task
        self.labels = labels
        self.rung = rung
        self.best = best
        self.policy = policy
        self.pool = pool
        self.uplink = uplink
        self.metrics = metrics
        self._clock = clock
        self._max_pixels = max_pixels
        self._dc_timeout_s = dc_timeout_s
        self._certified = certified
        self._expected_fingerprint = expected_fingerprint
        self._dc_matches: bool | None = None  # not known before the datacenter has said what it serves
        self._watcher = asyncio.create_task(self._watch_datacenter()) if uplink else None
        metrics.queue_length.set_function(lambda: pool.waiting)
        metrics.certificates_valid.labels(task).set_function(lambda: float(self.certificates_valid))
        self._observe_queue = metrics.queue_duration.labels(task).observe
        self._observe_infer = metrics.inference_duration.labels(task, rung.name).observe

    @property
    def certificates_valid(self) -> bool:
        """Whether the certificates were made for the edge model, and for the datacenter's as far as is known."""
        return self._certified and self._dc_matches is not False

    async def classify(
        self,
        body: bytes,
        request: ClassifyRequest,
        started: float,
        trace: TraceContext,
        hang_up: Callable[[], Awaitable[object]] | None = None,
    ) -> Answer:
        """Answer one picture.

        Args:
            body: the encoded picture.
            request: what is asked.
            started: clock time of the first byte.
            trace: the request's span; the datacenter gets a child.
            hang_up: returns when the caller is gone; waited for only while the datacenter is.

        Raises:
            CallerGone: if nobody waits for the answer any more.
            RequestError: the caller's fault (picture, target, task).
            ServiceError: shed, shutting down, or the deadline missed with `on_miss=fail`.
        """
        if request.task is not None and request.task != self.task:
            raise NotFound(f"task {request.task!r} is not served here; this node serves {self.task!r}")
        route = self.policy.route(request.target)
        # Refused here, on the loop, what can be refused from the header: no worker and no uplink is spent on it.
        header = probe(body)
        if header.pixels > self._max_pixels:
            raise TooLarge(f"the picture has {header.width}x{header.height} pixels; at most {self._max_pixels} in all")
        call = _Call(self, body, header, request, route, started, trace, hang_up)
        try:
            answer = await (call.direct() if route.direct else call.cascade())
        except DeadlineMissed:
            self.metrics.deadline_misses.labels(self.task).inc()
            raise
        if answer.deadline_met is False:
            self.metrics.deadline_misses.labels(self.task).inc()
            if request.on_miss is OnMiss.FAIL:
                raise call.missed()
        return answer

    def look(self, body: bytes, header: ImageHeader, top_k: int) -> EdgeResult:
        """Decode, resize, infer and score one picture. Runs on a worker thread.

        Raises:
            RequestError: if the picture is broken.
            BackendError: if the backend is.
        """
        before = self._clock.now()
        pixels, _ = load_input(body, self.rung.spec, max_pixels=self._max_pixels, header=header)
        decoded = self._clock.now()
        logits = self.rung.backend.infer(pixels[np.newaxis])
        probabilities = softmax(logits, self.rung.temperature)[0]
        order = top_classes(probabilities, max(2, top_k))  # the margin needs two
        confidences = probabilities[order]
        score = confidences[0] - confidences[1] if self.rung.score is Score.MARGIN else confidences[0]
        return EdgeResult(
            indices=tuple(order.tolist()),
            confidences=tuple(confidences.tolist()),
            score=float(score),
            decode_ms=(decoded - before) * 1e3,
            infer_ms=(self._clock.now() - decoded) * 1e3,
        )

    async def at_edge(self, body: bytes, header: ImageHeader, top_k: int, deadline: float | None) -> Looked:
        """`look` on a worker, earliest deadline first.

        Raises:
            Overloaded: if the queue is full.
            RequestError: if the picture is broken.
        """
        result, queue_ms = await self.pool.submit(lambda: self.look(body, header, top_k), deadline)
        self._observe_queue(queue_ms * 1e-3)
        self._observe_infer(result.infer_ms * 1e-3)
        return Looked(result, queue_ms)

    def promise(self, promise: AccuracyPromise, tier: Tier) -> AccuracyPromise:
        """The promise as it can be made with the models that are really loaded.

        A certificate made for other models is void. An answer of the datacenter is held to nothing before the
        datacenter has said which models it runs.
        """
        if promise.status is not PromiseStatus.HELD:
            return promise
        if not self.certificates_valid:
            return replace(weakened(promise), status=PromiseStatus.VOID)
        if tier is Tier.DC and self._dc_matches is None:
            return weakened(promise)
        return promise

    async def _watch_datacenter(self) -> None:
        """Know what the datacenter serves, and bring a lost link back; callers' requests are never the probes."""
        assert self.uplink is not None
        link, lost = self.uplink.link, self.uplink.lost
        pause_s = FIRST_PROBE_S
        while True:
            lost.clear()
            if await self._check_datacenter(self.uplink):
                link.restored()
                pause_s = FIRST_PROBE_S
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RUNGS_INTERVAL_S):
                        await lost.wait()
            else:
                link.failed()
                pause_s = min(2 * pause_s, LONGEST_PROBE_S)
            self.metrics.datacenter_up.set(float(link.up))
            if not link.up:
                await asyncio.sleep(pause_s)

    async def _check_datacenter(self, uplink: Uplink) -> bool:
        """Whether it answered."""
        try:
            served = await uplink.rungs()
        except EscalationFailed as error:
            log.info("datacenter: %s", error)
            return False
        rung = next((rung for rung in served.rungs if rung.name == self.best), None)
        matches = rung is not None and rung.fingerprint == self._expected_fingerprint
        if not matches and self._dc_matches is not False:
            log.error(
                "certificates are void: made for %s with fingerprint %s, but %s serves %s",
                self.best,
                self._expected_fingerprint,
                uplink.url,
                rung or "no such rung",
            )
        self._dc_matches = matches
        return True

    async def close(self) -> None:
        """Stop watching, finish what is queued, close connections and the backend."""
        if self._watcher:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await asyncio.to_thread(self.pool.close)
        if self.uplink:
            await self.uplink.close()
        self.rung.backend.close()


class _Call:
    """One request on its way; holds what its steps share."""

    def __init__(
        self,
        node: EdgeNode,
        body: bytes,
        header: ImageHeader,
        request: ClassifyRequest,
        route: Route,
        started: float,
        trace: TraceContext,
        hang_up: Callable[[], Awaitable[object]] | None,
    ) -> None:
        self.node = node
        self.body = body
        self.header = header
        self.request = request
        self.route = route
        self.started = started
        self.trace = trace
        self.hang_up = hang_up
        self.deadline = None if request.deadline_ms is None else started + request.deadline_ms * 1e-3

    async def cascade(self) -> Answer:
        """Ask the edge first."""
        if self._edge_is_too_busy():
            return await self._dc_with_standby(Reason.EDGE_BUSY)
        edge = await self._at_edge()
        match self._decide(edge.result.confidences[0] if self.route.by_confidence else edge.result.score):
            case Accept(degraded):
                return self._from_edge(edge, degraded=degraded)
            case Miss():
                raise self.missed()
            case Escalate(reason, cutoff_ms):
                try:
                    escalated = await self._escalate(reason, cutoff_ms)
                except RequestError as error:
                    # The edge could read this picture, so the caller need not hear that the datacenter could not.
                    log.warning("the datacenter refused a picture that the edge can read: %s", error)
                    escalated = None
                if escalated is None:
                    return self._fall_back(edge, reason)
                return self._from_dc(escalated, reason, edge)

    async def direct(self) -> Answer:
        """Go straight to the best rung."""
        match self._decide(-math.inf):
            case Accept():
                return self._from_edge(await self._at_edge(), degraded=True)
            case Miss():
                raise self.missed()
            case Escalate(reason, None):
                escalated = await self._escalate(reason, None)
                if escalated is None:
                    return self._fall_back(await self._at_edge(), reason)
                return self._from_dc(escalated, reason, None)
            case Escalate(reason, _):
                return await self._dc_with_standby(reason)

    async def _dc_with_standby(self, reason: Reason) -> Answer:
        """Ask the datacenter until just before the deadline, while the edge works on what it would say."""
        slack = self.slack_ms()
        assert slack is not None, "without a deadline nobody needs to stand by"
        cutoff_ms = slack - ANSWER_MARGIN_MS
        if self.request.on_miss is OnMiss.FAIL:
            escalated = await self._escalate(reason, cutoff_ms)
            if escalated is None:
                raise self.missed()
            return self._from_dc(escalated, reason, None)
        standby = asyncio.ensure_future(self._at_edge())
        try:
            escalated = await self._escalate(reason, cutoff_ms)
            if escalated is not None:
                return self._from_dc(escalated, reason, None)
            return self._fall_back(await standby, reason)
        finally:
            standby.cancel()
            # Retrieve what it raised, so that nothing is logged as never retrieved.
            await asyncio.gather(standby, return_exceptions=True)

    def slack_ms(self) -> float | None:
        """Time left before the deadline."""
        return None if self.deadline is None else (self.deadline - self.node._clock.now()) * 1e3

    def missed(self) -> DeadlineMissed:
        """The error of `on_miss=fail`."""
        return DeadlineMissed(
            f"no answer meeting the target was possible within deadline_ms={self.request.deadline_ms:g}"
        )

    def _decide(self, score: float) -> Decision:
        uplink = self.node.uplink
        return decide(
            self.route,
            score,
            slack_ms=self.slack_ms(),
            predicted_ms=uplink.predict_ms() if uplink else None,
            on_miss=self.request.on_miss,
        )

    def _edge_is_too_busy(self) -> bool:
        """Whether the edge would be late and the datacenter would not; one who waits is better off in the queue."""
        slack, uplink = self.slack_ms(), self.node.uplink
        if slack is None or uplink is None or self.request.on_miss is OnMiss.WAIT:
            return False
        if self.node.pool.predicted_wait_ms() < slack:
            return False
        predicted = uplink.predict_ms()
        return predicted is not None and predicted < slack - ANSWER_MARGIN_MS

    async def _at_edge(self) -> Looked:
        looking = self.node.at_edge(self.body, self.header, self.request.top_k, self.deadline)
        slack = self.slack_ms()
        if slack is None or self.request.on_miss is not OnMiss.FAIL:
            return await looking
        try:
            async with asyncio.timeout(max(0.0, slack * 1e-3)):
                return await looking
        except TimeoutError:
            raise self.missed() from None

    async def _escalate(self, reason: Reason, cutoff_ms: float | None) -> Escalated | None:
        """Ask the datacenter; None if it has not answered by the cutoff or cannot be reached.

        Raises:
            RequestError: what the datacenter found wrong with the picture.
            CallerGone: if the caller hung up meanwhile.
        """
        node, metrics = self.node, self.node.metrics
        if node.uplink is None:
            return None
        timeout_s = node._dc_timeout_s if cutoff_ms is None else min(node._dc_timeout_s, max(0.001, cutoff_ms * 1e-3))
        metrics.escalations.labels(node.task, reason.value).inc()
        metrics.uplink_bytes.inc(len(self.body))
        # With `wait`, a late answer is still wanted: the datacenter must not drop the picture as expired.
        wanted_ms = None if self.request.on_miss is OnMiss.WAIT else self.slack_ms()
        request = HopRequest(task=node.task, variant=node.best, deadline_ms=wanted_ms, top_k=self.request.top_k)
        try:
            return await self._unless_gone(node.uplink.infer(self.body, request, self.trace.child(), timeout_s))
        except EscalationFailed as error:
            metrics.escalation_failures.labels(node.task).inc()
            log.info("escalation failed: %s", error)
            return None

    async def _unless_gone(self, asking: Coroutine[Any, Any, Escalated]) -> Escalated:
        """Await the datacenter, but not for a caller that is gone."""
        if self.hang_up is None:
            return await asking
        answer = asyncio.ensure_future(asking)
        leaving = asyncio.ensure_future(self.hang_up())
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise CallerGone
            return answer.result()
        finally:
            leaving.cancel()
            answer.cancel()
            await asyncio.gather(answer, leaving, return_exceptions=True)

    def _fall_back(self, edge: Looked, reason: Reason) -> Answer:
        """The edge's answer in place of one that did not come, flagged; or the error that was asked for instead."""
        if self.request.on_miss is OnMiss.FAIL and self.deadline is not None:
            raise self.missed()
        return self._from_edge(edge, degraded=True, reason=reason)

    def _from_edge(self, edge: Looked, *, degraded: bool, reason: Reason | None = None) -> Answer:
        node = self.node
        if degraded:
            node.metrics.degraded.labels(node.task).inc()
        total_ms = (node._clock.now() - self.started) * 1e3
        result = edge.result
        top_k = zip(result.indices[: self.request.top_k], result.confidences, strict=False)
        return Answer(
            id=random_hex(32),
            task=node.task,
            top_k=tuple(Prediction(node.labels[i], i, p) for i, p in top_k),
            model=node.rung.name,
            tier=Tier.EDGE,
            accuracy=weakened(self.route.promise) if degraded else node.promise(self.route.promise, Tier.EDGE),
            # `escalated` says that the datacenter was asked, even if its answer came too late to be used.
            escalated=reason is not None,
            reason=reason,
            degraded=degraded,
            deadline_met=self._met(total_ms),
            timing_ms=Timing(result.decode_ms, edge.queue_ms, result.infer_ms, total=total_ms),
        )

    def _from_dc(self, escalated: Escalated, reason: Reason, edge: Looked | None) -> Answer:
        node, reply = self.node, escalated.reply
        total_ms = (node._clock.now() - self.started) * 1e3
        timing = Timing(
            decode=edge.result.decode_ms if edge else 0.0,
            queue=edge.queue_ms if edge else 0.0,
            infer=edge.result.infer_ms if edge else 0.0,
            uplink=max(0.0, escalated.round_trip_ms - reply.timing_ms.total),
            dc=reply.timing_ms.total,
            total=total_ms,
        )
        return Answer(
            id=random_hex(32),
            task=node.task,
            top_k=tuple(Prediction(node.labels[c.index], c.index, c.confidence) for c in reply.top_k),
            model=reply.model,
            tier=Tier.DC,
            accuracy=node.promise(self.route.promise, Tier.DC),
            escalated=True,
            reason=reason,
            deadline_met=self._met(total_ms),
            timing_ms=timing,
        )

    def _met(self, total_ms: float) -> bool | None:
        return None if self.request.deadline_ms is None else total_ms <= self.request.deadline_ms


def check_rung(measured: RungProfile, manifest: Manifest, where: str) -> None:
    """Refuse certificates that were made for other model files, or for the same files used differently.

    Raises:
        ManifestError: naming the variant and what differs.
    """
    mend = "rebuild it with `hawkvision models build` or certify it with `hawkvision calibrate`"
    for variant in manifest.members(measured.name):
        expected = measured.models.get(variant.name)
        if expected != variant.sha256:
            raise ManifestError(
                f"{where}: certificates were made for {variant.name} with sha256 {expected}, but the manifest has "
                f"{variant.sha256}; {mend}"
            )
    if measured.fingerprint != manifest.fingerprint(measured.name):
        raise ManifestError(
            f"{where}: certificates were made for {measured.name} with another input or temperature than the "
            f"manifest has; {mend}"
        )
