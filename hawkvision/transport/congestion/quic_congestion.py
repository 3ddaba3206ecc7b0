"""Congestion control for our QUIC control connections that random loss does not halve, as an aioquic plug-in.

The control connection carries the handshake, keys, request templates and answers: small messages that must not wait.
aioquic's own controllers take every loss for congestion; at 5 % their window falls to a few packets, and a message
waits for many round trips. QUIC's acknowledgements tell less than our own reports: no arrival times, so no one-way
delay and no dispersion. What remains is BBR's model (Cardwell et al., ACM Queue 2016): the largest recent
delivery rate and the least round trip. The window is

    rate × (least round trip + QUEUE_GOAL_S) / (1 − loss)

so a full link's queue stays near the goal, and a short window cannot keep itself short: while the queue is below the
goal, more is sent than was delivered, and the rate is found anew. Loss alone changes nothing but the divisor, for lost
packets fill the window until they are found lost. Loss while the round trip has grown beyond twice the goal is
congestion: the rate is cut to 0.7, once per round trip (CUBIC's factor, RFC 9438).

Beside TCP that fills a deep queue this yields down to the initial window per round trip (RFC 9002 §7.2), which is
enough for what it carries; images go by `rate_control`, which holds its ground.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aioquic.quic.congestion.base import K_INITIAL_WINDOW, QuicCongestionControl, register_congestion_control
from aioquic.quic.packet_builder import QuicSentPacket

from hawkvision.transport.congestion.path_measurement import WindowedMinimum

ALGORITHM: Final = "hawkvision"
"""For `QuicConfiguration.congestion_control_algorithm`; importing this module makes it known to aioquic."""
QUEUE_GOAL_S: Final = 0.025
LEAST_GAIN: Final = 1.25
"""Of the rate times the least round trip: on long paths the goal alone would probe too timidly."""
STARTUP_GAIN: Final = 1.25
STARTUP_ROUNDS: Final = 3
"""The start is over when the rate has not grown by a quarter in three round trips (BBR)."""
RATE_MEMORY_S: Final = 2.0
LEAST_RTT_MEMORY_S: Final = 10.0
DRAIN_S: Final = 0.2
DRAINED_PACKETS: Final = 4
"""On a link that is always full the least round trip is measured anew every ten seconds, with four packets in flight
for a fifth of a second (BBR)."""
DECREASE: Final = 0.7
MOST_LOSS: Final = 0.5
LOSS_GAIN: Final = 1 / 64
MOST_WINDOW: Final = 16 * 2**20
"""Bytes: 1 Gbit/s over 130 ms."""
PERSISTENT_PACKETS: Final = 2
"""In flight after persistent congestion (RFC 9002 §7.6.2)."""


@dataclass(frozen=True, slots=True)
class _Departure:
    """What had been delivered, and when, at the time a packet left."""

    delivered: int
    delivered_at: float
    limited: bool
    """Whether there was less to send than the window allowed."""


class ImagesCongestionControl(QuicCongestionControl):
    """A window driven by delivered bytes and the growth of the round trip; times are aioquic's `now`, in seconds."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._packet = max_datagram_size
        self._out: dict[tuple[object, int], _Departure] = {}
        """One entry per packet in flight; aioquic tells of each one's end."""
        self._delivered = 0
        self._delivered_at = 0.0
        self._slowness = WindowedMinimum(RATE_MEMORY_S)
        """Of delivery rates, negated: the largest is wanted."""
        self._starting = True
        self._stalled = 0
        self._best_at_round = 0.0
        self._round_ends = 0
        """When this much has been delivered."""
        self._loss = 0.0
        self._rtt = 0.0
        self._least_rtt = math.inf
        self._least_rtt_at = 0.0
        self._draining_until: float | None = None
        self._cut = 1.0
        self._cut_at = -math.inf

    @property
    def rate_bytes_s(self) -> float:
        """The largest delivery rate of late, less what congestion has cut."""
        value = self._slowness.value
        return 0.0 if value is None else -value * self._cut

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        """A packet left."""
        assert packet.sent_time is not None
        if not self._out:
            self._delivered_at = packet.sent_time  # time without anything in flight is nobody's slowness
        self.bytes_in_flight += packet.sent_bytes
        limited = self.bytes_in_flight + self._packet < self.congestion_window // 2
        self._out[_key(packet)] = _Departure(self._delivered, self._delivered_at, limited)

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        """A packet arrived: learn how fast."""
        self.bytes_in_flight -= packet.sent_bytes
        departure = self._out.pop(_key(packet), None)
        self._delivered += packet.sent_bytes
        self._delivered_at = now
        self._loss -= LOSS_GAIN * self._loss
        if departure is None:
            return
        if self._starting:
            self.congestion_window = min(self.congestion_window + packet.sent_bytes, MOST_WINDOW)
        elapsed = now - departure.delivered_at
        if elapsed >= min(self._least_rtt, 1.0) and elapsed > 0.0:
            rate = (self._delivered - departure.delivered) / elapsed
            if not departure.limited or rate > self.rate_bytes_s:
                self._slowness.observe(-rate, now)
        if departure.delivered >= self._round_ends:
            self._round_ends = self._delivered
            self._end_round()
        self._update_window()

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        """Packets will not be heard of again, which says nothing of the path."""
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self._out.pop(_key(packet), None)

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        """Packets were lost: congestion only if the queue has grown."""
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self._out.pop(_key(packet), None)
            self._loss += LOSS_GAIN * (1.0 - self._loss)
        queue_s = self._rtt - self._least_rtt
        if queue_s > 2 * QUEUE_GOAL_S and now - self._cut_at > self._rtt:
            self._starting = False
            self._cut = max(0.1, self._cut * DECREASE)
            self._cut_at = now
        self._update_window()

    def on_persistent_congestion(self) -> None:
        """Everything sent for several timeouts was lost: begin again."""
        self.congestion_window = PERSISTENT_PACKETS * self._packet
        self._slowness = WindowedMinimum(RATE_MEMORY_S)
        self._starting, self._stalled, self._best_at_round = True, 0, 0.0

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        """A round trip was measured; it includes the peer's delay."""
        self._rtt = rtt if self._rtt == 0.0 else self._rtt + (rtt - self._rtt) / 8
        if rtt <= self._least_rtt:
            self._least_rtt, self._least_rtt_at = rtt, now
        if self._draining_until is None:
            if now - self._least_rtt_at > LEAST_RTT_MEMORY_S:
                self._draining_until = now + max(DRAIN_S, 2 * rtt)
        elif now >= self._draining_until:
            self._least_rtt, self._least_rtt_at, self._draining_until = rtt, now, None
        if self._starting and rtt - self._least_rtt > max(QUEUE_GOAL_S, self._least_rtt / 2):
            self._starting = False
        self._update_window()

    def _end_round(self) -> None:
        """A round trip's worth was delivered."""
        self._cut = min(1.0, self._cut * 1.1)
        if not self._starting:
            return
        if self.rate_bytes_s > STARTUP_GAIN * self._best_at_round:
            self._best_at_round, self._stalled = self.rate_bytes_s, 0
        else:
            self._stalled += 1
            self._starting = self._stalled < STARTUP_ROUNDS

    def _update_window(self) -> None:
        if self._draining_until is not None:
            self.congestion_window = DRAINED_PACKETS * self._packet
            return
        if self._starting or not math.isfinite(self._least_rtt):
            return
        span_s = max(LEAST_GAIN * self._least_rtt, self._least_rtt + QUEUE_GOAL_S)
        window = int(self.rate_bytes_s * span_s / (1.0 - min(self._loss, MOST_LOSS)))
        self.congestion_window = min(max(window, K_INITIAL_WINDOW * self._packet), MOST_WINDOW)


def _key(packet: QuicSentPacket) -> tuple[object, int]:
    return packet.epoch, packet.packet_number


register_congestion_control(ALGORITHM, ImagesCongestionControl)
