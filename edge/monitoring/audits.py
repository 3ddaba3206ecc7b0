"""Audits: the reference stage also answers a share of the images that a stage below it scores.

    scored ─► draw ─┬─ not drawn ────────────────────────────────────────────────► nothing
                    └─ drawn: due ─┬─ the reference stage has answered anyway ───► an outcome
                                   └─ waits for its turn ─┬─ answer ─────────────► an outcome
                                                          ├─ no room, refused, ──► missing
                                                          │  or failed four times
                                                          └─ link down, failed ──► waits

The draw depends neither on the image nor on whether it was accepted, escalated or given up, and comes first. So the
outcomes are a uniform sample of what the stage scored, but for the missing ones, which are counted
(`hawkvision.guarantee.monitor`).

The caller has its answer before the audit begins. An audit takes a connection only while one is free, so that no
caller's escalation waits for it. Images that wait are in memory only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from edge.escalation.transport import Escalation
from hawkvision.core.errors import EscalationFailed, RequestError
from hawkvision.core.escalation_api import EscalationReply, EscalationRequest
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace_context import TraceContext
from hawkvision.core.types import Prediction, Reason
from hawkvision.guarantee.monitor import Claims, Due, Monitor, Watched
from hawkvision.imaging.preprocessing import probe
from hawkvision.tasks.kind import TaskKind

if TYPE_CHECKING:
    from edge.escalation.client import DatacenterClient

log = logging.getLogger("hawkvision.edge")

MOST_AT_ONCE: Final = 4
"""Audits sent at once. At 2 % of the traffic and round trips of 100 ms, four serve 2,000 requests a second."""
MOST_BYTES: Final = 40_000_000
"""Bytes of the images that wait or are sent; their number is `MOST_WAITING` at most."""
MAX_WAIT_S: Final = 5.0
"""Longest wait for an audit, or for an answer if that is shorter."""
MOST_ATTEMPTS: Final = 4
"""Of an audit, while the link is up."""
RETRY_S = 1.0
"""Pause after the first; doubled after each further one."""
POLL_S: Final = 0.1
"""Time after which a worker looks again whether there is room for an audit."""


class StageScore(NamedTuple):
    """One stage's score of an image, and its prediction."""

    claims: Claims
    score: float
    answered: Prediction


@dataclass(slots=True, eq=False)
class _Audit:
    """An image that waits for the reference stage."""

    due: Due
    scores: Sequence[StageScore]
    body: bytes
    trace: TraceContext


class Auditor:
    """Draws audits, carries them out in the background and reports the outcomes. Used on one event loop."""

    def __init__(
        self,
        task: str,
        kind: TaskKind[Any],
        best: str,
        datacenter: DatacenterClient | None,
        metrics: EdgeMetrics,
        monitor: Monitor,
        timeout_s: float,
        comparable: Callable[[], bool],
        certified: Callable[[EscalationReply], bool],
    ) -> None:
        """Prepare.

        Args:
            task: whose answers are audited.
            kind: of the task; compares predictions.
            best: the reference stage.
            datacenter: runs the reference stage; without one, every audit is missing.
            metrics: where to count.
            monitor: draws the images and counts the outcomes.
            timeout_s: longest wait for an audit, if it is less than `MAX_WAIT_S`.
            comparable: whether the datacenter runs the certified reference stage, as far as it says.
            certified: whether a reply was computed by the reference stage as certified.
        """
        self._comparable = comparable
        self._certified = certified
        self._task = task
        self._kind = kind
        self._best = best
        self._datacenter = datacenter
        self._metrics = metrics
        self._monitor = monitor
        self._timeout_s = min(timeout_s, MAX_WAIT_S)
        self._waiting: deque[_Audit] = deque()
        self._some = asyncio.Event()
        self._busy = 0
        self._held_bytes = 0
        self._workers: list[asyncio.Task[None]] = []

    @property
    def pending(self) -> int:
        """Audits that wait or are made."""
        return len(self._waiting) + self._busy

    def consider(
        self,
        watched: Watched,
        scores: Sequence[StageScore],
        body: bytes,
        trace: TraceContext,
        *,
        reference: Prediction | None = None,
    ) -> None:
        """Draw whether to audit a request. Called for every request that a stage scored, once its outcome is known.

        Args:
            watched: what watches it.
            scores: of each stage below the reference stage.
            body: the image.
            trace: the request's span; an audit is a child.
            reference: the prediction of the reference stage, if it has answered already.
        """
        due = self._monitor.draw(watched)
        if due is None:
            return
        audit = _Audit(due, scores, body, trace)
        if due.settled:  # too many wait
            self._count("missed")
        elif reference is not None:
            self._found(audit, reference)
        elif self._datacenter is None or (self._held_bytes and self._held_bytes + len(body) > MOST_BYTES):
            self._missed(audit)
        else:
            self._held_bytes += len(body)
            self._waiting.append(audit)
            self._some.set()
            if not self._workers:
                self._workers = [asyncio.create_task(self._work(self._datacenter)) for _ in range(MOST_AT_ONCE)]

    async def close(self) -> None:
        """Give up the audits that wait or are made."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for _ in range(self.pending):
            self._count("missed")

    async def _work(self, datacenter: DatacenterClient) -> None:
        """Make audits, one after the other."""
        while True:
            while not self._waiting:
                self._some.clear()
                await self._some.wait()
            self._busy += 1
            await self._make(datacenter, self._waiting.popleft())
            self._busy -= 1

    async def _make(self, datacenter: DatacenterClient, audit: _Audit) -> None:
        """Make an audit, however long the link is down, and report its outcome."""
        reference: Prediction | None = None
        refused = False
        for attempt in range(MOST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_S * 2.0 ** (attempt - 1))
            try:
                reference = await self._answer(datacenter, audit)
            except RequestError as error:
                refused = True
                log.debug("audit refused: %s", error)
            except EscalationFailed as error:
                log.debug("audit failed: %s", error)
            if refused or reference is not None:
                break
        self._held_bytes -= len(audit.body)
        if reference is None:
            self._missed(audit, refused=refused)
        else:
            self._found(audit, reference)

    async def _answer(self, datacenter: DatacenterClient, audit: _Audit) -> Prediction | None:
        """The certified reference stage's answer, once there is room for the request; None if another version gave it.

        Raises:
            RequestError: if the datacenter refuses the image.
            EscalationFailed: if there is no answer.
        """
        request = EscalationRequest(task=self._task, variant=self._best, deadline_ms=self._timeout_s * 1e3, top_k=1)
        body = await datacenter.prepare_image(audit.body, probe(audit.body))
        while not (datacenter.idle and self._comparable()):  # noqa: ASYNC110 - no event tells of both
            await asyncio.sleep(POLL_S)
        self._metrics.escalations.labels(self._task, Reason.AUDIT.value).inc()
        # Lossless, also over datagrams: an answer to a part of the image says nothing about the image.
        escalation = Escalation(body, request, audit.trace.child(), self._timeout_s, lossless=True)
        reply = (await datacenter.infer(escalation)).reply
        return reply.prediction if reply.whole and self._certified(reply) else None

    def _found(self, audit: _Audit, reference: Prediction) -> None:
        outcomes = [
            (scored.claims, scored.score, self._kind.disagreement(scored.answered, reference))
            for scored in audit.scores
        ]
        self._count("differ" if any(disagreement for _, _, disagreement in outcomes) else "agree")
        self._monitor.settle(audit.due, outcomes)

    def _missed(self, audit: _Audit, *, refused: bool = False) -> None:
        self._count("missed")
        self._monitor.settle(audit.due, None, refused=refused)

    def _count(self, outcome: str) -> None:
        self._metrics.audits.labels(self._task, outcome).inc()
