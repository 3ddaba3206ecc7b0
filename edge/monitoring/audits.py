"""Audits: a fixed share of all images that a stage below the reference scores is also answered by the reference stage.

    scored ─┬─ no room, link down ─┬─ drawn ─────► due, and missed
            │                      └─ not drawn ─► nothing
            └─ draw ─┬─ not drawn ───────────────► nothing
                     └─ drawn ─┬─ the reference has answered anyway ─────────────► an outcome
                               └─ asked, behind the caller's back ─┬─ answer ────► an outcome
                                                                   └─ no answer ─► due, and missed

The draw knows nothing of the image or of what became of it: whether it was accepted, escalated, or given up. So
outcomes are a uniform sample of what the stage scored. Nor has it to do with the image whether there is room; that is
asked first, of escalated images, too, which would otherwise be heard of more often than accepted ones in a burst. A
missed audit is no outcome, and what it would have found is not guessed.

The caller has its answer before the audit begins, and no caller's escalation waits for one: an audit takes a connection
only while one is free.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from edge.escalation.client import DatacenterClient
from edge.monitoring.stream import StageScore
from edge.monitoring.stream_controllers import StreamController, StreamControllers
from hawkvision.core.errors import EscalationFailed, RequestError
from hawkvision.core.escalation_api import EscalationReply, EscalationRequest
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace import TraceContext
from hawkvision.core.types import WHOLE, Reason, Received
from hawkvision.imaging.preprocessing import probe

log = logging.getLogger("hawkvision.edge")

MOST_AT_ONCE: Final = 4
"""Audits sent at once. They are 2 % of the traffic: with round trips of 100 ms four of them serve 2,000 requests a
second."""
MOST_UNDER_WAY: Final = 16
MOST_BYTES: Final = 40_000_000
"""Audits sent or waiting for their turn, for requests come in bursts, and bytes of the images that they keep."""
PATIENCE_S: Final = 5.0
"""Longest wait for an audit; `datacenter_timeout_s` where that is shorter."""


class Accepted(NamedTuple):
    """A controller whose threshold accepted an answer."""

    controller: StreamController
    score: float
    answered: int


class Auditor:
    """Draws audits, carries them out in the background and tells monitors and controllers. Used on one event loop."""

    def __init__(
        self,
        task: str,
        best: str,
        datacenter: DatacenterClient | None,
        metrics: EdgeMetrics,
        draws: random.Random,
        timeout_s: float,
        share: float,
        certified: Callable[[EscalationReply, Received], bool],
    ) -> None:
        """Prepare.

        Args:
            task: whose answers are audited.
            best: the reference stage.
            datacenter: runs the reference stage; None audits nothing.
            metrics: where to count.
            draws: random numbers that choose the images.
            timeout_s: longest wait for an audit, if it is less than `PATIENCE_S`.
            share: of the images that stages score, 0..1.
            certified: whether a reply was computed by the reference stage as certified.
        """
        self._certified = certified
        self._share = share
        self._task = task
        self._best = best
        self._datacenter = datacenter
        self._metrics = metrics
        self._draws = draws
        self._timeout_s = min(timeout_s, PATIENCE_S)
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
        reference: int | None = None,
        accepted: Accepted | None = None,
        received: Received = WHOLE,
    ) -> None:
        """Audit a request, or not, once it is known what became of it; every request that a stage scored comes here.

        Args:
            controllers: of its streams.
            scores: what each stage below the reference said.
            body: the image.
            trace: the request's span; an audit is a child.
            comparable: whether the datacenter says that it runs the reference stage that was certified.
            reference: what that stage has answered, if it has; then nothing need be asked.
            accepted: the controller of the stage that gave the answer, if its threshold accepted it.
            received: what of the caller's image `body` is.
        """
        datacenter = self._datacenter
        drawn = self._draws.random() < self._share
        if datacenter is None or not comparable or not datacenter.up or not self._room(datacenter, len(body)):
            if drawn:
                self._count("skipped")
                controllers.missed()
            else:
                controllers.not_due()
            if accepted is not None:
                accepted.controller.unseen()
        elif not drawn:
            controllers.not_due()
            if accepted is not None:
                accepted.controller.accepted(accepted.score, None)
        elif reference is not None:
            self._found(controllers, scores, reference, accepted)
        else:
            # A task begins at the loop's next turn: the answer, which is not awaited in between, is written before.
            audit = asyncio.create_task(self._audit(datacenter, controllers, scores, body, trace, accepted, received))
            self._under_way.add(audit)
            audit.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Give up the audits that are under way."""
        under_way = list(self._under_way)
        for audit in under_way:
            audit.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _room(self, datacenter: DatacenterClient, size: int) -> bool:
        waiting = len(self._under_way)
        return datacenter.idle and (not waiting or (waiting < MOST_UNDER_WAY and self._held_bytes + size <= MOST_BYTES))

    def _found(
        self, controllers: StreamControllers, scores: Sequence[StageScore], reference: int, accepted: Accepted | None
    ) -> None:
        self._count("differ" if any(score.answered != reference for score in scores) else "agree")
        controllers.audited(scores, reference)
        if accepted is not None:
            accepted.controller.accepted(accepted.score, accepted.answered != reference)

    async def _audit(
        self,
        datacenter: DatacenterClient,
        controllers: StreamControllers,
        scores: Sequence[StageScore],
        body: bytes,
        trace: TraceContext,
        accepted: Accepted | None,
        received: Received,
    ) -> None:
        size, reference = len(body), None
        self._held_bytes += size
        outcome, refused = "failed", False
        request = EscalationRequest(task=self._task, variant=self._best, deadline_ms=self._timeout_s * 1e3, top_k=1)
        try:
            async with self._turns:
                if datacenter.idle:
                    self._metrics.escalations.labels(self._task, Reason.AUDIT.value).inc()
                    body = await datacenter.prepare_image(body, probe(body))
                    # Over a lossy link, too, the very image: an answer to another one says nothing about this one.
                    reply = (await datacenter.infer(body, request, trace.child(), self._timeout_s, lossless=True)).reply
                    reference = reply.top_k[0].index if reply.whole and self._certified(reply, received) else None
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
                self._found(controllers, scores, reference, accepted)
            else:
                self._count(outcome)
                controllers.missed(refused=refused)
                if accepted is not None:
                    accepted.controller.unseen()

    def _count(self, outcome: str) -> None:
        self._metrics.audits.labels(self._task, outcome).inc()
