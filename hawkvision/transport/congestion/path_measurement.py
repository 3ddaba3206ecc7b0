"""The measurements of a path: losses, delays, the bottleneck's speed, bytes in flight. Controllers decide by them.

`now` is in seconds of a monotonic clock. All state is bounded, whatever is reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from hawkvision.transport.congestion.loss_meter import LossMeter
from hawkvision.transport.congestion.packet_trains import Arrival, PacketTrains

INITIAL_RTT_S: Final = 0.333
"""RFC 9002 §6.2.2."""
MAX_REPORT_DELAY_S: Final = 0.025
"""The longest that a peer delays a report, as RFC 9000's max_ack_delay."""
GRANULARITY_S: Final = 0.001
"""The granularity of timers (RFC 9002 §6.1.2)."""
WINDOW_S: Final = 10.0
"""The memory of the least delay and the least round trip, as in BBR."""


EASED: Final = 2.0
EASED_S: Final = 0.01
"""A path has eased when a round trip is shorter than the smoothed one by this factor and by these seconds, which are
more than jitter: a crowd has gone, or the radio has changed. What was measured before tells nothing of it."""


class WindowedMinimum:
    """The least value of the last `span_s`, in ten buckets; it stays while nothing newer comes."""

    BUCKETS: Final = 10

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self._buckets: deque[tuple[float, float]] = deque(maxlen=self.BUCKETS + 1)
        self.value: float | None = None
        """None before the first value. Cached, because senders read it for each datagram."""

    def observe(self, value: float, now: float) -> None:
        """Take in a value at `now`, which is monotonic."""
        width = self.span_s / self.BUCKETS
        if self._buckets and now < self._buckets[-1][0] + width:
            start, least = self._buckets[-1]
            self._buckets[-1] = (start, min(least, value))
        else:
            self._buckets.append((now, value))
        while self._buckets[0][0] < now - self.span_s:
            self._buckets.popleft()
        self.value = min(least for _, least in self._buckets)


class RoundTrip:
    """Smoothed round trip and its variation (RFC 9002 §5.3), and the least of the last ten seconds."""

    MOST_DOUBLINGS: Final = 4

    def __init__(self) -> None:
        self._doublings = 0
        self.smoothed_s: float | None = None
        self.variation_s = 0.0
        self.latest_s = 0.0
        self._least = WindowedMinimum(WINDOW_S)

    def observe(self, rtt_s: float, now: float) -> bool:
        """Take in a sample without the peer's delay; whether it shows that the path has eased."""
        self.latest_s = rtt_s
        self._least.observe(rtt_s, now)
        before_s = self.smoothed_s
        eased = before_s is not None and rtt_s < min(before_s / EASED, before_s - EASED_S)
        if before_s is None or eased:
            self.smoothed_s, self.variation_s = rtt_s, rtt_s / 2
        else:
            self.variation_s += (abs(before_s - rtt_s) - self.variation_s) / 4
            self.smoothed_s = before_s + (rtt_s - before_s) / 8
        return eased

    @property
    def least_s(self) -> float | None:
        """None before the first sample."""
        return self._least.value

    @property
    def probe_timeout_s(self) -> float:
        """The probe timeout (RFC 9002 §6.2.1): how long a report may take."""
        if self.smoothed_s is None:
            return 2 * INITIAL_RTT_S
        return self.smoothed_s + max(4 * self.variation_s, GRANULARITY_S) + MAX_REPORT_DELAY_S

    @property
    def reply_s(self) -> float:
        """How long a reply may take that is not delayed as reports are."""
        return self.probe_timeout_s - MAX_REPORT_DELAY_S

    def timeout_s(self) -> float:
        """The wait after which an unreported datagram counts as lost."""
        return self.probe_timeout_s * (1 << self._doublings)

    def back_off(self) -> None:
        """No report came in time: wait longer (RFC 9002 §6.2.1).

        A round trip that has grown beyond the timeout would never be measured otherwise, for what arrives after it was
        given up counts no more.
        """
        self._doublings = min(self._doublings + 1, self.MOST_DOUBLINGS)

    def reset_back_off(self) -> None:
        """A report came in time."""
        self._doublings = 0


class StandingQueue:
    """The standing queue before the bottleneck, in seconds: the least recent delay above the least of ten seconds."""

    MOST_RECENT: Final = 64

    def __init__(self) -> None:
        self._base = WindowedMinimum(WINDOW_S)
        self._recent: deque[tuple[float, float]] = deque(maxlen=self.MOST_RECENT)
        self.value_s = 0.0

    def observe(self, arrivals: Sequence[Arrival], span_s: float, now: float) -> None:
        """Take in the arrivals of one report; delays of the last `span_s` are recent."""
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
        self.eased = False
        """Whether the latest report showed that the path has eased (`RoundTrip.observe`)."""

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
        self.eased = rtt_s is not None and rtt_s > 0.0 and self.round_trip.observe(rtt_s, now)
        if self.eased:
            self.trains.renew(max((arrival.sent_at for arrival in arrivals), default=now))
        self.queue.observe(arrivals, max(STANDING_S, self.round_trip.smoothed_s or 0.0), now)
        self.loss.observe(len(arrivals), len(lost), loss_runs, now)
        for arrival in arrivals:
            self.trains.arrived(arrival)
        for sent_at in lost:
            self.trains.lost(sent_at)
        self.trains.settle(now, 2 * self.round_trip.timeout_s())
