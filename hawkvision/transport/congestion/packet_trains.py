"""The bottleneck's speed, from the spacing of datagrams that left back to back.

Packet-train dispersion: Dovrolis, Ramanathan and Moore, INFOCOM 2001.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Final

MAX_RATE: Final = 1.25e9
"""Bytes per second: 10 Gbit/s, more than one Python process can send."""
MOST_TRAINS: Final = 256
"""The trains remembered: 10,240 datagrams in flight, or some seconds of single ones."""
TRAIN_LEAST: Final = 5
TRAIN_MOST: Final = 40
"""The least received datagrams of a train that counts, and the most of one train."""
SPREAD: Final = 1.5
"""The factor by which a train must spread before it may lower the link's speed. Datagrams that leave at our share of a
full link arrive at our share; only those that left much faster show the link itself."""
FAR_SLOWER: Final = 2.0
"""How many times more slowly than known a train must arrive to be believed before the fate of all of it is known: at a
tenth of the link's speed that takes as long as ten images, and others are planned meanwhile."""
SAMPLES: Final = 5
"""The trains whose median is the link's speed; three images suffice to learn of a change."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One datagram that the peer received; `arrived_at` is on the peer's clock, the rest on ours (bytes, seconds)."""

    size: int
    sent_at: float
    arrived_at: float


@dataclass(slots=True)
class _Train:
    """Datagrams that left back to back, and their outcomes."""

    last_sent: float
    count: int = 0
    size: int = 0
    lost: int = 0
    received: int = 0
    received_size: int = 0
    first_of_received: float = math.inf
    last_of_received: float = -math.inf
    """When the first and the last received datagram were sent."""
    times: list[float] = field(default_factory=list)
    """Arrival times on the peer's clock, at most `TRAIN_MOST`."""

    @property
    def outstanding(self) -> float:
        """The bytes without an outcome; lost datagrams count with the mean size."""
        if self.finished:
            return 0.0
        return max(0.0, self.size - self.received_size - self.lost * self.size / self.count)

    @property
    def finished(self) -> bool:
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
        if self.received < TRAIN_LEAST or self.finished:
            return None
        span = max(max(self.times) - min(self.times), 1e-6)
        if span <= SPREAD * (self.last_of_received - self.first_of_received):
            return None
        return self.received_size * (1 - 1 / self.received) / span


class PacketTrains:
    """The datagrams in flight, grouped into trains, and the link's speed that their spacing tells."""

    def __init__(self) -> None:
        self._trains: list[_Train] = []
        self._starts: list[float] = []
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self.speed: float | None = None
        """The bottleneck's bytes per second, the median of the samples; None before the first train that counts.

        Cached, because senders read it for each datagram.
        """
        self._since = -math.inf
        """Trains that ended before tell of another path."""
        self._arriving: float | None = None
        """The bytes per second of the latest train that is still arriving."""
        self.spread_at: float | None = None
        """When a train last showed the link itself."""
        self.in_flight = 0.0
        """The bytes in flight."""

    def sent(self, size: int, now: float, gap_s: float) -> None:
        """Note a departure; it belongs to the last train if that ended less than `gap_s` ago."""
        train = self._trains[-1] if self._trains else None
        if train is None or now - train.last_sent > gap_s or train.count >= TRAIN_MOST:
            if len(self._trains) >= MOST_TRAINS:
                self._drop(MOST_TRAINS // 8)
            train = _Train(now)
            self._trains.append(train)
            self._starts.append(now)
        self.in_flight -= train.outstanding
        train.last_sent = now
        train.count += 1
        train.size += size
        self.in_flight += train.outstanding

    def arrived(self, arrival: Arrival) -> None:
        """Note a received datagram; unknown ones are ignored."""
        train = self._find(arrival.sent_at)
        if train is not None and not train.finished:
            self.in_flight -= train.outstanding
            train.receive(arrival)
            self.in_flight += train.outstanding

    def lost(self, sent_at: float) -> None:
        """Note a lost datagram."""
        train = self._find(sent_at)
        if train is not None and not train.finished:
            self.in_flight -= train.outstanding
            train.lost += 1
            self.in_flight += train.outstanding

    @property
    def speed_now(self) -> float | None:
        """The bottleneck's speed, or that of a train still arriving if it is far less."""
        if self.speed is None or self._arriving is None or self._arriving > self.speed / FAR_SLOWER:
            return self.speed
        return self._arriving

    def settle(self, now: float, give_up_s: float) -> None:
        """Learn from the oldest finished trains, and drop those older than `give_up_s`."""
        done = 0
        for train in self._trains:
            if not train.finished and train.last_sent > now - give_up_s:
                break
            done += 1
            found = train.speed()
            if found is not None and train.last_sent >= self._since:
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

    def renew(self, since: float) -> None:
        """Learn from trains that left since then only; until there is one, the speed stays."""
        self._samples.clear()
        self._since = since

    def forget(self) -> None:
        """Begin again, because the path may have changed."""
        self._samples.clear()
        self.speed = self._arriving = None

    def _drop(self, count: int) -> None:
        self.in_flight -= sum(train.outstanding for train in self._trains[:count])
        del self._trains[:count], self._starts[:count]

    def _find(self, sent_at: float) -> _Train | None:
        """The train that was leaving at `sent_at`; of two at the same time, the unfinished earlier one."""
        at = bisect_right(self._starts, sent_at) - 1
        while at > 0 and self._trains[at].finished and self._trains[at - 1].last_sent >= sent_at:
            at -= 1
        while at > 0 and self._trains[at - 1].last_sent >= sent_at and not self._trains[at - 1].finished:
            at -= 1
        return self._trains[at] if at >= 0 and sent_at <= self._trains[at].last_sent else None
