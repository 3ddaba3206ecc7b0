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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from edge.call import Call
from edge.rung import EdgeResult, Looked, Rung
from edge.uplink import Uplink
from edge.workers import WorkerPool
from hawkvision.cascade.policy import Policy, weakened
from hawkvision.clock import Clock
from hawkvision.errors import DeadlineMissed, EscalationFailed, NotFound, TooLarge
from hawkvision.metrics import EdgeMetrics
from hawkvision.trace import TraceContext
from hawkvision.types import AccuracyPromise, Answer, ClassifyRequest, OnMiss, PromiseStatus, Tier
from hawkvision.vision.image import ImageHeader, probe

log = logging.getLogger("hawkvision.edge")

RUNGS_INTERVAL_S: Final = 15.0
"""How often the node asks what the datacenter serves while the link is up: it finds a replaced model."""
FIRST_PROBE_S: Final = 0.25
LONGEST_PROBE_S: Final = 5.0
"""How often it asks while the link is down: the interval doubles from the first to the longest."""


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
        self.clock = clock
        self.max_pixels = max_pixels
        self.dc_timeout_s = dc_timeout_s
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
        if header.pixels > self.max_pixels:
            raise TooLarge(f"the picture has {header.width}x{header.height} pixels; at most {self.max_pixels} in all")
        call = Call(self, body, header, request, route, started, trace, hang_up)
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

    async def at_edge(self, body: bytes, header: ImageHeader, top_k: int, deadline: float | None) -> Looked:
        """`Rung.look` on a worker, earliest deadline first.

        Raises:
            Overloaded: if the queue is full.
            RequestError: if the picture is broken.
        """
        result, queue_ms = await self.pool.submit(
            lambda: self.rung.look(body, header, top_k, self.max_pixels, self.clock), deadline
        )
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
