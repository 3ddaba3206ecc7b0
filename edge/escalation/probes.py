"""Probes of a link that callers are kept from: copies of recent escalations, behind everybody's back, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from edge.escalation.pending_request import PendingRequest
from hawkvision.core.clock import Clock
from hawkvision.core.errors import EscalationFailed, RequestError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import Reason
from hawkvision.network.circuit_breaker import CircuitBreaker

log = logging.getLogger("hawkvision.edge")


class Probes:
    """Of one datacenter, over whichever transport is in use."""

    def __init__(
        self,
        send: Callable[[PendingRequest], Awaitable[object]],
        over: Callable[[], None],
        clock: Clock,
        metrics: EdgeMetrics | None,
    ) -> None:
        """Prepare: `send` asks, and `over` is called when a probe begins or is over."""
        self._send = send
        self._over = over
        self._clock = clock
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    def begin(self, breaker: CircuitBreaker, made: Callable[[], Awaitable[PendingRequest]]) -> bool:
        """Begin to ask what is `made`, if a probe is due; whether it has begun."""
        if not breaker.begin_probe(self._clock.now()):
            return False
        self._task = asyncio.create_task(self._probe(breaker, made))
        self._over()
        return True

    def cancel(self) -> None:
        """What is under way is of no interest any more."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End what is under way."""
        self.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _probe(self, breaker: CircuitBreaker, made: Callable[[], Awaitable[PendingRequest]]) -> None:
        try:
            pending = await made()
            if self._metrics is not None:
                self._metrics.escalations.labels(pending.request.task, Reason.TRIAL.value).inc()
            await self._send(pending)
        except (EscalationFailed, RequestError) as error:
            log.debug("trial failed: %s", error)
        except Exception:  # nobody would hear of it
            log.exception("trial broke off")
        finally:
            breaker.end_probe(self._clock.now())
            self._over()
