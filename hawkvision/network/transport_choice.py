"""The transport of escalated images, chosen by the link's loss and by late replies, with hysteresis.

TCP carries the exact bytes at no extra cost as long as the link loses nothing. With loss its tail latency grows to
several round trips, which datagrams avoid. On a slow link the exact bytes are too many for a near deadline, and
datagrams carry fewer. So:

              loss ≥ 1 % for 3 s, on at least two lost datagrams; or two of the last 32 escalations
              that four deviations left time for missed their deadlines, through no fault of the tier;
              or half of eight and more, although the link's round trip and the tier's work left time
        ┌─────┐ ──────────────────────────────────────────────────────────────────────────► ┌──────────┐
        │ TCP │                                                                             │ DATAGRAM │
        └─────┘ ◄────────────────────────────────────────────────────────────────────────── └──────────┘
              loss < 0.3 % for 30 s, after the last reason for 300 s; or the datagram server is unreachable, at once

Between the thresholds nothing changes. The datagram channel counts losses, and probes the link while TCP carries the
images, so a return needs no trial. After a return TCP stays for at least `TCP_DWELL_S`.

The shares of on-time answers of the two transports do not decide: TCP is measured in good times and datagrams in bad
ones, so a comparison of them would alternate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class Transport(StrEnum):
    """The transport of images."""

    TCP = "tcp"
    DATAGRAM = "datagram"


LOSS_TO_LEAVE: Final = 0.01
LOST_TO_LEAVE: Final = 2
"""Datagrams; one of the hundred in the estimate does not yet count as one percent."""
LEAVE_AFTER_S: Final = 3.0
LATE_TO_LEAVE: Final = 2
LATE_AMONG: Final = 32
"""Recent escalations over TCP. Each had four deviations of time, so two late ones of 32 are no coincidence."""
SLOW_AMONG: Final = 8
SLOW_SHARE: Final = 0.5
"""Of at least so many escalations with deadlines, those that came too late over TCP, where it is too slow."""
LOSS_TO_RETURN: Final = 0.003
RETURN_AFTER_S: Final = 30.0
SLOW_RETURN_AFTER_S: Final = 300.0
"""Where TCP was too slow. Only trying it tells whether it still is, and a trial makes `SLOW_AMONG` callers wait."""
TCP_DWELL_S: Final = 10.0
"""Minimum time on TCP after a return."""


@dataclass(frozen=True, slots=True)
class LinkReading:
    """The measurements at one moment."""

    available: bool
    """Whether the datagram server is connected and answers."""
    loss: float | None
    """Share of lost datagrams, 0..1; None before the first estimate."""
    outcomes: int
    """Number of datagrams in `loss`."""
    late: int = 0
    """Late ones of the last `LATE_AMONG` escalations over TCP, without those that the datacenter delayed."""
    slow: bool = False
    """Whether TCP is too slow for the deadlines that the link's round trip leaves time for."""


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """The transport in use, and since when the link favours the other; times are of a monotonic clock."""

    transport: Transport = Transport.TCP
    since: float = float("-inf")
    bad_since: float | None = None
    good_since: float | None = None
    return_after_s: float = RETURN_AFTER_S
    """For how long the link must lose little before TCP is tried again."""

    def next(self, reading: LinkReading, now: float) -> TransportChoice:
        """The choice after a reading; equal to this one if nothing changed."""
        if self.transport is Transport.TCP:
            return self._on_tcp(reading, now)
        return self._on_datagram(reading, now)

    def _on_tcp(self, reading: LinkReading, now: float) -> TransportChoice:
        lost = 0.0 if reading.loss is None else reading.loss * reading.outcomes
        bad = reading.loss is not None and reading.loss >= LOSS_TO_LEAVE and lost >= LOST_TO_LEAVE - 0.5
        bad_since = (now if self.bad_since is None else self.bad_since) if bad else None
        long_bad = bad_since is not None and now - bad_since >= LEAVE_AFTER_S
        leave = long_bad or reading.late >= LATE_TO_LEAVE or reading.slow
        if leave and reading.available and now - self.since >= TCP_DWELL_S:
            return_after_s = SLOW_RETURN_AFTER_S if reading.slow else RETURN_AFTER_S
            return TransportChoice(Transport.DATAGRAM, now, return_after_s=return_after_s)
        return replace(self, bad_since=bad_since)

    def _on_datagram(self, reading: LinkReading, now: float) -> TransportChoice:
        if not reading.available:
            return TransportChoice(Transport.TCP, now)
        good = reading.loss is not None and reading.loss < LOSS_TO_RETURN
        good_since = (now if self.good_since is None else self.good_since) if good else None
        if good_since is not None and now - good_since >= self.return_after_s:
            return TransportChoice(Transport.TCP, now)
        return replace(self, good_since=good_since)
