"""One path of a session, as one end sees it: datagrams sent and not yet reported, and arrivals to report.

A datagram counts as lost when one sent `REORDERING` later was reported, or when no report named it within the path's
timeout (RFC 9002 §6.1). If nothing at all was heard since it left, that is no loss yet (§6.2): such datagrams get
`SILENT_TIMEOUTS`, because resending into a link that has only become slow makes it slower. If a later report names a
lost datagram, the path's loss is corrected: a host that was suspended for a moment looks like a link with loss.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from hawkvision.transport.congestion.rate_control import RateController
from hawkvision.transport.protocol.addresses import PathAddresses
from hawkvision.transport.protocol.frames import MAX_REPORTED, Report, encode

REORDERING: Final = 8
"""Datagrams that may overtake one before it counts as lost. QUIC takes 3, but radio links reorder more, and a false
loss costs a needless repair."""
REPORT_AFTER: Final = 16
"""Datagrams after which a report is sent at once: about one report per image."""
REPORT_DELAY_S: Final = 0.008
"""How long a report waits for more arrivals, which delays loss detection as much."""
REPORT_REACH: Final = 64
"""The least sequences that a report covers, so that some four reports name each."""
MAX_MISSED: Final = 256
"""Lost datagrams remembered per path: four times as many as a report covers."""
DEAD_AFTER_RTTS: Final = 3.0
DEAD_AFTER_LEAST_S: Final = 0.05
"""The silence that makes a path dead; the least covers the report delay and a busy peer."""
SILENT_TIMEOUTS: Final = 2.5
"""Timeouts after which a datagram counts as lost if nothing was heard since it left. The round trip of a crowded radio
can grow several times within one."""
BEHIND_RTTS: Final = 2.0
"""Round trips, plus two report delays, after which a link may have become slow. The round trip's variation is left out:
it grows first and would hide the change."""
LATE_FOR_S: Final = 0.5
"""How long a link counts as slow after a report on a lost datagram, unless a report on a later one follows. After an
outage the first report tells nothing of the present."""
UNKNOWN_RTT_S: Final = 0.2

Token = TypeVar("Token")


@dataclass(slots=True)
class SentDatagram(Generic[Token]):
    """An unreported datagram, and the owner's token of its content."""

    size: int
    at: float
    token: Token | None


@dataclass(slots=True)
class _Run:
    """Consecutive datagrams that count as lost."""

    length: int


@dataclass(slots=True)
class Path(Generic[Token]):
    """One pair of addresses, as one end sees it."""

    number: int
    rate: RateController
    where: PathAddresses
    sent: dict[int, SentDatagram[Token]] = field(default_factory=dict)
    missed: dict[int, _Run] = field(default_factory=dict)
    """The latest lost datagrams."""
    next_sequence: int = 0
    waiting_since: float | None = None
    """When the first datagram that asks for a report left after the last report came."""
    received_at: float = -math.inf
    received: dict[int, float] = field(default_factory=dict)
    """Arrival times of the latest sequences."""
    largest: int = -1
    lowest_unreported: int | None = None
    """The smallest sequence that no report has covered."""
    unreported: int = 0
    report_at: float | None = None
    clock_s: float | None = None
    """The peer's clock at its last report, unwrapped."""
    probes: int = 0
    probe_at: float | None = None
    silent_at: float = -math.inf
    newest_reported: int = -1
    """The latest sequence that the peer has reported."""
    late_at: float = -math.inf
    """When it was reported, if it counted as lost by then: the next may take as long."""

    def dead(self, now: float) -> bool:
        """Whether the path has been silent for too long."""
        return self.waiting_since is not None and now > self.dies_at

    def suspect(self, now: float) -> bool:
        """Whether a report is overdue; then another path is preferred."""
        return now > self.suspect_at

    @property
    def suspect_at(self) -> float:
        """When the awaited report becomes overdue."""
        return math.inf if self.waiting_since is None else self.waiting_since + self.rate.timeout_s()

    def behind(self, now: float) -> bool:
        """Whether reports are later than usual; then little should be sent.

        So it is if the path is silent, if the latest report named a datagram that counted as lost, or if more than
        `REORDERING` datagrams wait for a report for too long.
        """
        latest = now - BEHIND_RTTS * (self.rate.rtt_s or UNKNOWN_RTT_S) - 2 * REPORT_DELAY_S
        if now < self.late_at + LATE_FOR_S or (self.waiting_since is not None and self.waiting_since < latest):
            return True
        last = next(itertools.islice(self.sent.values(), REORDERING, None), None)
        return last is not None and last.at < latest

    def record_report(self, sequence: int, now: float, *, given_up: bool) -> None:
        """Note the first report on a datagram; `given_up` says that it counted as lost."""
        if sequence > self.newest_reported:
            self.newest_reported, self.late_at = sequence, now if given_up else -math.inf

    @property
    def dies_at(self) -> float:
        """When silence makes the path dead."""
        if self.waiting_since is None:
            return math.inf
        rtt = self.rate.rtt_s or UNKNOWN_RTT_S
        return self.waiting_since + max(DEAD_AFTER_LEAST_S, DEAD_AFTER_RTTS * rtt)

    def may_send(self, size: int) -> bool:
        """Whether `size` bytes may be sent to the peer's address."""
        return self.where.used.may_send(size)

    @property
    def proven(self) -> bool:
        """Whether the peer's address is proven."""
        return self.where.used.proven

    def report(self, now: float, *, again: bool = False) -> bytes | None:
        """The report frame of recent arrivals; None if there is none, or nothing new without `again`."""
        if not self.received or not (self.unreported or again):
            return None
        last = self.largest
        lowest = last if self.lowest_unreported is None else self.lowest_unreported
        first = max(0, last - MAX_REPORTED + 1, min(lowest, last - REPORT_REACH + 1))
        latest = max(self.received.values())
        offsets = tuple(
            None if (at := self.received.get(sequence)) is None else latest - at for sequence in range(first, last + 1)
        )
        self.unreported, self.lowest_unreported, self.report_at = 0, None, None
        return encode(
            Report(self.number, first, round(latest * 1e6) & 0xFFFFFFFF, round((now - latest) * 1e6), offsets)
        )

    def record_arrival(self, sequence: int, now: float, *, eliciting: bool) -> None:
        """Note an arrival; `eliciting` if it asks for a report."""
        self.received[sequence] = now
        self.largest = max(self.largest, sequence)
        if len(self.received) > 512:
            floor = self.largest - 256
            self.received = {s: at for s, at in self.received.items() if s >= floor}
            self.received.setdefault(sequence, now)
        if not eliciting:
            return
        self.unreported += 1
        self.lowest_unreported = sequence if self.lowest_unreported is None else min(self.lowest_unreported, sequence)
        due = now if self.unreported >= REPORT_AFTER else now + REPORT_DELAY_S
        self.report_at = due if self.report_at is None else min(self.report_at, due)

    def on_late_arrival(self, sequence: int, now: float) -> None:
        """Handle a report on a datagram that is no longer awaited: a repeated report, or one on a lost datagram."""
        run = self.missed.pop(sequence, None)
        if run is not None:
            self.record_report(sequence, now, given_up=True)
            run.length -= 1
            self.rate.on_spurious_loss(1, int(run.length == 0))

    def sent_before(self, sequence: int) -> list[int]:
        """The unreported sequences below this one."""
        return list(itertools.takewhile(lambda sent: sent < sequence, self.sent))

    def gives_up_at(self, sent: SentDatagram[Token]) -> float:
        """When a datagram counts as lost for want of a report.

        Later if nothing was heard since it left, because then all reports are late (RFC 9002 §6.2).
        """
        timeouts = 1.0 if self.received_at > sent.at else SILENT_TIMEOUTS
        return sent.at + timeouts * self.rate.timeout_s()

    def lose(self, sequences: list[int], tokens: list[Token]) -> tuple[int, list[float]]:
        """Remove lost datagrams: the number of loss runs that begin with them, and their send times.

        Adds their tokens to `tokens`.
        """
        runs, times = 0, list[float]()
        for sequence in sequences:
            sent = self.sent.pop(sequence)
            times.append(sent.at)
            run = self.missed.get(sequence - 1)  # a run may be found in pieces
            if run is None:
                run, runs = _Run(0), runs + 1
            run.length += 1
            self.missed[sequence] = run
            if sent.token is not None:
                tokens.append(sent.token)
        while len(self.missed) > MAX_MISSED:
            del self.missed[next(iter(self.missed))]
        return runs, times

    def unwrap_clock(self, clock_us: int) -> float:
        """The peer's clock in seconds, beyond its 32 bits of microseconds (71 minutes)."""
        if self.clock_s is None:
            self.clock_s = clock_us * 1e-6
        else:
            step = (clock_us - round(self.clock_s * 1e6)) & 0xFFFFFFFF
            self.clock_s += (step - (1 << 32 if step >> 31 else 0)) * 1e-6
        return self.clock_s
