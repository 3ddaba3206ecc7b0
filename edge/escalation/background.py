"""Escalations that no caller waits for: those whose wait was ended early, and probes of a link that is doubted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from edge.escalation.reply_validation import Escalated
from edge.escalation.transport import Escalation, EscalationTransport
from hawkvision.core.clock import Clock
from hawkvision.core.errors import EscalationFailed, RequestError
from hawkvision.core.metrics import LinkMetrics
from hawkvision.core.types import Reason
from hawkvision.network.circuit_breaker import CircuitBreaker

log = logging.getLogger("hawkvision.edge")


class WaitAbandoned(EscalationFailed):
    """Too few replies that take so long arrive in time, so the edge's own answer is given."""


class Waits:
    """Waits for replies, and keeps the requests that no caller waits for any more."""

    def __init__(self, clock: Clock) -> None:
        """Prepare."""
        self._clock = clock
        self._abandoned: set[asyncio.Task[Escalated]] = set()
        """Bounded by the number of pending requests, which include these."""

    async def while_likely(
        self, reply: Coroutine[Any, Any, Escalated], carrier: EscalationTransport, escalation: Escalation
    ) -> Escalated:
        """The reply, or the latest interim answer once a better one on time is too unlikely.

        Raises:
            WaitAbandoned: if there is no interim answer either.
        """
        times = carrier.breaker.times
        worth_ms = times.worth_ms(escalation.timeout_s * 1e3, self._clock.now())
        task, first = asyncio.create_task(reply), asyncio.create_task(escalation.begun.wait())
        try:
            await asyncio.wait({task, first}, timeout=worth_ms * 1e-3, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and escalation.first_ms is not None:
                left_ms = max(0.0, escalation.timeout_s * 1e3 - escalation.first_ms)
                rest_ms = carrier.rest.worth_ms(left_ms, self._clock.now())
                await asyncio.wait({task}, timeout=rest_ms * 1e-3)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            first.cancel()
        if task.done():
            return task.result()
        self._abandoned.add(task)
        task.add_done_callback(self._ended)
        if escalation.interim is not None:
            return escalation.interim
        raise WaitAbandoned(f"there is no answer after {worth_ms:.0f} ms; few of those that take so long come in time")

    def _ended(self, task: asyncio.Task[Escalated]) -> None:
        self._abandoned.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, (EscalationFailed, RequestError)):
            log.error("an abandoned escalation broke off", exc_info=error)

    async def close(self) -> None:
        """Cancel the abandoned requests."""
        background = list(self._abandoned)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


class Probes:
    """Sends copies of recent requests, one at a time, while a circuit breaker is open; over the transport in use."""

    def __init__(
        self,
        send: Callable[[Escalation], Awaitable[object]],
        on_change: Callable[[], None],
        clock: Clock,
        metrics: LinkMetrics | None,
    ) -> None:
        """Prepare: `send` sends a request; `on_change` is called when a probe starts and when it ends."""
        self._send = send
        self._on_change = on_change
        self._clock = clock
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    def begin(self, breaker: CircuitBreaker, prepare: Callable[[], Awaitable[Escalation]]) -> bool:
        """Start a probe with the request that `prepare` gives, if one is due; whether it has started."""
        if not breaker.begin_probe(self._clock.now()):
            return False
        self._task = asyncio.create_task(self._probe(breaker, prepare))
        self._on_change()
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
            self._on_change()
