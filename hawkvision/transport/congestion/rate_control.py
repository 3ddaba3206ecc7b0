"""When a datagram may leave: a token bucket over a congestion controller's rate and window, and a circuit breaker.

Images are small and urgent: 1 to 40 datagrams, up to 50 times a second. A whole image may leave at once if the link
carries it in `BURST_S`; the controller's rate fills the bucket again, and its window bounds what is in flight.

*Probe trains.* A saturated sender, paced at its share, cannot measure the link's speed. So once a second it saves
tokens for a short train.

*Silence.* A second probe timeout without a report halves rate and window, a third halves them again. After three and a
second of silence the circuit breaker opens: one datagram a round trip or second until a report comes (RFC 9002 §7.6,
RFC 8085 §3.1.10). Then the controller begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_meter import LossEstimate
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.congestion.packet_trains import MAX_RATE, Arrival
from hawkvision.transport.congestion.path_measurement import DATAGRAM, GRANULARITY_S, INITIAL_WINDOW, PathMeasurement

MIN_RATE: Final = DATAGRAM / 1.0
"""Bytes per second: a datagram a second."""
MOST_WINDOW: Final = 16 * 2**20
"""Bytes: 1 Gbit/s over 130 ms."""
BREAKER_SILENCES: Final = 3
BREAKER_S: Final = 1.0
"""Silent timeouts and seconds that open the circuit breaker; at 50 % loss both ways some reports fail."""
MOST_HALVINGS: Final = 2
"""The factors of the rate after silent timeouts, before the breaker opens."""
PROBE_TRAIN: Final = 6 * DATAGRAM
PROBE_EVERY_S: Final = 1.0
LONGEST_PROBE_S: Final = 0.1
"""A probe train's bytes, its interval, and the longest that a datagram waits for it."""
TRAIN_GAP_S: Final = 0.002


class RateController:
    """When datagrams may leave on one path. Sans-I/O; `now` is in seconds of a monotonic clock.

    The owner calls `on_packet_sent` for each datagram that asks for a report, `on_report` for each report and each loss
    that it finds, and `on_silence` once per timeout without a report.
    """

    def __init__(self, now: float, congestion: CongestionFactory = LossTolerant) -> None:
        self.path = PathMeasurement()
        self.congestion = congestion(self.path, now)
        self.pacing_rate = self.congestion.pacing_rate
        """The sustained bytes per second."""
        self.congestion_window = self.congestion.congestion_window
        """The bytes that may be in flight."""
        self._trains = self.path.trains
        self._trip = self.path.round_trip
        self._burst = float(INITIAL_WINDOW)
        """The depth of the token bucket, in bytes."""
        self._tokens = self._burst
        self._filled_at = now
        self._silences = 0
        self._received_at = now
        self._broken = False
        """Whether the circuit breaker is open."""
        self._gathering = False
        self._probed_at = now

    @property
    def rtt_s(self) -> float | None:
        """Smoothed round trip; None before the first sample."""
        return self._trip.smoothed_s

    @property
    def latest_rtt_s(self) -> float | None:
        """The latest sample, or the smoothed round trip if that is longer; None before the first sample."""
        smoothed_s = self._trip.smoothed_s
        return None if smoothed_s is None else max(smoothed_s, self._trip.latest_s)

    @property
    def least_rtt_s(self) -> float | None:
        """The least sample of the last seconds, which waited in no queue; None before the first."""
        return self._trip.least_s

    @property
    def newest_rtt_s(self) -> float | None:
        """The latest sample; None before the first. With rare samples, the smoothed value is out of date."""
        return None if self._trip.smoothed_s is None else self._trip.latest_s

    @property
    def loss(self) -> LossEstimate:
        """The measured loss."""
        return self.path.loss.estimate

    def timeout_s(self) -> float:
        """The wait after which an unreported datagram counts as lost (RFC 9002 §6.2.1)."""
        return self._trip.timeout_s()

    def repair_s(self) -> float:
        """How long a repair may take, from the request to the arrival."""
        return self._trip.reply_s

    def transmission_s(self, size: float, now: float) -> float:
        """How long `size` bytes take from now on: the link's time, and beyond a burst the sender's."""
        speed = self._trains.speed_now
        if speed is None or self._broken:
            return size / self.pacing_rate
        self._fill(now)
        return max(size / speed, (size - max(0.0, self._tokens)) / self.pacing_rate)

    def release_at(self, size: int, now: float) -> float:
        """The earliest time at which a datagram of `size` bytes may leave; `now` if at once.

        Ask again then, and after each report: if too much is in flight, only a report or a timeout helps, and the time
        returned is only when to ask again.
        """
        self._fill(now)
        missing = self._needed(size, now) - self._tokens
        at = now + missing / self.pacing_rate if missing > 0.0 else now
        in_flight = self._trains.in_flight
        excess = in_flight + size - self.congestion_window
        # The open breaker's one datagram a second must always leave: only it can end the silence.
        if excess > 0.0 and in_flight > 0.0 and not self._broken:
            at = max(at, now + max(GRANULARITY_S, min(excess, size) / self.pacing_rate))
        if at > now:
            self.path.held_back_at = now
        return at

    def on_packet_sent(self, size: int, now: float) -> None:
        """Note a departure of `size` bytes; if it left before `release_at`, the next ones wait longer."""
        self._fill(now)
        self._tokens = max(self._tokens - size, -self._burst)
        self.congestion.on_packet_sent(size, now)
        self._trains.sent(size, now, max(TRAIN_GAP_S, 1.5 * DATAGRAM / self.congestion.pacing_rate))

    def on_report(
        self,
        arrivals: Sequence[Arrival],
        lost: Sequence[float],
        rtt_s: float | None,
        now: float,
        loss_runs: int = 0,
    ) -> None:
        """Take in the outcomes of datagrams.

        Args:
            arrivals: newly reported, in order of arrival.
            lost: when datagrams newly found lost were sent.
            rtt_s: without the peer's delay; None if the report has none.
            now: seconds.
            loss_runs: the loss runs that begin with `lost`.
        """
        self._fill(now)
        if arrivals:
            self._on_received(now)
        elif lost and now - self._received_at > self.timeout_s():
            self._trip.back_off()
        self.path.observe(arrivals, lost, rtt_s, now, loss_runs)
        if lost:
            self.congestion.on_loss(lost, now)
        if arrivals or rtt_s is not None:
            self.congestion.on_ack(arrivals, rtt_s, now)
        self.congestion.on_report_end(now)
        self._limit()

    def on_spurious_loss(self, received: int, runs: int) -> None:
        """Take back false losses: datagrams that did arrive, and whole runs of them.

        This corrects only the measured loss; resends and lower rates in the meantime stay.
        """
        self.path.loss.retract(received, runs)

    def on_silence(self, now: float) -> None:
        """Note a probe timeout without a report while datagrams are in flight."""
        self._fill(now)
        self._silences += 1
        if self._silences >= BREAKER_SILENCES and now - self._received_at >= BREAKER_S:
            self._broken = True
        self._limit()

    def _on_received(self, now: float) -> None:
        if self._broken:
            self._broken = False
            self._trains.forget()
            self.congestion.on_outage_end(now)
        self._trip.reset_back_off()
        self._silences = 0
        self._received_at = now

    def _limit(self) -> None:
        """Set rate and window: the controller's, reduced by silence."""
        if self._broken:
            self.pacing_rate = DATAGRAM / max(1.0, self._trip.smoothed_s or 0.0)
            self.congestion_window, self._burst = DATAGRAM, float(DATAGRAM)
        else:
            halvings = min(max(0, self._silences - 1), MOST_HALVINGS)
            self.pacing_rate = min(MAX_RATE, max(MIN_RATE, self.congestion.pacing_rate / (1 << halvings)))
            self.congestion_window = min(MOST_WINDOW, max(DATAGRAM, self.congestion.congestion_window >> halvings))
            self._burst = self.path.burst_bytes
        self._tokens = min(self._tokens, self._burst)

    def _fill(self, now: float) -> None:
        elapsed = now - self._filled_at
        if elapsed <= 0.0:  # as for all of a burst but the first
            return
        self._filled_at = now
        self._tokens = min(self._burst, self._tokens + elapsed * self.pacing_rate)

    def _needed(self, size: int, now: float) -> float:
        """The tokens that a datagram needs to leave: its own, or those of a probe train."""
        needed = min(float(size), self._burst)
        if self._tokens >= needed and not self._gathering:
            return needed
        seen_at = self._trains.spread_at
        self._gathering = seen_at is not None or self._trip.smoothed_s is not None
        self._gathering &= now - max(seen_at or 0.0, self._probed_at) > PROBE_EVERY_S
        if not self._gathering:
            return needed
        train = min(float(PROBE_TRAIN), self._burst, max(needed, LONGEST_PROBE_S * self.pacing_rate))
        if self._tokens >= train:
            self._gathering, self._probed_at = False, now
        return train
