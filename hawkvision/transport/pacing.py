"""When a datagram may leave: rate control that bursts a picture, bears random loss, and shares a queue.

Pictures are small and hurried: 1 to 40 datagrams, a few to 50 times a second. What must not happen is a picture that
waits at its sender for a window to open. What must not happen either is a queue in the network that grows because we
do not listen (RFC 8085 §3.1). Four ideas, each with its source:

*Two speeds.* The bottleneck's speed is read off one picture: datagrams that leave back to back arrive spaced by it
(packet-train dispersion; Dovrolis, Ramanathan and Moore, INFOCOM 2001). It sets how much may leave at once:
`QUEUE_GOAL_S` of the link's time. The sustained rate fills the bucket again, and is what shares the link. An
application-limited sender, which ours nearly always is, feels only the first.

*Delay says full, loss does not.* One-way delay above its least in ten seconds is queue (LEDBAT, RFC 6817; SCReAM,
RFC 8298; NADA, RFC 8698). Clocks need not agree, for their offset cancels, and 50 ppm of drift make 0.5 ms in ten
seconds. Of the delays in the last tenth of a second the least counts, because a queue that stands is everybody's
problem and one picture's own burst is nobody's (BBR; Cardwell et al., ACM Queue 2016). The rate grows while the
standing queue is below its goal and shrinks above it. What is lost while the queue is short is radio's affair. As in
BBR, the bytes in flight are also bounded by the link's speed times the round trip plus the goal, so that even a wrong
rate makes a bounded queue.

        q = standing queue          one step per round trip
        ┌──────────┐ capacity known, or q > goal ┌──────────┐ no short queue for DRAIN_AFTER ┌──────────┐
        │ STARTING ├────────────────────────────►│ TRACKING ├───────────────────────────────►│ DRAINING │
        │ rate × 2 │                             │ delay    │◄───────────────────────────────┤ rate / 2 │
        └──────────┘                             └──────────┘   q fell: the queue was ours   └────┬─────┘
                                                       ▲  q stays short     ┌───────────┐         │ q stayed:
                                                       └────────────────────┤ COMPETING ◄─────────┘ another's
                                                                            │ AIMD      │
                                                                            └───────────┘
*Competing.* A TCP flow fills a drop-tail queue whatever we do, and a pure delay controller would yield to it until
nothing is left. As in Copa (Arun and Balakrishnan, NSDI 2018) the sender finds out by draining: if the queue stays
though we hold back, it is another's, and then the only fair language is TCP's: one datagram more each round trip, 0.7
of the rate after a loss (CUBIC's factor, RFC 9438), counting only loss beyond what the link loses with a short queue. A
floor of `LEAST_SHARE` of the link keeps a sender alive beside BBR, which hears no loss; it falls when the excess loss says
that many keep to such a floor (RFC 8085 §3.1: congestion collapse comes before any one sender's comfort). Draining
also shows the path without queue, so that the base of the delay stays true on a saturated link.

*Silence.* Nothing reported for a probe timeout halves the rate; for three, the circuit breaker opens: one datagram a
round trip or second until a report comes (RFC 9002 §7.6, RFC 8085 §3.1.10). Then it starts afresh.

Before any report, one initial window leaves at once (RFC 6928), and then as much per initial round trip (RFC 9002).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hawkvision.transport.feedback import (
    GRANULARITY_S,
    INITIAL_RTT_S,
    MAX_RATE,
    MAX_REPORT_DELAY_S,
    Arrival,
    LossEstimate,
    LossMeter,
    RoundTrip,
    StandingQueue,
    Trains,
)

__all__ = ["Arrival", "LossEstimate", "Mode", "RateController"]

DATAGRAM: Final = 1_200
"""Bytes; the largest that is sent."""
INITIAL_WINDOW: Final = 12 * DATAGRAM
"""Bytes that leave at once on an unknown path: 14,400, as the ten segments of RFC 6928."""
QUEUE_GOAL_S: Final = 0.025
"""Standing queue that is aimed at on a full link, and the link time that may leave at once. NADA takes 10 ms and SCReAM
60; below 20, radio schedulers' own delays look like a queue."""
SHORT_QUEUE_S: Final = 0.010
"""A queue no longer than this has been drained: the jitter that a minimum over a tenth of a second leaves."""
MOST_BURST: Final = 40 * DATAGRAM
LEAST_BURST: Final = 6 * DATAGRAM
"""Depth of the token bucket: one picture, of the largest kind; at least what a train's spacing can be read off."""
MIN_RATE: Final = DATAGRAM / 1.0
"""Bytes per second: a datagram a second."""
HEADROOM: Final = 1.1
"""Of the measured speed: a sender that is never faster than its estimate never learns that the link became faster."""
STANDING_S: Final = 0.1
DRAIN_AFTER_S: Final = 1.0
"""A queue that was not short for so long is asked whose it is; that costs some 3 % of a full link."""
COMPETING_EXIT_S: Final = 0.5
"""Of short queue, before delay rules again: a CUBIC flow's queue is short for less after each of its losses."""
GROWTH: Final = 0.05
"""Of the link's speed, per round trip, while the queue is short."""
DECREASE: Final = 0.7
LEAST_SHARE: Final = 0.2
FAIR_START: Final = 0.35
"""Of the link's speed: where competing begins at least, below the half that is fair beside one flow."""
CROWDED_LOSS: Final = 0.15
"""Excess loss above which the floor is given up."""
BREAKER_SILENCES: Final = 3
TRAIN_GAP_S: Final = 0.002


class Mode(Enum):
    """What rules the sustained rate; the file's docstring draws the transitions."""

    STARTING = "starting"
    TRACKING = "tracking"
    DRAINING = "draining"
    COMPETING = "competing"


class RateController:
    """When datagrams may leave on one path. No clock, no sockets; `now` is seconds of a clock that never goes back.

    Its owner calls `sent` for every datagram that asks for a report, `reported` for every report and every loss it
    finds, and `silent` once per timeout without any report.
    """

    def __init__(self, now: float) -> None:
        self.mode = Mode.STARTING
        self._rate = INITIAL_WINDOW / INITIAL_RTT_S
        self._tokens = float(INITIAL_WINDOW)
        self._filled_at = now
        self._trains = Trains()
        self._trip = RoundTrip()
        self._queue = StandingQueue()
        self._loss = LossMeter()
        self._radio_loss = 0.0
        """Share that is lost while the queue is short: what no rate of ours would change."""
        self._excess_loss = 0.0
        self._silences = 0
        self._round = _Round(now)
        self._short_at = now
        """When the queue was last seen short."""
        self._long_at = now
        self._drained_by = now

    @property
    def rate_bytes_s(self) -> float:
        """What may be sent for long, bytes per second."""
        return self._rate

    @property
    def link_bytes_s(self) -> float | None:
        """The bottleneck's speed, bytes per second; None before a train of datagrams was seen."""
        return self._trains.speed

    @property
    def rtt_s(self) -> float | None:
        """Smoothed round trip; None before the first sample."""
        return self._trip.smoothed_s

    @property
    def min_rtt_s(self) -> float | None:
        """Least round trip of the last ten seconds; None before the first sample."""
        return self._trip.least_s

    @property
    def queue_s(self) -> float:
        """The queue that stands at the bottleneck, without the sender's own bursts."""
        return self._queue.value_s

    @property
    def loss(self) -> LossEstimate:
        """What the path loses."""
        return self._loss.estimate

    @property
    def backlog_allowed(self) -> int:
        """Bytes that may be in flight unreported.

        The link's content without queue, the queue that is aimed at, what waits in a report, one burst; and what was
        lost, because nobody knows of it before the timeout.
        """
        if self._broken:
            return DATAGRAM
        rtt_s = self._trip.least_s
        if rtt_s is None:
            return 2 * INITIAL_WINDOW
        rate = self._rate if self.mode is Mode.COMPETING else min(self._rate, self._trains.speed or self._rate)
        queue_s = max(QUEUE_GOAL_S, self.queue_s) if self.mode is Mode.COMPETING else QUEUE_GOAL_S
        seconds = rtt_s + queue_s + MAX_REPORT_DELAY_S + self._loss.estimate.ratio * self.timeout_s()
        return int(rate * seconds + self._depth)

    def timeout_s(self) -> float:
        """After which a datagram of which nothing was reported counts as lost (RFC 9002 §6.2.1)."""
        return self._trip.timeout_s()

    def sent(self, size: int, now: float) -> None:
        """A datagram of `size` bytes left; it may have left before `release_at`, then the next ones wait longer."""
        self._fill(now)
        self._tokens = max(self._tokens - size, -self._depth)
        self._trains.sent(size, now, max(TRAIN_GAP_S, 1.5 * DATAGRAM / self._rate))
        self._round.sent += size

    def release_at(self, size: int, now: float) -> float:
        """The earliest time at which a datagram of `size` bytes may leave; `now` if at once.

        Ask again then, and after every report: too much in flight ends by a report or a timeout, not by waiting, and
        the time returned is then only when to ask again.
        """
        self._fill(now)
        missing = min(size, self._depth) - self._tokens
        at = now + missing / self._rate if missing > 0.0 else now
        excess = self._trains.in_flight + size - self.backlog_allowed
        if excess > 0.0 and self._trains.in_flight > 0.0:
            at = max(at, now + max(GRANULARITY_S, min(excess, size) / self._rate))
        return at

    def reported(
        self,
        arrivals: Sequence[Arrival],
        lost: Sequence[float],
        rtt_s: float | None,
        now: float,
        runs: Sequence[int] = (),
    ) -> None:
        """Learn what became of datagrams.

        Arrivals are newly reported, in order of arrival; `lost` are the times when datagrams newly found lost were
        sent, `runs` the lengths of their runs; `rtt_s` is without the peer's delay.
        """
        self._fill(now)
        if arrivals and self._silences:
            self._heard_again(now)
        if rtt_s is not None and rtt_s > 0.0:
            self._trip.observe(rtt_s, now)
        self._queue.observe(arrivals, max(STANDING_S, 1.5 * (self._trip.smoothed_s or 0.0)), now)
        self._loss.observe(len(arrivals), len(lost), runs, now)
        short = self.queue_s < QUEUE_GOAL_S
        for arrival in arrivals:
            self._trains.arrived(arrival)
        for sent_at in lost:
            self._trains.lost(sent_at)
        self._trains.frozen = self.mode is Mode.COMPETING
        self._trains.settle(now, short_queue=short, give_up_s=2 * self.timeout_s())
        self._round.received += len(arrivals)
        self._round.lost += len(lost)
        if self._trip.smoothed_s is not None and now - self._round.began >= max(self._trip.smoothed_s, 0.01):
            self._step(now)

    def silent(self, now: float) -> None:
        """Nothing was reported for a probe timeout although datagrams are out."""
        self._fill(now)
        self._silences = min(self._silences + 1, BREAKER_SILENCES)
        if self._broken:
            self._rate = DATAGRAM / max(1.0, self._trip.smoothed_s or 0.0)
        else:
            self._rate = max(MIN_RATE, self._rate / 2)
        self._tokens = min(self._tokens, self._depth)

    @property
    def _broken(self) -> bool:
        """Whether the circuit breaker is open."""
        return self._silences >= BREAKER_SILENCES

    @property
    def _depth(self) -> float:
        """Bytes that may leave at once: one picture, and no more than the link passes in `QUEUE_GOAL_S`."""
        if self._broken:
            return DATAGRAM
        speed = self._trains.speed
        if speed is None:
            return INITIAL_WINDOW
        return min(MOST_BURST, max(LEAST_BURST, speed * QUEUE_GOAL_S))

    def _fill(self, now: float) -> None:
        elapsed = max(0.0, now - self._filled_at)
        self._filled_at = max(now, self._filled_at)
        self._tokens = min(self._depth, self._tokens + elapsed * self._rate)

    def _heard_again(self, now: float) -> None:
        if self._broken:
            self._trains.forget()
            self.mode = Mode.STARTING
            self._rate = INITIAL_WINDOW / max(INITIAL_RTT_S, self._trip.smoothed_s or 0.0)
        self._silences = 0
        self._short_at = self._long_at = now

    def _step(self, now: float) -> None:
        """One round trip is over: move the rate."""
        past, self._round = self._round, _Round(now)
        elapsed_s = now - past.began
        if self.queue_s < SHORT_QUEUE_S:
            self._short_at = now
        else:
            self._long_at = now
        self._weigh_loss(past)
        used = past.sent >= 0.5 * self._rate * elapsed_s
        match self.mode:
            case Mode.STARTING:
                self._start(used)
            case Mode.TRACKING:
                self._track(now)
            case Mode.DRAINING:
                self._drain(now)
            case Mode.COMPETING:
                self._compete(past, now, used)
        speed = self._trains.speed
        most = MAX_RATE if speed is None else HEADROOM * speed
        self._rate = max(MIN_RATE, min(self._rate, most, MAX_RATE))

    def _weigh_loss(self, past: _Round) -> None:
        outcomes = past.received + past.lost
        if not outcomes:
            return
        gain = min(0.5, outcomes / 500)
        if self.queue_s < QUEUE_GOAL_S:
            self._radio_loss += gain * (past.lost / outcomes - self._radio_loss)
        self._excess_loss += 2 * gain * (max(0.0, past.lost / outcomes - self._radio_loss) - self._excess_loss)

    def _start(self, used: bool) -> None:
        speed = self._trains.speed
        if self.queue_s > QUEUE_GOAL_S or (speed is not None and self._rate >= speed):
            self.mode = Mode.TRACKING
        elif speed is not None or used:
            window = INITIAL_WINDOW / (self._trip.smoothed_s or INITIAL_RTT_S)
            self._rate = max(2 * self._rate, window)

    def _track(self, now: float) -> None:
        rtt_s = self._trip.smoothed_s or INITIAL_RTT_S
        speed = self._trains.speed or self._rate
        if self.queue_s <= QUEUE_GOAL_S:
            self._rate += max(GROWTH * speed, DATAGRAM / rtt_s)
        else:
            over_s = self.queue_s - QUEUE_GOAL_S
            self._rate = min(self._rate, speed) * (1.0 - min(1.0 - DECREASE, over_s / (over_s + rtt_s)))
            self._rate = max(self._rate, LEAST_SHARE * speed)
        if now - self._short_at > max(DRAIN_AFTER_S, 5 * rtt_s):
            self.mode = Mode.DRAINING
            self._rate /= 2
            self._drained_by = now + 2 * self.queue_s + 2 * rtt_s + STANDING_S

    def _drain(self, now: float) -> None:
        if self.queue_s < SHORT_QUEUE_S:
            self.mode = Mode.TRACKING
            self._rate *= 2
        elif now >= self._drained_by:
            self.mode = Mode.COMPETING
            self._rate = max(2 * self._rate, FAIR_START * (self._trains.speed or 0.0))

    def _compete(self, past: _Round, now: float, used: bool) -> None:
        rtt_s = self._trip.smoothed_s or INITIAL_RTT_S
        expected = 2 * self._radio_loss * (past.received + past.lost)
        if now - self._long_at > COMPETING_EXIT_S:
            self.mode = Mode.TRACKING
        elif past.lost > expected:
            self._rate *= DECREASE
        elif used:
            self._rate += DATAGRAM / rtt_s
        if self._excess_loss < CROWDED_LOSS:
            self._rate = max(self._rate, LEAST_SHARE * (self._trains.speed or 0.0))


@dataclass(slots=True)
class _Round:
    began: float
    sent: int = 0
    received: int = 0
    lost: int = 0
