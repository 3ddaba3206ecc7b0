"""Logs each change of the link to the datacenter once, and signals when the link should be checked."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Final, NamedTuple

from hawkvision.core.clock import Clock
from hawkvision.core.logs import Transitions
from hawkvision.network.circuit_breaker import BreakerState
from hawkvision.network.transport_choice import Transport

log = logging.getLogger("hawkvision.edge")

CHECK_INTERVAL_S: Final = 1.0
"""Least time between two checks because a connection ended: a datacenter may close each connection after its answer."""


class LinkState(NamedTuple):
    """State of the transport in use."""

    transport: Transport
    connected: bool
    state: BreakerState
    key_refused: str | None
    """Why the datacenter refuses our key; None as long as it accepts it."""


class LinkReport:
    """Reports on the link to one datacenter."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.lost = asyncio.Event()
        """Set when a link goes down, its circuit breaker opens, or a connection ends."""
        self._url = url
        self._clock = clock
        self._reported = Transitions(log, {"transport": Transport.TCP, "doubt": False})
        self._noted: LinkState | None = None
        self._ended_at = -math.inf
        self._check_timer: asyncio.TimerHandle | None = None
        """Sets `lost` later, because a connection has ended."""

    @property
    def begun(self) -> bool:
        """Whether anything was reported."""
        return self._noted is not None

    def report(self, now: LinkState, loss: float | None) -> None:
        """Log what has changed; `loss` is the share of datagrams lost, if it is known."""
        before, self._noted = self._noted, now
        if before == now:
            return
        note, good, bad, url = self._reported.note, logging.INFO, logging.WARNING, self._url
        lost = "" if loss is None else f", loss {loss:.3f}"
        note("transport", now.transport, good, "images go to %s over %s%s", url, now.transport.value, lost)
        if now.key_refused is not None:
            said = "datacenter lost: %s refuses edge.datacenter_api_key: %s"
            note("datacenter", "key", bad, said, url, now.key_refused)
            return
        if not now.connected:
            note("datacenter", False, bad, "datacenter lost: %s does not answer; circuit breaker open", url)
            return
        note("datacenter", True, good, "datacenter %s: %s answers", "reached" if before is None else "back", url)
        if now.state is BreakerState.CLOSED:
            said = "datacenter trusted again: answers of %s are in time; circuit breaker closed"
            note("doubt", False, good, said, url)
        else:
            said = "datacenter doubted: too few answers of %s would be in time; circuit breaker open"
            note("doubt", True, bad, said, url)
            if before is None or before.state is BreakerState.CLOSED:
                self.lost.set()

    def connection_ended(self) -> None:
        """Set `lost`, because the datacenter may have ended too; at most once every `CHECK_INTERVAL_S`."""
        if self._check_timer is not None:
            return

        def check() -> None:
            self._check_timer = None
            self._ended_at = self._clock.now()
            self.lost.set()

        wait_s = max(0.0, CHECK_INTERVAL_S - (self._clock.now() - self._ended_at))
        self._check_timer = asyncio.get_running_loop().call_later(wait_s, check)

    def close(self) -> None:
        """Stop reporting."""
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._reported.close()
