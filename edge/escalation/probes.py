"""Probes of a link whose circuit breaker is open: copies of recent requests, sent in the background, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from edge.escalation.transport import Escalation
from hawkvision.core.clock import Clock
from hawkvision.core.errors import EscalationFailed, RequestError
from hawkvision.core.metrics import LinkMetrics
from hawkvision.core.types import Reason
from hawkvision.network.circuit_breaker import CircuitBreaker

log = logging.getLogger("hawkvision.edge")


class Probes:
    """The probes of one datacenter, over whichever transport is in use."""

    def __init__(
        self,
        send: Callable[[Escalation], Awaitable[object]],
        changed: Callable[[], None],
        clock: Clock,
        metrics: LinkMetrics | None,
    ) -> None:
        """Prepare: `send` sends a request; `changed` is called when a probe starts and when it ends."""
        self._send = send
        self._changed = changed
        self._clock = clock
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    def begin(self, breaker: CircuitBreaker, prepare: Callable[[], Awaitable[Escalation]]) -> bool:
        """Start a probe with the request that `prepare` gives, if one is due; whether it has started."""
        if not breaker.begin_probe(self._clock.now()):
            return False
        self._task = asyncio.create_task(self._probe(breaker, prepare))
        self._changed()
        return True

    def cancel(self) -> None:
        """Cancel the running probe."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Cancel the running probe and wait for its end."""
        self.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _probe(self, breaker: CircuitBreaker, prepare: Callable[[], Awaitable[Escalation]]) -> None:
        try:
            escalation = await prepare()
            if self._metrics is not None:
                self._metrics.escalations(Reason.TRIAL.value).inc()
            await self._send(escalation)
        except (EscalationFailed, RequestError) as error:
            log.debug("probe failed: %s", error)
        except Exception:  # no caller would report it
            log.exception("probe broke off")
        finally:
            breaker.end_probe(self._clock.now())
            self._changed()
