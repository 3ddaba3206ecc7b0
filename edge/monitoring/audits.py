"""Audits: of a share of all images, both the edge stage's answer and the reference stage's.

    asked ──► draw ─┬─ not drawn ────────────────────────────────────────────────► nothing
                    └─ drawn: due ─┬─ the reference stage has answered anyway ───► an outcome
                                   └─ waits for its turn ─┬─ both answers ───────► an outcome
                                                          ├─ no room, refused, ──► missing
                                                          │  failed four times, or other models for ten minutes
                                                          └─ link down, failed ──► waits

The draw depends neither on the image nor on its target, nor on whether it was accepted, escalated or given up, and
comes first. So the outcomes are a uniform sample, but for the missing ones, which are counted
(`hawkvision.guarantee.monitor`).

The caller has its answer before the audit begins. An audit takes a connection only while one is free, so that no
caller's escalation waits for it. Where the route left the edge stage out, or ran its first member alone, the whole
stage runs while a worker is free; if none is for ten minutes, the audit is missing. Images wait in memory only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from edge.escalation.transport import Escalation
from edge.inference.edge_stage import StagePrediction
from edge.monitoring.evidence_log import EvidenceLog
from hawkvision.core.errors import EscalationFailed, RequestError
from hawkvision.core.escalation_api import EscalationReply, EscalationRequest
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace_context import TraceContext
from hawkvision.core.types import Prediction, Reason
from hawkvision.guarantee.bets import Claims
from hawkvision.guarantee.monitor import LONGEST_WAIT_S, MOST_WAITING, UNWATCHED, Due, Monitor, Watched
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
UNKNOWN_SCORE: Final = 1.0
"""In the evidence, until the edge stage has run: at least every threshold, so that the image counts as lost."""


class StageScore(NamedTuple):
    """One stage's score of an image, and its prediction."""

    stage: str
    claims: Claims | None
    """What its audits watch; None where nothing is certified."""
    score: float
    answered: Prediction


class Unscored(NamedTuple):
    """An image that the edge stage has not scored, and how it may."""

    claims: Claims | None
    """What its audit watches; None where that needs no score."""
    has_room: Callable[[], bool]
    """Whether the stage would delay no caller."""
    run: Callable[[], Awaitable[StagePrediction]]


@dataclass(slots=True, eq=False)
class _Audit:
    """An image that waits for the reference stage."""

    due: Due
    scores: Sequence[StageScore]
    body: bytes
    trace: TraceContext
    versions: str
    """Of the stages when it was drawn."""
    unscored: Unscored | None
    """How the edge stage runs; None if it has, or need not."""
    answer: dict[str, Any] = field(default_factory=dict)
    """The edge stage's, as the row has it: empty until the stage has run."""
    row: int | None = None
    """In the evidence; None if it is none."""
    reference: Prediction | None = None
    """The reference stage's answer, while the edge stage's is awaited."""


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
        stage: str,
        evidence: EvidenceLog | None,
        versions: Callable[[], str],
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
            stage: the edge stage whose audits are evidence.
            evidence: where they are kept; None keeps none, and audits only what is certified.
            versions: of the stages, and of what their scores depend on.
        """
        self._stage = stage
        self.evidence = evidence
        self._versions = versions
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

    def draw(self, watched: Watched, *, claimed: bool) -> Due | None:
        """Draw whether to audit a request. Called for every request, once its outcome is known.

        Args:
            watched: what watches it.
            claimed: whether anything certified is about its scores.
        """
        if self.evidence is None and not claimed:
            return None
        return self._monitor.draw(watched if claimed else UNWATCHED)

    def audit(
        self,
        due: Due,
        scores: Sequence[StageScore],
        body: bytes,
        trace: TraceContext,
        reference: Prediction | None,
        unscored: Unscored | None,
    ) -> None:
        """Audit a request that was drawn.

        Args:
            due: what `draw` gave.
            scores: of each stage below the reference stage that ran, the edge stage's first.
            body: the image.
            trace: the request's span; an audit is a child.
            reference: the prediction of the reference stage, if it has answered already.
            unscored: how the edge stage would score the image, if it has not.
        """
        audit = _Audit(due, scores, body, trace, self._versions(), unscored)
        self._begin_row(audit)
        if audit.row is None and unscored is not None and unscored.claims is None:
            audit.unscored = None
        if due.settled:  # too many wait
            self._count("missed")
            self._keep(audit, None, 1.0)
        elif reference is not None and audit.unscored is None:
            self._found(audit, reference)
        elif self._datacenter is None or self._full(len(body)):
            self._missed(audit)
        else:
            self._held_bytes += len(body)
            if reference is not None and audit.unscored is not None:
                self._await_edge(audit, audit.unscored, reference)
            else:
                self._waiting.append(audit)
                self._some.set()
            if not self._workers:
                self._workers = [asyncio.create_task(self._work(self._datacenter)) for _ in range(MOST_AT_ONCE)]

    def _full(self, size: int) -> bool:
        """Whether an image of so many bytes is too many to wait."""
        too_large = self._held_bytes > 0 and self._held_bytes + size > MOST_BYTES
        return too_large or len(self._waiting) >= MOST_WAITING

    async def close(self) -> None:
        """Give up the audits that wait or are made."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for _ in range(self.pending):
            self._count("missed")
        if self.evidence is not None:
            await self.evidence.close()

    async def _work(self, datacenter: DatacenterClient) -> None:
        """Make audits, one after the other."""
        while True:
            while not self._waiting:
                self._some.clear()
                await self._some.wait()
            self._busy += 1
            audit = self._waiting.popleft()
            if audit.reference is None:
                await self._ask_reference(datacenter, audit)
            else:
                await self._run_edge(audit, audit.reference)
            self._busy -= 1

    async def _ask_reference(self, datacenter: DatacenterClient, audit: _Audit) -> None:
        """Ask the reference stage, however long the link is down, and report the outcome or let the edge stage run.

        The certified version of a datacenter that is reached is awaited for ten minutes.
        """
        reference: Prediction | None = None
        refused = False
        for attempt in range(MOST_ATTEMPTS):
            if attempt:
                if self._waited_in_vain(datacenter, audit):
                    break
                await asyncio.sleep(RETRY_S * 2.0 ** (attempt - 1))
            try:
                in_vain = partial(self._waited_in_vain, datacenter, audit)
                reply = await self.ask(datacenter, audit.body, audit.trace, self._comparable, in_vain)
                reference = reply.prediction if reply is not None and self._certified(reply) else None
            except RequestError as error:
                refused = True
                log.debug("audit refused: %s", error)
            except EscalationFailed as error:
                log.debug("audit failed: %s", error)
            if refused or reference is not None:
                break
        if reference is not None and audit.unscored is not None:
            self._await_edge(audit, audit.unscored, reference)
            return
        self._held_bytes -= len(audit.body)
        if reference is None:
            self._missed(audit, refused=refused)
        else:
            self._found(audit, reference)

    def _await_edge(self, audit: _Audit, unscored: Unscored, reference: Prediction) -> None:
        """Let an image wait for the edge stage. Nothing that is watched waits longer than it must."""
        audit.reference = reference
        if unscored.claims is None:
            self._settle(audit, reference)
        self._waiting.append(audit)
        self._some.set()

    async def _run_edge(self, audit: _Audit, reference: Prediction) -> None:
        """Run the edge stage if there is room, and report the outcome; else the audit waits for its next turn."""
        unscored, found = audit.unscored, None
        assert unscored is not None, "the stage has not run"
        await asyncio.sleep(POLL_S)  # the answer leaves first
        room = unscored.has_room()
        if not room and asyncio.get_running_loop().time() < audit.due.at + LONGEST_WAIT_S:
            self._waiting.append(audit)
            return
        if room:
            try:
                found = await unscored.run()
            except Exception as error:  # noqa: BLE001 - no image may end the worker
                log.debug("audit failed at the edge: %s", error)
        self._held_bytes -= len(audit.body)
        if found is None:
            self._missed(audit)
            return
        audit.scores = (StageScore(self._stage, unscored.claims, found.score, found.prediction), *audit.scores)
        audit.answer.update(self._kind.encode_compared(found.prediction))
        self._found(audit, reference)

    async def ask(
        self,
        datacenter: DatacenterClient,
        image: bytes,
        trace: TraceContext,
        ready: Callable[[], bool] = lambda: True,
        in_vain: Callable[[], bool] = lambda: False,
    ) -> EscalationReply | None:
        """The reference stage's answer, once there is room for the request; None if it is of a part of the image.

        Args:
            datacenter: that runs it.
            image: as the node got it.
            trace: of its request.
            ready: asked from time to time whether the stage runs that is to be asked.
            in_vain: asked likewise whether it is not waited for any more.

        Raises:
            RequestError: if the datacenter refuses the image.
            EscalationFailed: if there is no answer.
        """
        request = EscalationRequest(task=self._task, variant=self._best, deadline_ms=self._timeout_s * 1e3, top_k=1)
        body = await datacenter.prepare_image(image, probe(image))
        while not (datacenter.idle and ready()):
            if in_vain():
                return None
            await asyncio.sleep(POLL_S)
        self._metrics.escalations.labels(self._task, Reason.AUDIT.value).inc()
        # Lossless, also over datagrams: an answer to a part of the image says nothing about the image.
        escalation = Escalation(body, request, trace.child(), self._timeout_s, lossless=True)
        reply = (await datacenter.infer(escalation)).reply
        return reply if reply.whole else None

    def _waited_in_vain(self, datacenter: DatacenterClient, audit: _Audit) -> bool:
        """Whether an image has waited for the certified version as long as any may."""
        late = asyncio.get_running_loop().time() >= audit.due.at + LONGEST_WAIT_S
        return late and datacenter.up and not self._comparable()

    def _found(self, audit: _Audit, reference: Prediction) -> None:
        differing = self._settle(audit, reference)
        self._count("differ" if any(differing) else "agree")
        self._keep(audit, reference, differing[0])

    def _settle(self, audit: _Audit, reference: Prediction) -> list[float]:
        """Give the monitor the outcome, unless it has it; the disagreement of each stage that ran."""
        differing = [self._kind.disagreement(scored.answered, reference) for scored in audit.scores]
        outcomes = [
            (scored.claims, scored.score, disagreement)
            for scored, disagreement in zip(audit.scores, differing, strict=True)
            if scored.claims is not None
        ]
        if not audit.due.settled:
            self._monitor.settle(audit.due, outcomes)
        return differing

    def _missed(self, audit: _Audit, *, refused: bool = False) -> None:
        self._count("missed")
        if not audit.due.settled:
            self._monitor.settle(audit.due, None, refused=refused)
        self._keep(audit, None, 1.0)

    def _begin_row(self, audit: _Audit) -> None:
        """Begin the row of an image that the edge stage has scored or may score, if its drawing makes it evidence."""
        score = UNKNOWN_SCORE
        if audit.unscored is None:
            scored = audit.scores[0]
            if scored.stage != self._stage:
                return
            score, audit.answer = scored.score, self._kind.encode_compared(scored.answered)
        if self.evidence is not None:
            stream = audit.due.streams[0].key if audit.due.streams else b""
            audit.row = self.evidence.draw(audit.due.u, stream, audit.versions, audit.body, score, audit.answer)

    def _keep(self, audit: _Audit, reference: Prediction | None, disagreement: float) -> None:
        """Keep the outcome as evidence; one by other versions than those that it was drawn for is missing."""
        if audit.row is None or self.evidence is None:
            return
        known = reference is not None and audit.versions == self._versions()
        answer = self._kind.encode_compared(reference) if known and reference is not None else None
        score = next((scored.score for scored in audit.scores if scored.stage == self._stage), UNKNOWN_SCORE)
        self.evidence.settle(audit.row, audit.body, answer, disagreement, score)

    def _count(self, outcome: str) -> None:
        self._metrics.audits.labels(self._task, outcome).inc()
