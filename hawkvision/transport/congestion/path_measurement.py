"""The measurements of a path: losses, delays, the bottleneck's speed, bytes in flight. Controllers decide by them.

`now` is in seconds of a monotonic clock. All state is bounded, whatever is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from hawkvision.transport.congestion.delays import INITIAL_RTT_S, RoundTrip, StandingQueue
from hawkvision.transport.congestion.loss_meter import LossMeter
from hawkvision.transport.congestion.packet_trains import Arrival, PacketTrains

DATAGRAM: Final = 1_200
"""The bytes of the largest datagram."""
INITIAL_WINDOW: Final = 12 * DATAGRAM
"""The bytes that leave at once on an unknown path: 14,400, as the ten segments of RFC 6928."""
BURST_S: Final = 0.025
"""The link's time whose bytes may leave at once. Below 20 ms, radio schedulers' delays look like a queue."""
LEAST_BURST: Final = 6 * DATAGRAM
MOST_BURST: Final = 40 * DATAGRAM
"""The bounds of a burst in bytes: enough to measure a train's spacing; one image of the largest kind."""
STANDING_S: Final = 0.05
"""A queue is standing if it lasts this long and a round trip."""


class PathMeasurement:
    """The state of one path."""

    def __init__(self) -> None:
        self.round_trip = RoundTrip()
        self.queue = StandingQueue()
        self.loss = LossMeter()
        self.trains = PacketTrains()
        self.held_back_at = -math.inf
        """When the sender last had to wait for its rate or window."""

    @property
    def in_flight(self) -> float:
        """The bytes in flight."""
        return self.trains.in_flight

    @property
    def burst_bytes(self) -> float:
        """The bytes that may leave at once: an image, at most what the link carries in `BURST_S`."""
        speed = self.trains.speed
        if speed is None:
            return INITIAL_WINDOW
        return min(MOST_BURST, max(LEAST_BURST, speed * BURST_S))

    def app_limited(self, now: float) -> bool:
        """Whether the sender sends less than it may: it did not wait in the last round trip."""
        return now - self.held_back_at > (self.round_trip.smoothed_s or INITIAL_RTT_S)

    def observe(
        self, arrivals: Sequence[Arrival], lost: Sequence[float], rtt_s: float | None, now: float, loss_runs: int
    ) -> None:
        """Take in the arguments of `RateController.on_report`."""
        if rtt_s is not None and rtt_s > 0.0:
            self.round_trip.observe(rtt_s, now)
        self.queue.observe(arrivals, max(STANDING_S, self.round_trip.smoothed_s or 0.0), now)
        self.loss.observe(len(arrivals), len(lost), loss_runs, now)
        for arrival in arrivals:
            self.trains.arrived(arrival)
        for sent_at in lost:
            self.trains.lost(sent_at)
        self.trains.settle(now, 2 * self.round_trip.timeout_s())
