"""The transports to one datacenter, TCP and datagrams, and the choice between them.

DatagramTransport.probe ─► share of datagrams lost ──┐
replies that were late over TCP ─────────────────────┴─► transport_choice ─► transport in use
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from edge.escalation.http_transport import HttpTransport
from edge.escalation.transport import EscalationTransport
from hawkvision.core.clock import Clock
from hawkvision.core.metrics import LinkMetrics
from hawkvision.network.transport_choice import (
    LATE_AMONG,
    SLOW_AMONG,
    SLOW_SHARE,
    LinkReading,
    Transport,
    TransportChoice,
)
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant

if TYPE_CHECKING:
    from edge.escalation.datagram_transport import DatagramTransport

PROBE_S: Final = 0.1
IDLE_PROBE_S: Final = 1.0
ACTIVE_S: Final = 30.0
"""How long probes stay frequent after an escalation: as long as the return to TCP takes."""
RETRY_S: Final = 15.0
"""Between attempts to find a peer that does not answer or does not offer datagrams."""

Wanted: TypeAlias = Literal["tcp", "datagram", "auto"]
"""How images should travel; `datagram` and `auto` fall back to TCP where datagrams get no answer."""


class TransportSelector:
    """Both transports, and the choice between them, made anew with every probe."""

    def __init__(
        self,
        http: HttpTransport,
        api_key: str | None,
        wanted: Wanted,
        clock: Clock,
        on_switch: Callable[[], None],
        on_probe: Callable[[], None],
        metrics: LinkMetrics | None,
        congestion: CongestionFactory = LossTolerant,
    ) -> None:
        """Prepare, and look for the datagram transport in the background if it is wanted.

        Args:
            http: the transport over TCP.
            api_key: the ingress's key.
            wanted: which transport the operator wants.
            clock: for probes.
            on_switch: called when the transport in use changes.
            on_probe: called after every probe.
            metrics: where to count.
            congestion: makes the congestion controller of datagrams.
        """
        self.http = http
        self.datagram = None if wanted == "tcp" else _datagram_transport(http, api_key, congestion)
        self._wanted = wanted
        self._clock = clock
        self._on_switch = on_switch
        self._on_probe = on_probe
        self._choice = TransportChoice()
        self._late: deque[bool] = deque(maxlen=LATE_AMONG)
        """Whether the link made the reply late, for each of the last requests over TCP that had time enough."""
        self._missed: deque[bool] = deque(maxlen=LATE_AMONG)
        """The same, for each that the link's round trip and the datacenter's work left time for."""
        self._used_at = -math.inf
        if metrics is not None:
            self._expose(metrics)
        self._tending = None if self.datagram is None else asyncio.create_task(self._tend(self.datagram))

    @property
    def transport(self) -> Transport:
        """The transport that the next image takes."""
        return self._choice.transport

    @property
    def carrier(self) -> EscalationTransport:
        """The object that sends over `transport`."""
        return self.http if self.datagram is None or self.transport is Transport.TCP else self.datagram

    @property
    def loss(self) -> float | None:
        """Share of datagrams that the link loses; None while it is not measured."""
        view = None if self.datagram is None else self.datagram.view
        return view.loss if view is not None and view.known else None

    @property
    def rtt_s(self) -> float | None:
        """The link's round trip in seconds, without the datacenter's work; None while it is not measured."""
        return None if self.datagram is None else self.datagram.view.rtt_s

    @property
    def least_rtt_s(self) -> float | None:
        """The same without queues."""
        return None if self.datagram is None else self.datagram.view.least_rtt_s

    def mark_used(self, now: float) -> None:
        """Record that an image is sent: probes are frequent for `ACTIVE_S`."""
        self._used_at = now

    def record_tcp(self, *, late: bool, expected: bool) -> None:
        """Record a request over TCP with a deadline that the link's round trip and the datacenter's work left time for.

        Args:
            late: whether the reply missed it.
            expected: whether it was to be in time, as replies usually are.
        """
        self._missed.append(late)
        if expected:
            self._late.append(late)

    async def close(self) -> None:
        """Close the connections."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)
        if self.datagram is not None:
            await self.datagram.close()
        await self.http.close()

    async def _tend(self, datagram: DatagramTransport) -> None:
        """Keep measuring the datagram link, and choose."""
        while True:
            self._choose(datagram)  # first, because the probe may have to connect
            found = await datagram.probe()
            self._choose(datagram)
            self._on_probe()
            active = self._clock.now() - self._used_at < ACTIVE_S
            await asyncio.sleep(PROBE_S if found and active else IDLE_PROBE_S if found else RETRY_S)

    def _choose(self, datagram: DatagramTransport) -> None:
        before, view, now = self._choice, datagram.view, self._clock.now()
        if self._wanted == "datagram":
            wanted = Transport.DATAGRAM if datagram.available else Transport.TCP
            self._choice = before if before.transport is wanted else TransportChoice(wanted, now)
        else:
            loss = view.loss if view.known else None
            slow = len(self._missed) >= SLOW_AMONG and sum(self._missed) >= SLOW_SHARE * len(self._missed)
            reading = LinkReading(datagram.available, loss, view.outcomes, sum(self._late), slow)
            self._choice = before.next(reading, now)
        if self._choice.transport is before.transport:
            return
        self._late.clear()
        self._missed.clear()
        self.carrier.breaker.times.forget()
        self.carrier.rest.forget()
        self._on_switch()

    def _uses(self, transport: Transport) -> float:
        return float(self.transport is transport)

    def _expose(self, metrics: LinkMetrics) -> None:
        for transport in Transport:
            metrics.transport(transport.value).set_function(partial(self._uses, transport))
        metrics.loss_ratio.set_function(lambda: math.nan if self.loss is None else self.loss)
        metrics.rtt_s.set_function(lambda: math.nan if self.rtt_s is None else self.rtt_s)


def _datagram_transport(http: HttpTransport, api_key: str | None, congestion: CongestionFactory) -> DatagramTransport:
    from edge.escalation.datagram_transport import DatagramTransport  # with QUIC, which TCP needs not

    return DatagramTransport(http, api_key, congestion)
