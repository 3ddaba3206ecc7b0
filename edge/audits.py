"""Audits: now and then the best rung is asked, behind the caller's back, about an answer that was given without it.

    accepted ─┬─ no room, link down ───────────────────────────► the controller hears: could not be audited
              └─ draw ─┬─ not drawn ───────────────────────────► the controller hears: not audited
                       └─ drawn: asked ─┬─ no answer ── failed ► the controller hears: not audited
                                        └─ answer ─────────────► the controller hears: agrees, or differs

The caller has its answer before the audit begins, and no caller's escalation waits for one: an audit takes a connection
only while one is free.

Whether there is room is decided before the draw and has nothing to do with what an audit would find, so that those
which take place stand for the answers given while there was room, with exactly the probability they were drawn with;
the others are no evidence, and while there is no room (link down) drift shows in the difficulty of pictures alone.
Counting skipped audits among those not drawn would pull the estimate towards the prediction: in a burst of answers a
test saw an alarm rest on nothing else. The few that fail under way do count as not drawn: a link fails whatever the
picture shows, and an estimate off by their share of the prediction's error is near enough.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from edge.streams import Kept
from edge.uplink import Uplink
from hawkvision.errors import EscalationFailed, RequestError
from hawkvision.hop import HopRequest
from hawkvision.metrics import EdgeMetrics
from hawkvision.trace import TraceContext
from hawkvision.types import Reason
from hawkvision.vision.image import probe

log = logging.getLogger("hawkvision.edge")

MOST_UNDER_WAY: Final = 4
"""Audits at once. They are 2 % of the traffic: with round trips of 100 ms four of them serve 2,000 requests a second.
Each keeps its picture in memory, at most `max_body_bytes`."""
PATIENCE_S: Final = 5.0
"""Longest wait for an audit; `dc_timeout_s` where that is shorter."""


class Auditor:
    """Draws audits, carries them out in the background and tells the controllers. Used on one event loop."""

    def __init__(
        self, task: str, best: str, uplink: Uplink | None, metrics: EdgeMetrics, draws: random.Random, timeout_s: float
    ) -> None:
        """Without `uplink` nothing is audited, but controllers still hear of every accepted answer."""
        self._task = task
        self._best = best
        self._uplink = uplink
        self._metrics = metrics
        self._draws = draws
        self._timeout_s = min(timeout_s, PATIENCE_S)
        self._under_way: set[asyncio.Task[None]] = set()

    def accepted(
        self, kept: Kept, score: float, index: int, body: bytes, trace: TraceContext, *, comparable: bool
    ) -> None:
        """An answer was accepted below the best rung: audit it, or not, and tell its controller.

        Args:
            kept: the controller of the rung that answered.
            score: of that rung.
            index: the class it answered.
            body: the picture.
            trace: the request's span; the audit is a child.
            comparable: whether the datacenter is known to run the best rung that was certified.
        """
        if self._uplink is None or not comparable:
            kept.accepted(score, 0.0, None)
            return
        probability = kept.control.audit_probability(score)
        drawn = self._draws.random() < probability
        if len(self._under_way) >= MOST_UNDER_WAY or not self._uplink.idle:
            if drawn:
                self._count("skipped")
            kept.accepted(score, 0.0, None)
            return
        if not drawn:
            kept.accepted(score, probability, None)
            return
        # A task begins at the loop's next turn: the answer, which is not awaited in between, is written before.
        audit = asyncio.create_task(self._audit(self._uplink, kept, score, index, body, trace, probability))
        self._under_way.add(audit)
        audit.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Give up the audits that are under way."""
        under_way = list(self._under_way)
        for audit in under_way:
            audit.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _audit(
        self, uplink: Uplink, kept: Kept, score: float, index: int, body: bytes, trace: TraceContext, probability: float
    ) -> None:
        differs: bool | None = None
        outcome = "failed"
        request = HopRequest(task=self._task, variant=self._best, deadline_ms=self._timeout_s * 1e3, top_k=1)
        self._metrics.escalations.labels(self._task, Reason.AUDIT.value).inc()
        try:
            body = await uplink.as_sent(body, probe(body))
            # Over a lossy link, too, the very picture: an answer to another one says nothing about this one.
            reply = (await uplink.infer(body, request, trace.child(), self._timeout_s, exact=True)).reply
            if reply.whole:
                differs = reply.top_k[0].index != index
                outcome = "differ" if differs else "agree"
        except asyncio.CancelledError:
            outcome = "skipped"
            raise
        except (EscalationFailed, RequestError) as error:
            log.debug("audit failed: %s", error)
        finally:
            self._count(outcome)
            kept.accepted(score, probability, differs)

    def _count(self, outcome: str) -> None:
        self._metrics.audits.labels(self._task, outcome).inc()
