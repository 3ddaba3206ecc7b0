"""BBR version 1, from draft-cardwell-iccrg-bbr-congestion-control-00 and draft-cheng-iccrg-delivery-rate-estimation-00.

Rate and window follow a model of the path: the largest delivery rate of ten round trips (`btl_bw`) and the least round
trip of ten seconds (`rt_prop`). Delay moves both; loss moves neither.

    STARTUP ── rate grew by less than a quarter in three rounds ──► DRAIN ── in flight ≤ BDP ──► PROBE_BW ◄─┐
                                                                                                    │       │
                                                    rt_prop not seen for 10 s: four datagrams ◄─────┘       │
                                                    in flight for 0.2 s (PROBE_RTT) ────────────────────────┘

Left out, because datagrams are not a byte stream: recovery's packet conservation (nothing is retransmitted in order)
and the policer detection of later drafts. The token bucket in `RateController` takes the place of `send_quantum`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hawkvision.transport.congestion.controller import CongestionController
from hawkvision.transport.congestion.packet_trains import MAX_RATE, Arrival
from hawkvision.transport.congestion.path_measurement import DATAGRAM, INITIAL_RTT_S, INITIAL_WINDOW, PathMeasurement

HIGH_GAIN: Final = 2.0 / math.log(2.0)
"""The least pacing gain that doubles the delivery rate each round."""
CYCLE: Final = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Pacing gains of PROBE_BW: probe, drain what that queued, cruise."""
CRUISE: Final = 2
WINDOW_GAIN: Final = 2.0
"""Of the window in PROBE_BW: reports are delayed and lost."""
RATE_ROUNDS: Final = 10
"""Round trips over which the largest delivery rate is taken."""
FULL_GROWTH: Final = 1.25
FULL_ROUNDS: Final = 3
"""The pipe is full when the rate has not grown by a quarter in three rounds."""
RT_PROP_S: Final = 10.0
PROBE_RTT_S: Final = 0.2
LEAST_WINDOW: Final = 4 * DATAGRAM
MOST_SENT: Final = 2_048
"""Departures remembered; the oldest make room."""
MIN_RATE: Final = DATAGRAM / 1.0


class State(Enum):
    """The state of BBR; the module's docstring draws the transitions."""

    STARTUP = "startup"
    DRAIN = "drain"
    PROBE_BW = "probe_bw"
    PROBE_RTT = "probe_rtt"


@dataclass(frozen=True, slots=True)
class _Departure:
    """The delivered bytes, and the time of delivery, when a datagram left."""

    sent_at: float
    delivered: int
    delivered_at: float
    first_sent_at: float
    app_limited: bool


class Bbr(CongestionController):
    """BBR version 1."""

    def __init__(self, path: PathMeasurement, now: float) -> None:
        self._path = path
        self._delivered = self._acknowledged = 0
        """Delivered bytes: in all, and by the present report."""
        self._delivered_at = self._first_sent_at = now
        self._departures: dict[float, _Departure] = {}
        """By time; datagrams that left at the same time share one."""
        self._newest: _Departure | None = None
        """The latest departure that this report names."""
        self._rt_prop_s = math.inf
        self._begin(now)

    def _begin(self, now: float) -> None:
        self.state = State.STARTUP
        self._pacing_gain = self._window_gain = HIGH_GAIN
        self._round = 0
        self._round_ends_at = self._delivered
        """A round ends when a datagram is acknowledged that left after this much was delivered."""
        self._rates: deque[tuple[int, float]] = deque()
        """(round, rate), falling: the first is the largest of the last `RATE_ROUNDS`."""
        self._full_rate, self._full_rounds = 0.0, 0
        self._cycle, self._cycle_at = CRUISE, now
        self._rt_prop_at = now
        self._expired = False
        """Whether the least round trip was older than `RT_PROP_S` at the last sample."""
        self._probe_rtt_until: float | None = None
        self.congestion_window = INITIAL_WINDOW
        rtt_s = self._path.round_trip.smoothed_s or INITIAL_RTT_S
        self.pacing_rate = min(MAX_RATE, HIGH_GAIN * INITIAL_WINDOW / rtt_s)

    @property
    def btl_bw(self) -> float:
        """The largest delivery rate of the last `RATE_ROUNDS` rounds, bytes per second; 0 before the first sample."""
        return self._rates[0][1] if self._rates else 0.0

    def on_packet_sent(self, size: int, now: float) -> None:
        """Note the bytes delivered by then."""
        path = self._path
        if path.in_flight <= 0.0:
            self._first_sent_at = self._delivered_at = now
        if now not in self._departures:
            if len(self._departures) >= MOST_SENT:
                del self._departures[next(iter(self._departures))]
            limited = path.app_limited(now)
            self._departures[now] = _Departure(now, self._delivered, self._delivered_at, self._first_sent_at, limited)

    def on_ack(self, arrivals: Sequence[Arrival], rtt_s: float | None, now: float) -> None:
        """Take in a sample of the delivery rate and of the round trip."""
        for arrival in arrivals:
            self._delivered += arrival.size
            self._delivered_at = now
            departure = self._departures.get(arrival.sent_at)
            if departure is not None and (self._newest is None or departure.sent_at > self._newest.sent_at):
                self._newest = departure
        self._acknowledged += sum(arrival.size for arrival in arrivals)
        if rtt_s is not None and rtt_s > 0.0:
            self._expired = now - self._rt_prop_at > RT_PROP_S
            if rtt_s <= self._rt_prop_s or self._expired:
                self._rt_prop_s, self._rt_prop_at = rtt_s, now

    def on_loss(self, lost: Sequence[float], now: float) -> None:
        """Loss does not move the model."""

    def on_report_end(self, now: float) -> None:
        """Update the model, the state, the rate and the window."""
        newest, self._newest = self._newest, None
        if newest is None:
            return
        self._first_sent_at = newest.sent_at
        new_round = newest.delivered >= self._round_ends_at
        if new_round:
            self._round_ends_at = self._delivered
            self._round += 1
            self._forget(newest.sent_at)
        self._sample(newest, now)
        if new_round and not newest.app_limited:
            self._check_full_pipe()
        self._move(now)
        self._control()
        self._acknowledged = 0

    def on_outage_end(self, now: float) -> None:
        """Begin with STARTUP again."""
        self._departures.clear()
        self._delivered_at = self._first_sent_at = now
        self._rt_prop_s = math.inf
        self._begin(now)

    def _sample(self, newest: _Departure, now: float) -> None:
        """The delivery rate since `newest` left: what was delivered, over the longer of sending and acknowledging it.

        Shorter than the least round trip is no interval but a burst of acknowledgements.
        """
        interval_s = max(newest.sent_at - newest.first_sent_at, now - newest.delivered_at)
        if interval_s <= 0.0 or interval_s < self._path_rtt_s:
            return
        rate = min(MAX_RATE, (self._delivered - newest.delivered) / interval_s)
        while self._rates and self._rates[0][0] <= self._round - RATE_ROUNDS and len(self._rates) > 1:
            self._rates.popleft()
        if rate <= 0.0 or (newest.app_limited and rate < self.btl_bw):
            return
        if self._rates and self._rates[0][0] <= self._round - RATE_ROUNDS:
            self._rates.popleft()
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((self._round, rate))

    @property
    def _path_rtt_s(self) -> float:
        return self._rt_prop_s if math.isfinite(self._rt_prop_s) else 0.0

    def _forget(self, sent_at: float) -> None:
        """Drop departures long before an acknowledged one: they are lost, or were acknowledged before."""
        oldest = sent_at - 2.0 * self._path.round_trip.timeout_s()
        while self._departures and (first := next(iter(self._departures))) < oldest:
            del self._departures[first]

    def _check_full_pipe(self) -> None:
        if self.btl_bw >= FULL_GROWTH * self._full_rate:
            self._full_rate, self._full_rounds = self.btl_bw, 0
        else:
            self._full_rounds += 1

    @property
    def _pipe_is_full(self) -> bool:
        return self._full_rounds >= FULL_ROUNDS

    def _bdp(self, gain: float) -> float:
        """The window: `gain` times the bytes that the path holds without a queue."""
        if not math.isfinite(self._rt_prop_s) or not self._rates:
            return INITIAL_WINDOW
        return gain * self.btl_bw * self._rt_prop_s

    def _move(self, now: float) -> None:
        """Move from state to state."""
        in_flight = self._path.in_flight
        if self.state is State.STARTUP and self._pipe_is_full:
            self.state = State.DRAIN
            self._pacing_gain = 1.0 / HIGH_GAIN
        if self.state is State.DRAIN and in_flight <= self._bdp(1.0):
            self._probe_bw(now)
        if self.state is State.PROBE_BW and self._cycle_is_over(now, in_flight):
            self._cycle, self._cycle_at = (self._cycle + 1) % len(CYCLE), now
            self._pacing_gain = CYCLE[self._cycle]
        if self.state is not State.PROBE_RTT:
            if self._expired:
                self.state, self._pacing_gain, self._window_gain = State.PROBE_RTT, 1.0, 1.0
                self._probe_rtt_until = None
        elif self._probe_rtt_until is None:
            if in_flight <= LEAST_WINDOW:
                self._probe_rtt_until = now + PROBE_RTT_S
        elif now >= self._probe_rtt_until:
            self._rt_prop_at, self._expired = now, False
            if self._pipe_is_full:
                self._probe_bw(now)
            else:
                self.state, self._pacing_gain, self._window_gain = State.STARTUP, HIGH_GAIN, HIGH_GAIN

    def _probe_bw(self, now: float) -> None:
        self.state, self._window_gain = State.PROBE_BW, WINDOW_GAIN
        self._cycle, self._cycle_at = CRUISE, now
        self._pacing_gain = CYCLE[CRUISE]

    def _cycle_is_over(self, now: float, in_flight: float) -> bool:
        full_length = now - self._cycle_at > self._path_rtt_s
        if self._pacing_gain > 1.0:
            datagram = self._path.loss.estimate.ratio > 0.0
            return full_length and (datagram or in_flight >= self._bdp(self._pacing_gain))
        if self._pacing_gain < 1.0:
            return full_length or in_flight <= self._bdp(1.0)
        return full_length

    def _control(self) -> None:
        """Rate and window of the model; before the pipe is full they only grow."""
        rate = self._pacing_gain * self.btl_bw
        if rate > 0.0 and (self._pipe_is_full or rate > self.pacing_rate):
            self.pacing_rate = min(MAX_RATE, max(MIN_RATE, rate))
        if self.state is State.PROBE_RTT:
            self.congestion_window = LEAST_WINDOW
            return
        target = max(LEAST_WINDOW, int(self._bdp(self._window_gain)) + 3 * DATAGRAM)
        if self._pipe_is_full:
            self.congestion_window = min(self.congestion_window + self._acknowledged, target)
        elif self.congestion_window < target or self._delivered < INITIAL_WINDOW:
            self.congestion_window += self._acknowledged
        self.congestion_window = max(LEAST_WINDOW, self.congestion_window)
