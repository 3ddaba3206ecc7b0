"""One path of a session, as one end sees it: what left and was not reported, what arrived and was not told of.

A datagram counts as lost when one sent `REORDERING` later was reported, or when nothing was reported of it for the
path's timeout (RFC 9002 §6.1). Silence about all datagrams alike is no loss yet (§6.2): they are given
`SILENT_TIMEOUTS`, because what is sent again into a link that has only become slow makes it slower. If a report names
a lost one after all, the path's loss is put right: a host that stands still for a moment looks like a link that loses.
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
"""Datagrams that may overtake one before it counts as lost. QUIC takes 3; jitter on radio links reorders more, and a
loss found too early costs a repair that nobody needed."""
REPORT_AFTER: Final = 16
"""Datagrams after which a report is sent at once: one per image or so."""
REPORT_DELAY_S: Final = 0.008
"""How long a report waits for more to report of. It delays loss detection by as much."""
REPORT_REACH: Final = 64
"""Sequences that a report goes back at least, so that each is told some four times."""
MAX_MISSED: Final = 256
"""Datagrams remembered per path after they counted as lost: four times as many as a report goes back."""
DEAD_AFTER_RTTS: Final = 3.0
DEAD_AFTER_LEAST_S: Final = 0.05
"""Of silence; the least covers the report delay and a busy peer."""
SILENT_TIMEOUTS: Final = 2.5
"""After which datagrams count as lost though nothing has been heard since they left. A crowded radio's round trip grows
from 10 to 90 ms within one; resent after a single timeout of 46 ms, an image would take its 4 Mbit/s twice."""
BEHIND_RTTS: Final = 2.0
"""And two reports' delays, after which a link may have become slow. Its variation does not count: that grows first, and
would hide it."""
LATE_FOR_S: Final = 0.5
"""After a report of what had been given up, unless one of something later follows. After a spell in which the link was
held, the first tells nothing of what it is like now."""
UNKNOWN_RTT_S: Final = 0.2

Token = TypeVar("Token")


@dataclass(slots=True)
class SentDatagram(Generic[Token]):
    """A datagram of which nothing was reported yet, and the owner's word for what was in it."""

    size: int
    at: float
    token: Token | None


@dataclass(slots=True)
class _Run:
    """Datagrams, one after the other, that count as lost."""

    length: int


@dataclass(slots=True)
class Path(Generic[Token]):
    """One pair of addresses, as one end sees it."""

    number: int
    rate: RateController
    where: PathAddresses
    sent: dict[int, SentDatagram[Token]] = field(default_factory=dict)
    missed: dict[int, _Run] = field(default_factory=dict)
    """The latest that count as lost."""
    next_sequence: int = 0
    waiting_since: float | None = None
    """When the first datagram left that asks for a report, after the last report came."""
    heard_at: float = -math.inf
    received: dict[int, float] = field(default_factory=dict)
    """Arrival times of the latest sequences."""
    largest: int = -1
    lowest_unreported: int | None = None
    """The smallest sequence that no report has spoken of."""
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
    """When it was reported, if it had been given up by then: what follows may take as long."""

    def dead(self, now: float) -> bool:
        """Whether nothing came back for too long."""
        return self.waiting_since is not None and now > self.dies_at

    def suspect(self, now: float) -> bool:
        """Whether a report is overdue: no reason to give the path up, but to prefer another."""
        return now > self.suspect_at

    @property
    def suspect_at(self) -> float:
        """When the report that is waited for becomes overdue."""
        return math.inf if self.waiting_since is None else self.waiting_since + self.rate.timeout_s()

    def behind(self, now: float) -> bool:
        """Whether reports are later than they usually are: no reason to give anything up, but to send little.

        Either nothing is heard; or the latest that was, was of what had been given up; or so many datagrams are
        unreported that those behind them cannot have been, either.
        """
        latest = now - BEHIND_RTTS * (self.rate.rtt_s or UNKNOWN_RTT_S) - 2 * REPORT_DELAY_S
        if now < self.late_at + LATE_FOR_S or (self.waiting_since is not None and self.waiting_since < latest):
            return True
        last = next(itertools.islice(self.sent.values(), REORDERING, None), None)
        return last is not None and last.at < latest

    def record_report(self, sequence: int, now: float, *, given_up: bool) -> None:
        """The peer reports a datagram for the first time, which may have been given up before."""
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
        """Whether the peer's address may be sent so much."""
        return self.where.used.may_send(size)

    @property
    def proven(self) -> bool:
        """Whether the peer's address has proven that it receives."""
        return self.where.used.proven

    def report(self, now: float, *, again: bool = False) -> bytes | None:
        """The frame that says what arrived lately; None if there is nothing new, unless asked `again`."""
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
        """A datagram arrived; `eliciting` if it asks for a report."""
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
        """A report names what is waited for no more: most of them repeat what was said, but it may have been missed."""
        run = self.missed.pop(sequence, None)
        if run is not None:
            self.record_report(sequence, now, given_up=True)
            run.length -= 1
            self.rate.on_spurious_loss(1, int(run.length == 0))

    def sent_before(self, sequence: int) -> list[int]:
        """Sequences below this one of which nothing was reported yet."""
        return list(itertools.takewhile(lambda sent: sent < sequence, self.sent))

    def gives_up_at(self, sent: SentDatagram[Token]) -> float:
        """When a datagram counts as lost for want of a report.

        Where nothing at all was heard since it left, it is likely to be late like all else (RFC 9002 §6.2): the path
        is asked first.
        """
        timeouts = 1.0 if self.heard_at > sent.at else SILENT_TIMEOUTS
        return sent.at + timeouts * self.rate.timeout_s()

    def lose(self, sequences: list[int], tokens: list[Token]) -> tuple[int, list[float]]:
        """Take lost datagrams off the list: how many runs begin with them, and when they were sent.

        What was in them is added to `tokens`.
        """
        runs, times = 0, list[float]()
        for sequence in sequences:
            sent = self.sent.pop(sequence)
            times.append(sent.at)
            run = self.missed.get(sequence - 1)  # a run need not be found all at once
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
        """The peer's clock in seconds, continued beyond its 32 bits of microseconds (71 minutes)."""
        if self.clock_s is None:
            self.clock_s = clock_us * 1e-6
        else:
            step = (clock_us - round(self.clock_s * 1e6)) & 0xFFFFFFFF
            self.clock_s += (step - (1 << 32 if step >> 31 else 0)) * 1e-6
        return self.clock_s
