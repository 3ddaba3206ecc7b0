"""What operators hear of the way to the datacenter: a line for each change, and `lost` for whoever watches it."""

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

LOOK_AGAIN_S: Final = 1.0
"""Between two looks at the datacenter for connections that end: a tier that closes each after its answer is no reason
to ask it all the time."""


class LinkState(NamedTuple):
    """Of the way that the next image goes."""

    transport: Transport
    connected: bool
    state: BreakerState
    key_refused: str | None
    """What the datacenter says against our key; None if it takes it, as far as is known."""


class LinkReport:
    """Of one datacenter."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.lost = asyncio.Event()
        """Set when a link goes down, is doubted, or a connection ends."""
        self._url = url
        self._clock = clock
        self._reported = Transitions(log, {"transport": Transport.TCP, "doubt": False})
        self._noted: LinkState | None = None
        self._ended_at = -math.inf
        self._looking: asyncio.TimerHandle | None = None
        """To have the datacenter looked at, for a connection has ended."""

    @property
    def begun(self) -> bool:
        """Whether anything was reported."""
        return self._noted is not None

    def report(self, now: LinkState, loss: float | None) -> None:
        """Log what has changed; `loss` is the share of datagrams lost, as far as it is known."""
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
        """The datacenter may have ended, too: have it looked at, once in `LOOK_AGAIN_S` at most."""
        if self._looking is not None:
            return

        def look() -> None:
            self._looking = None
            self._ended_at = self._clock.now()
            self.lost.set()

        wait_s = max(0.0, LOOK_AGAIN_S - (self._clock.now() - self._ended_at))
        self._looking = asyncio.get_running_loop().call_later(wait_s, look)

    def close(self) -> None:
        """Report no more."""
        if self._looking is not None:
            self._looking.cancel()
        self._reported.close()
