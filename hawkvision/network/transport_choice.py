"""Which transport escalated images take: chosen by what the link loses, without flapping.

TCP is the better carrier of an image until the link loses some: the very bytes arrive, at no extra cost. At 1 % loss
its P99 is 334 ms (CUBIC) or 299 ms (BBR) where datagrams take 27, and each percent more makes it worse (20 KB,
20 Mbit/s, 40 ms; measured before any of this was built). So:

             loss ≥ 1 % for 3 s, on at least two lost datagrams; or two of the last 32 escalations
             that should have been early had not come back by their deadlines for no fault of the tier's
        ┌─────┐ ──────────────────────────────────────────────────────────────► ┌───────┐
        │ TCP │                                                                 │ DATAGRAM │
        └─────┘ ◄────────────────────────────────────────────────────────────── └───────┘
             loss < 0.3 % for 30 s; or the lossy peer is gone, at once

Between the thresholds nothing moves. Losses are counted by the lossy channel itself, which is probed while TCP carries
the images, so a return needs no trial. Whoever has just returned stays for `TCP_DWELL_S`, so that two changes for the
worse are never closer than that.

Trap (found in simulation): the shares of answers that each transport brought in time cannot be compared, because they
are not of the same weather. TCP is remembered for the good times, datagrams carry only through bad ones, and a choice
by those shares flaps in every bad spell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class Transport(StrEnum):
    """How images travel."""

    TCP = "tcp"
    DATAGRAM = "datagram"


LOSS_TO_LEAVE: Final = 0.01
LOST_TO_LEAVE: Final = 2
"""Datagrams: a single one among the hundred that the estimate rests on is no loss of one percent yet."""
LEAVE_AFTER_S: Final = 3.0
LATE_TO_LEAVE: Final = 2
LATE_AMONG: Final = 32
"""Escalations over TCP that four deviations of the estimate left time for, so two of 32 are not chance."""
LOSS_TO_RETURN: Final = 0.003
RETURN_AFTER_S: Final = 30.0
TCP_DWELL_S: Final = 10.0
"""For how long TCP is kept at least after a return, whatever is measured."""


@dataclass(frozen=True, slots=True)
class LinkReading:
    """What is known at one moment."""

    available: bool
    """Whether the lossy peer is connected and answers."""
    loss: float | None
    """Share of datagrams that are lost, 0..1; None before it is known."""
    outcomes: int
    """Datagrams that `loss` rests on."""
    late: int = 0
    """Of the last `LATE_AMONG` escalations over TCP, those that were too late for no fault of the datacenter's."""


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """The transport in use and since when it has had reasons to be another; times are of a monotonic clock."""

    transport: Transport = Transport.TCP
    since: float = float("-inf")
    bad_since: float | None = None
    good_since: float | None = None

    def next(self, reading: LinkReading, now: float) -> TransportChoice:
        """The choice after a reading; equal to this one while nothing is to be remembered."""
        if self.transport is Transport.TCP:
            return self._on_tcp(reading, now)
        return self._on_datagram(reading, now)

    def _on_tcp(self, reading: LinkReading, now: float) -> TransportChoice:
        lost = 0.0 if reading.loss is None else reading.loss * reading.outcomes
        bad = reading.loss is not None and reading.loss >= LOSS_TO_LEAVE and lost >= LOST_TO_LEAVE - 0.5
        bad_since = (now if self.bad_since is None else self.bad_since) if bad else None
        long_bad = bad_since is not None and now - bad_since >= LEAVE_AFTER_S
        leave = long_bad or reading.late >= LATE_TO_LEAVE
        if leave and reading.available and now - self.since >= TCP_DWELL_S:
            return TransportChoice(Transport.DATAGRAM, now)
        return replace(self, bad_since=bad_since)

    def _on_datagram(self, reading: LinkReading, now: float) -> TransportChoice:
        if not reading.available:
            return TransportChoice(Transport.TCP, now)
        calm = reading.loss is not None and reading.loss < LOSS_TO_RETURN
        good_since = (now if self.good_since is None else self.good_since) if calm else None
        if good_since is not None and now - good_since >= RETURN_AFTER_S:
            return TransportChoice(Transport.TCP, now)
        return replace(self, good_since=good_since)
