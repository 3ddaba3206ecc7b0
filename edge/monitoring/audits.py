"""Audits: the reference stage also answers a fixed share of the images that a stage below it scores.

    scored ─┬─ no room, link down ─┬─ drawn ─────► due, and missed
            │                      └─ not drawn ─► nothing
            └─ draw ─┬─ not drawn ───────────────► nothing
                     └─ drawn ─┬─ the reference stage has answered anyway ───────► an outcome
                               └─ asked, in the background ─┬─ answer ───────────► an outcome
                                                            └─ no answer ────────► due, and missed

The draw does not depend on the image, nor on whether it was accepted, escalated or given up. So the outcomes are a
uniform sample of what the stage scored. Whether there is room does not depend on the image either, and is checked
first, for escalated images too: otherwise a burst would yield more outcomes of escalated images than of accepted ones.
A missed audit is no outcome, and its result is not guessed.

The caller has its answer before the audit begins. An audit takes a connection only while one is free, so that no
caller's escalation waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from edge.escalation.transport import Escalation
from edge.monitoring.request_streams import StreamControllers
from edge.monitoring.stream import StageScore
from hawkvision.core.errors import EscalationFailed, RequestError
from hawkvision.core.escalation_api import EscalationReply, EscalationRequest
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace_context import TraceContext
from hawkvision.core.types import Prediction, Reason
from hawkvision.imaging.preprocessing import probe
from hawkvision.tasks.kind import TaskKind

if TYPE_CHECKING:
    from edge.escalation.client import DatacenterClient

log = logging.getLogger("hawkvision.edge")

MOST_AT_ONCE: Final = 4
"""Audits sent at once. At 2 % of the traffic and round trips of 100 ms, four serve 2,000 requests a second."""
MOST_UNDER_WAY: Final = 16
MOST_BYTES: Final = 40_000_000
"""Audits that are sent or wait for their turn, and bytes of their images."""
MAX_WAIT_S: Final = 5.0
"""Longest wait for an audit, or for an answer if that is shorter."""


class Auditor:
    """Draws audits, carries them out in the background and reports the outcomes. Used on one event loop."""

    def __init__(
        self,
        task: str,
        kind: TaskKind[Any],
        best: str,
        datacenter: DatacenterClient | None,
        metrics: EdgeMetrics,
        draws: random.Random,
        timeout_s: float,
        share: float,
        certified: Callable[[EscalationReply], bool],
    ) -> None:
        """Prepare.

        Args:
            task: whose answers are audited.
            kind: of the task; compares predictions.
            best: the reference stage.
            datacenter: runs the reference stage; None audits nothing.
            metrics: where to count.
            draws: random numbers that choose the images.
            timeout_s: longest wait for an audit, if it is less than `MAX_WAIT_S`.
            share: of the images that stages score, 0..1.
            certified: whether a reply was computed by the reference stage as certified.
        """
        self._certified = certified
        self._share = share
        self._task = task
        self._kind = kind
        self._best = best
        self._datacenter = datacenter
        self._metrics = metrics
        self._draws = draws
        self._timeout_s = min(timeout_s, MAX_WAIT_S)
        self._under_way: set[asyncio.Task[None]] = set()
        self._held_bytes = 0
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    def consider(
        self,
        controllers: StreamControllers,
        scores: Sequence[StageScore],
        body: bytes,
        trace: TraceContext,
        *,
        comparable: bool,
        reference: Prediction | None = None,
    ) -> None:
        """Draw whether to audit a request. Called for every request that a stage scored, once its outcome is known.

        Args:
            controllers: of its streams.
            scores: of each stage below the reference stage.
            body: the image.
            trace: the request's span; an audit is a child.
            comparable: whether the datacenter runs the certified reference stage, as far as it says.
            reference: the prediction of the reference stage, if it has answered already.
        """
        datacenter = self._datacenter
        drawn = self._draws.random() < self._share
        if datacenter is None or not comparable or not datacenter.up or not self._room(datacenter, len(body)):
            if drawn:
                self._count("skipped")
                controllers.missed()
            else:
                controllers.not_due()
        elif not drawn:
            controllers.not_due()
        elif reference is not None:
            self._found(controllers, scores, reference)
        else:
            # A task begins at the loop's next turn. The answer is written before, for nothing is awaited in between.
            audit = asyncio.create_task(self._audit(datacenter, controllers, scores, body, trace))
            self._under_way.add(audit)
            audit.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Cancel the audits that are under way."""
        under_way = list(self._under_way)
        for audit in under_way:
            audit.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _room(self, datacenter: DatacenterClient, size: int) -> bool:
        waiting = len(self._under_way)
        return datacenter.idle and (not waiting or (waiting < MOST_UNDER_WAY and self._held_bytes + size <= MOST_BYTES))

    def _found(self, controllers: StreamControllers, scores: Sequence[StageScore], reference: Prediction) -> None:
        disagreements = [self._kind.disagreement(score.answered, reference) for score in scores]
        self._count("differ" if any(disagreements) else "agree")
        controllers.audited(scores, disagreements)

    async def _audit(
        self,
        datacenter: DatacenterClient,
        controllers: StreamControllers,
        scores: Sequence[StageScore],
        body: bytes,
        trace: TraceContext,
    ) -> None:
        size = len(body)
        reference: Prediction | None = None
        self._held_bytes += size
        outcome, refused = "failed", False
        request = EscalationRequest(task=self._task, variant=self._best, deadline_ms=self._timeout_s * 1e3, top_k=1)
        try:
            async with self._turns:
                if datacenter.idle:
                    self._metrics.escalations.labels(self._task, Reason.AUDIT.value).inc()
                    body = await datacenter.prepare_image(body, probe(body))
                    # Lossless, also over datagrams: an answer to a part of the image says nothing about the image.
                    escalation = Escalation(body, request, trace.child(), self._timeout_s, lossless=True)
                    reply = (await datacenter.infer(escalation)).reply
                    reference = reply.prediction if reply.whole and self._certified(reply) else None
                else:
                    outcome = "skipped"
        except asyncio.CancelledError:
            outcome = "skipped"
            raise
        except (EscalationFailed, RequestError) as error:
            refused = isinstance(error, RequestError)
            log.debug("audit failed: %s", error)
        finally:
            self._held_bytes -= size
            if reference is not None:
                self._found(controllers, scores, reference)
            else:
                self._count(outcome)
                controllers.missed(refused=refused)

    def _count(self, outcome: str) -> None:
        self._metrics.audits.labels(self._task, outcome).inc()
