"""What reports tell of a path: its losses, its round trip, the queue that stands on it, its bottleneck's speed.

Measurements only; `pacing` decides. Nothing here knows a clock: `now` is an argument and never goes back. Every state
is bounded, however long the path lives and whatever is reported.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

INITIAL_RTT_S: Final = 0.333
"""RFC 9002 §6.2.2."""
MAX_REPORT_DELAY_S: Final = 0.025
"""The longest a peer keeps a report back, as RFC 9000's max_ack_delay."""
GRANULARITY_S: Final = 0.001
"""Of timers (RFC 9002 §6.1.2)."""
WINDOW_S: Final = 10.0
"""How long least delay and least round trip are remembered, as BBR does."""
MAX_RATE: Final = 1.25e9
"""Bytes per second: 10 Gbit/s, more than one Python process can send."""
MOST_TRAINS: Final = 256
"""Trains remembered: 10,240 datagrams in flight, or some seconds of single ones."""
TRAIN_LEAST: Final = 5
TRAIN_MOST: Final = 40
"""Datagrams received of a train whose spacing is believed; and after which another train begins."""
SPREAD: Final = 1.5
"""How much longer than it was sent a train must arrive before it may lower the link's speed. Datagrams that leave at
our share of a full link arrive at our share; only what left much faster shows the link itself."""
FAR_SLOWER: Final = 2.0
"""How many times more slowly than known a train must arrive to be believed before the fate of all of it is known: at a
tenth of the link's speed that takes as long as ten pictures, and others are planned meanwhile."""
SAMPLES: Final = 5
"""Trains whose median is the link's speed: three pictures suffice to learn that it has changed."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One datagram that the peer received; `arrived_at` is on the peer's clock, the rest on ours (bytes, seconds)."""

    size: int
    sent_at: float
    arrived_at: float


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """What a path loses: share of datagrams, mean length of a run of losses (≥ 1); unknown before 50 outcomes."""

    ratio: float
    burst: float
    known: bool
    outcomes: int = 0
    """Datagrams that the ratio rests on."""


class LossMeter:
    """Losses over the last 500 outcomes or 10 seconds, whichever is less, but never fewer than 50 outcomes.

    Kept as at most ten blocks of about 50 outcomes.
    """

    BLOCK: Final = 50
    BLOCKS: Final = 10

    def __init__(self) -> None:
        self._blocks: deque[_Outcomes] = deque([_Outcomes(0.0)])
        self._estimate: LossEstimate | None = None
        """Of these blocks, once somebody asked: senders do for every datagram, and it changes with reports."""

    def observe(self, received: int, lost: int, runs: int, now: float) -> None:
        """Count outcomes; `runs` are those that begin with them: what goes on with an earlier one makes that longer."""
        self._estimate = None
        block = self._blocks[-1]
        if block.received + block.lost >= self.BLOCK:
            block = _Outcomes(now)
            self._blocks.append(block)
        block.at = now
        block.received += received
        block.lost += lost
        block.runs += runs
        while len(self._blocks) > 1 and (
            len(self._blocks) > self.BLOCKS + 1
            or (self._blocks[0].at < now - WINDOW_S and self._outcomes() - self._blocks[0].outcomes >= self.BLOCK)
        ):
            self._blocks.popleft()

    def found(self, received: int, runs: int) -> None:
        """Take back losses that were none: so many datagrams did arrive, and so many runs have nothing lost any more.

        Those are the latest of the losses counted; ones that are no longer counted are ignored.
        """
        self._estimate = None
        for block in reversed(self._blocks):
            late, whole = min(received, block.lost), min(runs, block.runs)
            block.lost -= late
            block.received += late
            block.runs -= whole
            received, runs = received - late, runs - whole

    def _outcomes(self) -> int:
        return sum(block.outcomes for block in self._blocks)

    @property
    def estimate(self) -> LossEstimate:
        """The state of the path."""
        if self._estimate is None:
            self._estimate = self._estimated()
        return self._estimate

    def _estimated(self) -> LossEstimate:
        outcomes = self._outcomes()
        lost = sum(block.lost for block in self._blocks)
        runs = sum(block.runs for block in self._blocks)
        return LossEstimate(
            ratio=lost / outcomes if outcomes else 0.0,
            burst=max(1.0, lost / runs) if runs else 1.0,
            known=outcomes >= self.BLOCK,
            outcomes=outcomes,
        )


@dataclass(slots=True)
class _Outcomes:
    at: float
    received: int = 0
    lost: int = 0
    runs: int = 0

    @property
    def outcomes(self) -> int:
        return self.received + self.lost


class WindowedMinimum:
    """The least value of the last `span_s`, in ten buckets of time; kept beyond that while nothing newer comes."""

    BUCKETS: Final = 10

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self._buckets: deque[tuple[float, float]] = deque(maxlen=self.BUCKETS + 1)
        self.value: float | None = None
        """None before anything was observed. Kept, for senders ask for every datagram."""

    def observe(self, value: float, now: float) -> None:
        """Take a value at `now`, which never goes back."""
        width = self.span_s / self.BUCKETS
        if self._buckets and now < self._buckets[-1][0] + width:
            start, least = self._buckets[-1]
            self._buckets[-1] = (start, min(least, value))
        else:
            self._buckets.append((now, value))
        while self._buckets[0][0] < now - self.span_s:
            self._buckets.popleft()
        self.value = min(least for _, least in self._buckets)


@dataclass(slots=True)
class _Train:
    """Datagrams that left back to back, and what became of them."""

    first_sent: float
    last_sent: float
    count: int = 0
    size: int = 0
    lost: int = 0
    received: int = 0
    received_size: int = 0
    first_of_received: float = math.inf
    last_of_received: float = -math.inf
    """When the first and the last of those that arrived were sent."""
    times: list[float] = field(default_factory=list)
    """Arrivals on the peer's clock, at most `TRAIN_MOST`."""

    @property
    def outstanding(self) -> float:
        """Bytes of which nothing is known yet; what was lost had the mean size."""
        if self.settled:
            return 0.0
        return max(0.0, self.size - self.received_size - self.lost * self.size / self.count)

    @property
    def settled(self) -> bool:
        return self.received + self.lost >= self.count

    def receive(self, arrival: Arrival) -> None:
        self.received += 1
        self.received_size += arrival.size
        self.first_of_received = min(self.first_of_received, arrival.sent_at)
        self.last_of_received = max(self.last_of_received, arrival.sent_at)
        self.times.append(arrival.arrived_at)

    def speed(self) -> tuple[float, bool] | None:
        """(bytes per second, whether the link spread the train far); None if there is too little.

        m of n datagrams drawn at random span (n+1)(m−1)/(m+1) of the train's n−1 gaps on average. So holes that came
        after the bottleneck do not make it look slow, whichever they are, and of holes that came before it the result
        is the rate of *sending* that fills the link. Holes of an overflowing queue are not at random: there each gap
        between neighbours tells the link's time for one datagram, so the median gap bounds what is made of the span.
        """
        m, n = self.received, self.count
        if m < TRAIN_LEAST:
            return None
        times = sorted(self.times)
        span = max(times[-1] - times[0], 1e-6)
        size = self.received_size / m
        delivered = rate = size * (m - 1) / span
        if m < n:
            rate *= (n + 1) / (m + 1)
            median = statistics.median(b - a for a, b in itertools.pairwise(times))
            if median > 0.0:
                rate = max(delivered, min(rate, size / median))
        spread = span > SPREAD * (self.last_of_received - self.first_of_received)
        return min(rate, MAX_RATE), spread

    def arriving(self) -> float | None:
        """Bytes per second of what has arrived so far; None if that is too little, or arrived as slowly as it left."""
        if self.received < TRAIN_LEAST or self.settled:
            return None
        span = max(max(self.times) - min(self.times), 1e-6)
        if span <= SPREAD * (self.last_of_received - self.first_of_received):
            return None
        return self.received_size * (1 - 1 / self.received) / span


class Trains:
    """The datagrams in flight, grouped into trains, and the link's speed that their spacing tells."""

    def __init__(self) -> None:
        self._trains: list[_Train] = []
        self._starts: list[float] = []
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self.speed: float | None = None
        """Bytes per second of the bottleneck, the median of the samples; None before a train of at least five was seen.
        Kept, for senders ask for every datagram."""
        self._arriving: float | None = None
        """Bytes per second of the latest train of which enough has arrived, but not all."""
        self.spread_at: float | None = None
        """When a train last showed the link itself."""
        self.in_flight = 0.0
        """Bytes sent of which nothing is known yet."""

    def sent(self, size: int, now: float, gap_s: float) -> None:
        """A datagram left; it belongs to the last train if that ended less than `gap_s` ago."""
        train = self._trains[-1] if self._trains else None
        if train is None or now - train.last_sent > gap_s or train.count >= TRAIN_MOST:
            if len(self._trains) >= MOST_TRAINS:
                self._drop(MOST_TRAINS // 8)
            train = _Train(now, now)
            self._trains.append(train)
            self._starts.append(now)
        self.in_flight -= train.outstanding
        train.last_sent = now
        train.count += 1
        train.size += size
        self.in_flight += train.outstanding

    def arrived(self, arrival: Arrival) -> None:
        """One of them was received; unknown ones are ignored."""
        train = self._find(arrival.sent_at)
        if train is not None and not train.settled:
            self.in_flight -= train.outstanding
            train.receive(arrival)
            self.in_flight += train.outstanding

    def lost(self, sent_at: float) -> None:
        """One of them was lost."""
        train = self._find(sent_at)
        if train is not None and not train.settled:
            self.in_flight -= train.outstanding
            train.lost += 1
            self.in_flight += train.outstanding

    @property
    def speed_now(self) -> float | None:
        """The same, but what a train that is still arriving shows where that is far less."""
        if self.speed is None or self._arriving is None or self._arriving > self.speed / FAR_SLOWER:
            return self.speed
        return self._arriving

    def settle(self, now: float, give_up_s: float) -> None:
        """Learn from the oldest trains whose fate is known, and forget what is older than `give_up_s`."""
        done = 0
        for train in self._trains:
            if not train.settled and train.last_sent > now - give_up_s:
                break
            done += 1
            found = train.speed()
            if found is not None:
                self._learn(*found, now)
        self._drop(done)
        self._arriving = next((speed for train in reversed(self._trains) if (speed := train.arriving())), None)

    def _learn(self, rate: float, spread: bool, now: float) -> None:
        known = self.speed
        if spread or (known is not None and rate > known):
            self._samples.append(rate)
            self.speed = statistics.median(self._samples)
        if spread:
            self.spread_at = now

    def forget(self) -> None:
        """The path may be another now."""
        self._samples.clear()
        self.speed = self._arriving = None

    def _drop(self, count: int) -> None:
        self.in_flight -= sum(train.outstanding for train in self._trains[:count])
        del self._trains[:count], self._starts[:count]

    def _find(self, sent_at: float) -> _Train | None:
        """The train that was leaving at `sent_at`. Of two that meet in one instant, the unsettled earlier one."""
        at = bisect_right(self._starts, sent_at) - 1
        while at > 0 and self._trains[at].settled and self._trains[at - 1].last_sent >= sent_at:
            at -= 1
        while at > 0 and self._trains[at - 1].last_sent >= sent_at and not self._trains[at - 1].settled:
            at -= 1
        return self._trains[at] if at >= 0 and sent_at <= self._trains[at].last_sent else None


class RoundTrip:
    """Smoothed round trip and its variation (RFC 9002 §5.3), and the least of the last ten seconds."""

    MOST_DOUBLINGS: Final = 4

    def __init__(self) -> None:
        self._doublings = 0
        self.smoothed_s: float | None = None
        self.variation_s = 0.0
        self.latest_s = 0.0
        self._least = WindowedMinimum(WINDOW_S)

    def observe(self, rtt_s: float, now: float) -> None:
        """Take a sample that is free of the peer's own delay."""
        self.latest_s = rtt_s
        self._least.observe(rtt_s, now)
        if self.smoothed_s is None:
            self.smoothed_s, self.variation_s = rtt_s, rtt_s / 2
        else:
            self.variation_s += (abs(self.smoothed_s - rtt_s) - self.variation_s) / 4
            self.smoothed_s += (rtt_s - self.smoothed_s) / 8

    @property
    def least_s(self) -> float | None:
        """None before the first sample."""
        return self._least.value

    @property
    def patience_s(self) -> float:
        """How long an answer may take, by what was measured."""
        if self.smoothed_s is None:
            return 2 * INITIAL_RTT_S
        return self.smoothed_s + max(4 * self.variation_s, GRANULARITY_S) + MAX_REPORT_DELAY_S

    @property
    def reply_s(self) -> float:
        """How long something may take that is not kept back as reports are."""
        return self.patience_s - MAX_REPORT_DELAY_S

    def timeout_s(self) -> float:
        """After which something unreported is given up."""
        return self.patience_s * (1 << self._doublings)

    def gave_up(self) -> None:
        """Nothing came in time: wait longer (RFC 9002 §6.2.1).

        A round trip that has grown beyond the timeout would never be measured otherwise, for what arrives after it was
        given up counts no more.
        """
        self._doublings = min(self._doublings + 1, self.MOST_DOUBLINGS)

    def heard(self) -> None:
        """Something came in time."""
        self._doublings = 0


class StandingQueue:
    """The queue that stands before the bottleneck, in seconds: least recent delay above the least in ten seconds."""

    MOST_RECENT: Final = 64

    def __init__(self) -> None:
        self._base = WindowedMinimum(WINDOW_S)
        self._recent: deque[tuple[float, float]] = deque(maxlen=self.MOST_RECENT)
        self.value_s = 0.0

    def observe(self, arrivals: Sequence[Arrival], span_s: float, now: float) -> None:
        """Take the arrivals of one report; delays of the last `span_s` are recent."""
        if not arrivals:
            return
        least = min(arrival.arrived_at - arrival.sent_at for arrival in arrivals)
        self._base.observe(least, now)
        while self._recent and self._recent[0][0] < now - span_s:
            self._recent.popleft()
        self._recent.append((now, least))
        base = self._base.value
        assert base is not None
        self.value_s = max(0.0, min(delay for _, delay in self._recent) - base)
